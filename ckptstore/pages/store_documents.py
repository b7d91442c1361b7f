"""Documents of the store as a whole: its bytes by run, role and age, and its health."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from ckptstore.catalog.commits import Commit
from ckptstore.catalog.content_ops import Condemn, Swept, Verified
from ckptstore.catalog.state import Op
from ckptstore.maintenance.reports.documents import name_document, role_document
from ckptstore.maintenance.reports.replica_lag import replica_lags
from ckptstore.maintenance.reports.usage import by_role, sum_roles
from ckptstore.model import Version
from ckptstore.pages.run_documents import RUNS_MAX
from ckptstore.store import Store

_DAY_MS: Final = 86_400_000
_AGES: Final = {"a day": 1, "a week": 7, "30 days": 30, "a year": 365, "more": 1 << 40}
"""Upper bounds of ages, in days."""
_COMMITS: Final = 100
"""Newest commits that are searched for a verification and a collection."""
_COMMITS_SHOWN: Final = 30
_DAMAGED_MAX: Final = 50


def storage(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return bytes by run, role, age and level, as counted by the saves."""
    versions = list(store.repo.refresh().versions())
    groups: dict[str, list[Version]] = {}
    ages: dict[str, list[Version]] = {age: [] for age in _AGES}
    now_ms = store.repo.environment.now_ms()
    for one in versions:
        groups.setdefault(one.run, []).append(one)
        days = (now_ms - one.created_at.timestamp() * 1000) / _DAY_MS
        ages[next(age for age, most in _AGES.items() if days <= most)].append(one)
    runs = [{"name": run, **_bytes(group)} for run, group in groups.items()]
    runs.sort(key=lambda run: -run["stored_bytes"])
    return {
        **_bytes(versions),
        "runs_count": len(runs),
        "runs": runs[:RUNS_MAX],
        "ages": [{"name": age, **_bytes(group)} for age, group in ages.items()],
        "levels": Counter(one.level for one in versions),
    }


def _bytes(versions: Iterable[Version]) -> dict[str, Any]:
    roles = by_role(versions)
    return {
        "versions": sum(1 for _ in versions),
        **role_document(sum_roles(roles.values())),
        "roles": {role: role_document(part) for role, part in sorted(roles.items())},
    }


def health(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the last verification and collection, lags of replicas and the newest commits."""
    catalog = store.repo.refresh()
    commits = store.log(first=max(1, catalog.number - _COMMITS + 1))
    versions = list(catalog.versions())
    damaged = [one for one in versions if one.damaged]
    return {
        "versions": len(versions),
        "verified": sum(one.verified for one in versions),
        "damaged_count": len(damaged),
        "damaged": [name_document(one) for one in damaged[:_DAMAGED_MAX]],
        "deleted": sum(1 for _ in catalog.versions(deleted=True)),
        "condemned": len(catalog.condemned),
        "commits_read": len(commits),
        "last_verify": _last(commits, Verified),
        "last_gc": _last(commits, Condemn, Swept),
        "replicas": [
            {
                **msgspec.to_builtins(lag.replica),
                "versions": lag.versions_count,
                "missing": lag.missing_count,
                "missing_bytes": lag.missing_bytes,
                "oldest_ms": lag.oldest and round(lag.oldest.created_at.timestamp() * 1000),
            }
            for lag in replica_lags(catalog)
        ],
        "commits": [
            {
                "number": commit.number,
                "at_ms": commit.body.at_ms,
                "by": commit.body.by,
                "what": ", ".join(dict.fromkeys(map(_what, commit.ops[:_COMMITS_SHOWN]))),
            }
            for commit in commits[: -_COMMITS_SHOWN - 1 : -1]
        ],
    }


def _last(commits: Iterable[Commit], *kinds: type[Op]) -> dict[str, int] | None:
    """Return number and time of the newest of some commits with an operation of these kinds."""
    found = [one for one in commits if any(isinstance(op, kinds) for op in one.ops)]
    return {"number": found[-1].number, "at_ms": found[-1].body.at_ms} if found else None


def _what(op: Op) -> str:
    return f"{op.__struct_config__.tag} {getattr(op, 'run', '')}".rstrip()
