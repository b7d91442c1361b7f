"""``ckptstore log --graph``: the tree of runs, forks and rollbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.lifecycle_ops import Rollback
from ckptstore.cli.output import Screen
from ckptstore.cli.text import committed_at, metric_text, time_text, version_text
from ckptstore.maintenance.reports import documents
from ckptstore.model import Version
from ckptstore.store import Store

_METRICS = 3
"""Metrics that a line shows: the declared ones first."""


_Event = tuple[Commit, Rollback]


@dataclass(frozen=True, slots=True)
class Graph:
    """Versions in the order in which they are drawn, with their marks."""

    catalog: Catalog
    versions: Sequence[Version]
    """Each after everything that continues it."""
    parents: dict[str, str]
    """Version to the nearest version that it continues and that is there."""
    events: Sequence[_Event]
    utc: bool

    def document(self) -> dict[str, Any]:
        """Return versions and rollbacks."""
        return {
            "versions": [self._version(version) for version in self.versions],
            "rollbacks": [
                {
                    "commit": commit.number,
                    "at": documents.time_document(committed_at(commit)),
                    "by": commit.body.by,
                    "run": op.run,
                    "version": op.version,
                    "reason": op.reason,
                }
                for commit, op in self.events
            ],
        }

    def _version(self, version: Version) -> dict[str, Any]:
        origin = self._origin(version)
        return {
            **documents.name_document(version),
            "commit": version.commit,
            "parent": version.parent or None,
            "forked_from": None if origin is None else origin.id,
            "head": self.catalog.head_id(version.run) == version.id,
            "tags": list(version.tags),
            "metrics": documents.metrics_document(version.metrics),
            "abandoned": version.abandoned,
            "level": version.level,
            "pinned": version.pinned,
        }

    def draw(self, screen: Screen) -> None:
        """Draw one line a version, newest first, and where lines part."""
        events: dict[str, list[_Event]] = {}
        for event in self.events:
            events.setdefault(event[1].version, []).append(event)
        order = [version.id for version in self.versions]
        for version, (own, before) in zip(self.versions, rails(order, self.parents), strict=True):
            screen.lines(before)
            screen.line(f"{own}  {self._text(version)}")
            below = own.replace("*", "|" if self.parents.get(version.id) else " ")
            for commit, op in events.get(version.id, ()):
                why = f": {op.reason}" if op.reason else ""
                when = time_text(committed_at(commit), utc=self.utc)
                screen.line(f"{below}    rolled back to, {when}{why}")

    def _text(self, version: Version) -> str:
        names = list(version.tags)
        if self.catalog.head_id(version.run) == version.id:
            names.insert(0, "latest")
        names += documents.state_marks(version, self.catalog.replicas)
        parts = [f"{version.run}@{version.step}", version.id[:8]]
        if names:
            parts.append(f"[{', '.join(names)}]")
        declared = self.catalog.run(version.run).metrics
        order = sorted(version.metrics, key=lambda name: (name not in declared, name))
        parts += [f"{name} {metric_text(version.metrics[name])}" for name in order[:_METRICS]]
        origin = self._origin(version)
        if origin is not None:
            gone = " (deleted)" if origin.deleted else ""
            parts.append(f"forked from {version_text(origin)}{gone}")
        elif version.parent and not self.parents.get(version.id):
            parts.append(f"continues {version_text(self.catalog.version(version.parent))}")
        return "  ".join(parts)

    def _origin(self, version: Version) -> Version | None:
        """Return the version of another run that this one continues."""
        if not version.parent:
            return None
        parent = self.catalog.version(version.parent)
        return parent if parent.run != version.run else None


def graph_of(store: Store, run: str | None, limit: int, *, utc: bool) -> Graph:
    """Return the tree of the newest versions.

    Parameters
    ----------
    run
        Only this run, with the version that it was forked from and the first of each fork of it.
    limit
        How many versions; 0 for all.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    CorruptObjectError
        The log is damaged.
    """
    catalog = store.repo.refresh()
    most = min(limit, catalog.versions_count) or None
    chosen = {v.id: v for v in islice(catalog.versions(run, newest_first=True), most)}
    if run is not None:
        for other in _neighbours(catalog, run, chosen):
            chosen[other.id] = other
    versions = sorted(chosen.values(), key=lambda version: version.commit)
    parents = {v.id: _parent(catalog, v, chosen) for v in versions}
    # A run's own line stands left, forks right of it, what was abandoned last.
    first = {
        v.id: 2 * v.abandoned + (bool(parents[v.id]) and chosen[parents[v.id]].run != v.run)
        for v in versions
    }
    shown = [chosen[version_id] for version_id in arranged(parents, first)]
    return Graph(catalog, shown, parents, _events(store, versions), utc=utc)


def _neighbours(catalog: Catalog, run: str, chosen: dict[str, Version]) -> Iterable[Version]:
    origin = catalog.run(run).origin
    if origin and not catalog.version(origin).deleted:
        yield catalog.version(origin)
    for info in catalog.runs():
        if info.origin in chosen and info.name != run:
            yield from islice(catalog.versions(info.name), 1)


def _parent(catalog: Catalog, version: Version, chosen: dict[str, Version]) -> str:
    """Return the nearest ancestor that was not deleted, if it is one of those chosen."""
    line = (v for v in islice(catalog.ancestors(version.id), 1, None) if not v.deleted)
    nearest = next(line, None)
    return nearest.id if nearest is not None and nearest.id in chosen else ""


def _events(store: Store, versions: Sequence[Version]) -> list[_Event]:
    """Return the rollbacks to these versions; reads the commits since the first of them."""
    if not versions:
        return []
    ids = {version.id for version in versions}
    return [
        (commit, op)
        for commit in store.log(first=versions[0].commit)
        for op in commit.ops
        if isinstance(op, Rollback) and op.version in ids
    ]


def arranged(parents: Mapping[str, str], first: Mapping[str, int]) -> list[str]:
    """Return the nodes of a forest so that each comes after all its descendants.

    Parameters
    ----------
    parents
        Node to its parent, oldest first; empty, or a node that is not there, for roots.
    first
        Per node a rank: of the children of one node, the lower come first, with all that is
        below them; of equal rank the newest. Roots go from the newest to the oldest.
    """
    children: dict[str, list[str]] = {}
    roots = []
    for node, parent in parents.items():
        if parent in parents:
            children.setdefault(parent, []).append(node)
        else:
            roots.append(node)
    age = {node: place for place, node in enumerate(parents)}
    found: list[str] = []
    # Each parent comes before its children; the list is reversed at the end.
    waiting = sorted(roots, key=lambda node: -age[node])
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += sorted(children.get(node, ()), key=lambda n: (first.get(n, 0), -age[n]))
    return found[::-1]


def rails(order: Sequence[str], parents: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return what stands left of each node: its own line, and lines to draw before it.

    Parameters
    ----------
    order
        Nodes, each after its descendants.
    parents
        Node to its parent; one that is not in `order` ends the line. An empty line parts trees
        that have nothing in common.
    """
    there = set(order)
    columns: list[str] = []
    """Per column the node that it leads down to."""
    rows: list[tuple[str, list[str]]] = []
    for node in order:
        places = [place for place, wanted in enumerate(columns) if wanted == node]
        before: list[str] = []
        if not places:
            if rows and not columns:
                before.append("")  # nothing above has to do with what follows
            columns.append(node)
            places = [len(columns) - 1]
        while len(places) > 1:  # lines that lead to one node come together, from the right
            before.append(_joined(len(columns), places[0], places[-1]))
            del columns[places.pop()]
        place = places[0]
        marks = ["*" if at == place else "|" for at in range(len(columns))]
        rows.append((" ".join(marks), before))
        parent = parents.get(node, "")
        if parent in there:
            columns[place] = parent
        else:
            del columns[place]
    return rows


def _joined(count: int, into: int, leaving: int) -> str:
    """Return ``count`` lines where one joins another to its left; those to its right move along."""
    line = [" "] * (2 * count - 1)
    for place in range(count):
        if place < leaving:
            line[2 * place] = "|"
        elif place > leaving:
            line[2 * place - 1] = "/"
    line[2 * leaving - 1] = "/"
    for place in range(into, leaving - 1):
        line[2 * place + 1] = "_"
    return "".join(line).rstrip()
