"""Documents of runs by the catalog: the list, one run over its steps, the lineage of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from ckptstore import limits
from ckptstore.catalog import retention
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import level_of
from ckptstore.catalog.metrics import best_marks
from ckptstore.errors import InvalidInputError
from ckptstore.format.snapshot import Flag, VersionRow, decode_details, decode_metrics
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.reports.documents import name_document
from ckptstore.model import RunInfo
from ckptstore.store import Store

RUNS_MAX: Final = 1000
"""Runs of the list, those saved last: 500 bytes each."""
POINTS_MAX: Final = 2000
"""Versions of a curve: more than a screen has columns."""
_NODES_MAX: Final = 3000
"""Versions of the lineage of all runs: 200 bytes each."""
_METRICS_MAX: Final = 16
_TAGS_MAX: Final = 8
_SPARK_POINTS: Final = 40


def overview(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the store, and its runs with sparkline, best values, age and bytes."""
    catalog = store.repo.refresh()
    groups: dict[str, list[VersionRow]] = {}
    for row in catalog.state.versions.values():
        if not row.flags & Flag.DELETED:
            groups.setdefault(row.run, []).append(row)
    saved = {name: rows[-1].commit for name, rows in groups.items()}
    runs = sorted(catalog.runs(), key=lambda run: saved.get(run.name, 0), reverse=True)
    return {
        "url": store.url,
        "id": store.info.store_id,
        "at_ms": store.repo.environment.now_ms(),
        "commits": catalog.number,
        "runs_count": len(runs),
        "versions_count": catalog.versions_count,
        "runs": [_line(catalog, run, groups.get(run.name, [])) for run in runs[:RUNS_MAX]],
    }


def _line(catalog: Catalog, run: RunInfo, rows: Sequence[VersionRow]) -> dict[str, Any]:
    winners = {
        metric: catalog.version(winner)
        for winner, names in best_marks(catalog, [run]).items()
        for metric in names
    }
    metrics = [decode_metrics(row) for row in rows]
    usual = _usual_metrics(run, metrics)
    shown = next((name for name in usual if name in winners), usual[0] if usual else "")
    line = [
        values[shown]
        for row, values in zip(rows, metrics, strict=True)
        if shown in values and not row.flags & Flag.ABANDONED
    ]
    sizes = [_bytes(row) for row in rows]
    return {
        "name": run.name,
        "versions": len(rows),
        "head": name_document(catalog.version(run.head)) if run.head else None,
        "saved_ms": rows[-1].at_ms if rows else None,
        "logical_bytes": sum(logical for logical, _ in sizes),
        "stored_bytes": sum(stored for _, stored in sizes),
        "origin": _origin(catalog, run),
        "metric": shown,
        "spark": means(line, _SPARK_POINTS),
        "best": [
            {"metric": name, "id": v.id, "step": v.step, "value": rounded(v.metrics[name])}
            for name, v in winners.items()
        ][:_METRICS_MAX],
    }


