"""JSON documents of versions, runs and other records. Fields may be added, never removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ckptstore.catalog.lifecycle_ops import pinned_text
from ckptstore.maintenance.reports.usage import ObjectTotals, ReplicaLag, by_role, sum_roles
from ckptstore.model import ReplicaInfo, RoleBytes, RunInfo, Version

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.diff import DiffReport
    from ckptstore.states.compare import TensorError

STATUSES: Final = ("changed", "added", "removed", "moved", "same")


def time_document(moment: datetime) -> str:
    """Return a time as ISO 8601 in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_document(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics; non-finite values become ``nan``, ``inf`` or ``-inf``, as in the log."""
    return {name: x if math.isfinite(x) else str(x) for name, x in metrics.items()}


def role_document(part: RoleBytes) -> dict[str, int]:
    """Return byte counts."""
    return {"logical_bytes": part.logical, "new_bytes": part.new, "stored_bytes": part.stored}


def bytes_document(versions: Sequence[Version]) -> dict[str, Any]:
    """Return the byte counts of versions, in all and by role."""
    roles = by_role(versions)
    parts = {role: role_document(part) for role, part in sorted(roles.items())}
    return {**role_document(sum_roles(roles.values())), "roles": parts}


def lag_document(lag: ReplicaLag) -> dict[str, Any]:
    """Return a replica, with the numbers of versions that it has and lacks."""
    counts = {"versions": lag.versions_count, "missing": lag.missing_count}
    return {**msgspec.to_builtins(lag.replica), **counts}


def objects_document(objects: Mapping[str, ObjectTotals]) -> dict[str, dict[str, int]]:
    """Return count and bytes of listed objects by kind."""
    return {kind: {"count": part.count, "bytes": part.size_bytes} for kind, part in objects.items()}


def name_document(version: Version) -> dict[str, Any]:
    """Return the fields that name a version."""
    return {"id": version.id, "run": version.run, "step": version.step}


def version_document(version: Version, *, head: bool, best: Iterable[str] = ()) -> dict[str, Any]:
    """Return a version.

    Parameters
    ----------
    head
        It is the head of its run: what ``RUN@latest`` names.
    best
        Metrics that it is the best of its run by.
    """
    return {
        **{one.name: getattr(version, one.name) for one in fields(version)},
        "state": version.state,
        "created_at": time_document(version.created_at),
        "metrics": metrics_document(version.metrics),
        "best": sorted(best),
        "head": head,
        "parent": version.parent or None,
        **role_document(sum_roles(version.roles.values())),
        "roles": {role: role_document(part) for role, part in version.roles.items()},
        "manifest": {
            "key": version.manifest_key,
            "blake3": version.manifest_digest,
            "bytes": version.manifest_bytes,
        },
    }


def replica_names(version: Version, replicas: Mapping[str, ReplicaInfo]) -> list[str]:
    """Return the names of the stores that hold a version; ``store ID`` if one has no name here."""
    names = {one.store: name for name, one in replicas.items()}
    return [names.get(store, f"store {store[:8]}") for store in version.replicas]


def state_marks(version: Version, replicas: Mapping[str, ReplicaInfo]) -> list[str]:
    """Return the unusual states of a version as text; empty for most versions.

    Parameters
    ----------
    replicas
        The named replicas of its store: of a version whose record alone is here, who has the rest.
    """
    level = _LEVEL_MARKS.get(version.level, "")
    if version.level == "record" and (names := replica_names(version, replicas)):
        level += f"; {', '.join(names)} {'has' if len(names) == 1 else 'have'} it"
    marks = {
        "deleted": version.deleted,
        "damaged": version.damaged,
        "abandoned": version.abandoned,
        level: bool(level),
        pinned_text(version): version.pinned,
    }
    return [mark for mark, holds in marks.items() if holds]


_LEVEL_MARKS: Final = {
    "weights": "weights only",
    "weights-bf16": "bf16 weights only",
    "weights-int8": "int8 weights only",
    "record": "record only",
}


def run_document(run: RunInfo) -> dict[str, Any]:
    """Return a run."""
    return {
        **asdict(run),
        "created_at": time_document(run.created_at),
        "head": run.head or None,
        "origin": run.origin or None,
    }


def diff_document(report: DiffReport, errors: Mapping[str, TensorError | None]) -> dict[str, Any]:
    """Return a comparison without equal tensors.

    Parameters
    ----------
    errors
        By path, how far values of tensors are apart; empty if they were not read.
    """
    found = {path: metrics_document(asdict(error)) for path, error in errors.items() if error}
    return {
        "first": name_document(report.first),
        "second": name_document(report.second),
        "equal": report.equal,
        "counts": {status: len(report.of(status)) for status in STATUSES},
        "tensors": [
            {"path": change.path, **asdict(change), "error": found.get(change.path)}
            for change in report.changes
            if change.status != "same"
        ],
        "values": report.values,
    }