def run(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions of a run as columns, thinned out where they are many.

    Parameters
    ----------
    query
        ``run``; ``low`` and ``high``: steps to look at more closely; ``most``.
    """
    catalog = store.repo.refresh()
    info = catalog.run(query.get("run", ""))
    rows = _history(catalog, info)
    values = {row.id: decode_metrics(row) for row in rows}
    metrics = _usual_metrics(info, values.values())
    first = metrics[0] if metrics else ""
    low, high = number(query, "low", 0), number(query, "high", limits.STEP_MAX)
    kept = thinned(
        [row for row in rows if low <= row.step <= high],
        notable(catalog, info, rows),
        lambda row: values[row.id].get(first, math.nan),
        most=min(number(query, "most", POINTS_MAX), POINTS_MAX),
    )
    place = {row.id: position for position, row in enumerate(kept)}
    above = nearest_kept(rows, place)
    fates, policy, refused = _fates(store, catalog, info)
    tags = _tags(info)
    sizes = [_bytes(row) for row in kept]
    best = best_marks(catalog, [info])
    return {
        "run": info.name,
        "origin": _origin(catalog, info),
        "head": info.head or None,
        "policy": policy,
        "refused": refused,
        "versions_count": len(rows),
        "metrics": {name: info.metrics.get(name) for name in metrics},
        "best": {name: winner for winner, names in best.items() for name in names},
        "columns": {
            "id": list(place),
            "step": [row.step for row in kept],
            "at_ms": [row.at_ms for row in kept],
            "above": [place.get(above[row.id][0], -1) for row in kept],
            "flags": [row.flags for row in kept],
            "level": [level_of(row) for row in kept],
            "logical_bytes": [logical for logical, _ in sizes],
            "stored_bytes": [stored for _, stored in sizes],
        },
        "tags": {place[one]: names[:_TAGS_MAX] for one, names in tags.items() if one in place},
        "fates": {place[one]: fate for one, fate in fates.items() if one in place},
        "values": {name: [_value(values[row.id].get(name)) for row in kept] for name in metrics},
    }


def _fates(
    store: Store, catalog: Catalog, run: RunInfo
) -> tuple[dict[str, tuple[str, str]], str, str]:
    """Return the planned changes of retention by version, the policy, and a refusal."""
    if not catalog.policies(run.name):
        return {}, "", ""
    (plan,) = retention.plan(catalog, run=run.name, times=StorageTimes(store.repo))
    fates = {one.version.id: (str(one.fate), "; ".join(one.reasons)) for one in plan.changes}
    return fates, str(plan.policy) if plan.policy else "", plan.refused


def lineage(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the notable versions of all runs, each with the one before it, as columns."""
    catalog = store.repo.refresh()
    runs = catalog.runs()
    most = max(2, _NODES_MAX // max(1, len(runs)))
    nodes: list[tuple[VersionRow, str, int, list[str]]] = []
    for info in runs[-_NODES_MAX // 2 :]:
        rows = _history(catalog, info)
        marked = notable(catalog, info, rows)
        shown = [row for row in rows if row.id in marked]
        shown = thinned(shown, {info.head}, lambda row: row.step, most=most)
        above = nearest_kept(rows, {row.id for row in shown})
        tags, best = _tags(info), best_marks(catalog, [info])
        for row in shown:
            marks = ["head"] if row.id == info.head else []
            marks += [f"best {name}" for name in sorted(best.get(row.id, ()))[:3]]
            marks += [f"tag {tag}" for tag in tags.get(row.id, ())[:3]]
            before, between = above[row.id]
            nodes.append((row, before or info.origin, between, marks))
    place = {row.id: position for position, (row, *_) in enumerate(nodes)}
    return {
        "runs_count": len(runs),
        "id": list(place),
        "run": [row.run for row, *_ in nodes],
        "step": [row.step for row, *_ in nodes],
        "above": [place.get(before, -1) for _, before, *_ in nodes],
        "between": [between for _, _, between, _ in nodes],
        "marks": [marks for *_, marks in nodes],
        "flags": [row.flags for row, *_ in nodes],
    }


def number(query: Mapping[str, str], name: str, usual: int) -> int:
    """Return a number of a request; raises InvalidInputError if it is none."""
    text = query.get(name, "")
    if text and not (text.isdecimal() and len(text) < 20):
        msg = f"{name} is a number of 0 or more, not {text[:40]!r}"
        raise InvalidInputError(msg)
    return int(text) if text else usual


def _history(catalog: Catalog, run: RunInfo) -> list[VersionRow]:
    """Return all versions of a run, deleted ones too, in the order of their commits."""
    return [catalog.state.versions[one] for one in catalog.ids(run.name)]


def _tags(run: RunInfo) -> dict[str, list[str]]:
    """Return the tags of a run by version."""
    found: dict[str, list[str]] = {}
    for tag, version in run.tags.items():
        found.setdefault(version, []).append(tag)
    return found


def _bytes(row: VersionRow) -> tuple[int, int]:
    """Return logical and stored bytes of a version."""
    roles = decode_details(row).roles.values()
    return sum(part[0] for part in roles), sum(part[2] for part in roles)


def _origin(catalog: Catalog, run: RunInfo) -> dict[str, Any] | None:
    return name_document(catalog.version(run.origin)) if run.origin else None


def _usual_metrics(run: RunInfo, metrics: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the metrics of a run: declared ones first, then those that most versions have."""
    used = Counter(name for values in metrics for name in values)
    declared = [name for name in run.metrics if name in used]
    others = sorted(used.keys() - run.metrics.keys(), key=lambda name: (-used[name], name))
    return [*declared, *others][:_METRICS_MAX]


def _value(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else rounded(value)
    return str(value)


T = TypeVar("T")


def notable(catalog: Catalog, run: RunInfo, versions: Sequence[VersionRow]) -> set[str]:
    """Return the ids of versions that a picture of the run must not lose.

    The first, the last, best, tagged, pinned and damaged ones; points where lines part or runs
    fork, and ends of abandoned lines.
    """
    children = Counter(version.parent for version in versions)
    found = {run.head, *best_marks(catalog, [run]), *run.tags.values()}
    found |= {version.id for version in (*versions[:1], *versions[-1:])}
    found |= {one.origin for one in catalog.runs() if one.origin}
    marked = Flag.PINNED | Flag.DAMAGED
    found |= {one.id for one in versions if one.flags & marked or children[one.id] != 1}
    return found & {version.id for version in versions}


def thinned(
    versions: Sequence[VersionRow],
    marked: Container[str],
    value: Callable[[VersionRow], float],
    *,
    most: int,
) -> list[VersionRow]:
    """Return at most `most` versions, in order: marked ones first, then extremes of each stretch.

    Of each stretch of the others the least and the greatest value stay, so that no peak is lost.
    """
    if len(versions) <= most:
        return list(versions)
    certain = [number for number, version in enumerate(versions) if version.id in marked]
    kept = {stretch[-1] for stretch in _stretches(certain, most // 2)}
    others = [number for number, version in enumerate(versions) if version.id not in marked]
    values = [value(version) for version in versions]
    for stretch in _stretches(others, max(1, (most - len(kept)) // 2)):
        ranked = [number for number in stretch if math.isfinite(values[number])] or stretch[:1]
        kept |= {min(ranked, key=values.__getitem__), max(ranked, key=values.__getitem__)}
    return [versions[number] for number in sorted(kept)]


def nearest_kept(rows: Sequence[VersionRow], kept: Container[str]) -> dict[str, tuple[str, int]]:
    """Return for each version its nearest ancestor in `kept`, and the number of those between.

    The ancestor is empty if no version of this run before it is kept.
    """
    found: dict[str, tuple[str, int]] = {}
    for version in rows:
        parent = version.parent
        above, between = found.get(parent, ("", -1))
        near = parent in found and parent in kept
        found[version.id] = (parent, 0) if near else (above, between + 1)
    return found


def means(values: Sequence[float], most: int) -> list[float | None]:
    """Return at most `most` means of stretches of values; None where a stretch has no number."""
    found: list[float | None] = []
    for stretch in _stretches(values, most):
        finite = [value for value in stretch if math.isfinite(value)]
        found.append(rounded(math.fsum(x / len(finite) for x in finite)) if finite else None)
    return found


def rounded(value: float) -> float:
    """Return a value to six digits, as it is shown."""
    return float(f"{value:.6g}")


def _stretches(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    count = min(count, len(items))
    for place in range(count):
        yield items[len(items) * place // count : len(items) * (place + 1) // count]
