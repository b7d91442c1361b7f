"""What each operation does to the catalog: the one place to touch when an operation is added.

A fold takes the state after commit n and commits n+1, n+2 ..., and gives the state after them.
It is deterministic and depends on nothing else, so every client that has read the same log has
the same catalog. An operation that breaks an invariant is an error that names its commit: no
correct writer makes one, since a writer folds its own commit before it writes it.

States are never changed once made: :class:`Fold` copies the tables once for a batch of commits
(two flat copies of pointers, about a millisecond for 100,000 versions), and a run's record when
it is first touched. Readers may hold on to an old state as long as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.errors import CkptStoreError, CorruptObjectError, IntegrityError
from ckptstore.format.commit import (
    Annotate,
    Commit,
    CreateRun,
    Declare,
    Direction,
    Op,
    Save,
    Tag,
    Untag,
)
from ckptstore.format.snapshot import Details, VersionRow, decode_metrics, encode_metrics

__all__ = ["EMPTY", "Fold", "RunState", "State", "extend"]


@dataclass(slots=True, kw_only=True)
class RunState:
    """One run; changed only by the fold that made it."""

    name: str
    created_at_ms: int
    metrics: dict[str, Direction]
    head: str = ""
    versions: list[str] = field(default_factory=list)
    """Ids in the order of their commits."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tag to version id."""

    def copy(self) -> RunState:
        """Return a copy that can be changed without this one noticing."""
        return RunState(
            name=self.name,
            created_at_ms=self.created_at_ms,
            metrics=dict(self.metrics),
            head=self.head,
            versions=list(self.versions),
            tags=dict(self.tags),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The catalog after commit `number`; not to be changed by anyone."""

    number: int
    digest: str
    """Of the body of that commit; empty before the first."""
    versions: dict[str, VersionRow]
    """By id, in the order of their commits."""
    runs: dict[str, RunState]
    """By name, in the order of their creation."""


EMPTY: Final = State(number=0, digest="", versions={}, runs={})


def extend(state: State, commits: Sequence[Commit]) -> tuple[State, CkptStoreError | None]:
    """Fold `commits` onto `state`.

    Returns
    -------
    tuple
        The state as far as the commits can be folded, each wholly or not at all, and what is
        wrong with the first that cannot, or None.
    """
    fold = Fold(state)
    for index, commit in enumerate(commits):
        try:
            fold.apply(commit)
        except IntegrityError as error:
            # The commit may have been applied in part: fold again up to the one before.
            return (extend(state, commits[:index])[0], error)
    return (fold.state() if commits else state, None)


class Fold:
    """A state in the making; owned by one thread."""

    def __init__(self, state: State) -> None:
        self.number = state.number
        self.digest = state.digest
        self.versions = dict(state.versions)
        self._runs = dict(state.runs)
        self._owned: set[str] = set()

    def state(self) -> State:
        """Return the result; nothing may be applied any more."""
        return State(
            number=self.number, digest=self.digest, versions=self.versions, runs=self._runs
        )

    def apply(self, commit: Commit) -> None:
        """Fold one commit.

        Raises
        ------
        CorruptObjectError
            If it does not follow the one before, or breaks an invariant of the catalog.
        """
        if commit.number != self.number + 1:
            msg = f"{commit.key} follows commit {self.number}, but {self.number + 1} should"
            raise CorruptObjectError(msg)
        if commit.body.previous != self.digest:
            msg = (
                f"the history was changed: {commit.key} says that the commit before it has the "
                f"digest {commit.body.previous!r}, but it has {self.digest!r}"
            )
            raise CorruptObjectError(msg, hint="restore the log from a replica or a backup")
        for op in commit.ops:
            _APPLY[type(op)](self, op, commit)
        self.number, self.digest = commit.number, commit.digest

    def run(self, name: str, commit: Commit) -> RunState:
        """Return the run `name`, as a copy that this fold may change."""
        found = self._runs.get(name)
        if found is None:
            raise _broken(commit, f"there is no run {name!r}")
        if name not in self._owned:
            self._owned.add(name)
            self._runs[name] = found = found.copy()
        return found

    def add_run(self, run: RunState, commit: Commit) -> None:
        """Add a run whose name must be free."""
        if run.name in self._runs:
            raise _broken(commit, f"the run {run.name!r} exists")
        self._owned.add(run.name)
        self._runs[run.name] = run

    def version(self, version_id: str, commit: Commit) -> VersionRow:
        """Return the row of a version that must be there."""
        found = self.versions.get(version_id)
        if found is None:
            raise _broken(commit, f"there is no version {version_id}")
        return found


def _broken(commit: Commit, what: str) -> CorruptObjectError:
    return CorruptObjectError(f"{commit.key} contradicts the commits before it: {what}")


def _create_run(fold: Fold, op: CreateRun, commit: Commit) -> None:
    run = RunState(name=intern(op.run), created_at_ms=commit.body.at_ms, metrics=dict(op.metrics))
    fold.add_run(run, commit)


def _declare(fold: Fold, op: Declare, commit: Commit) -> None:
    known = fold.run(op.run, commit).metrics
    for name, direction in op.metrics.items():
        if known.setdefault(name, direction) != direction:
            raise _broken(commit, f"metric {name!r} of run {op.run!r} changes its direction")
    if len(known) > limits.METRICS_MAX:
        raise _broken(commit, f"run {op.run!r} declares more than {limits.METRICS_MAX} metrics")


def _save(fold: Fold, op: Save, commit: Commit) -> None:
    run = fold.run(op.run, commit)
    if op.version in fold.versions:
        raise _broken(commit, f"the version {op.version} exists")
    # The row shares its strings with the rows before it: a quarter of a catalog's memory.
    parent = fold.version(op.parent, commit).id if op.parent else ""
    row = VersionRow(
        op.version,
        run.name,
        op.step,
        parent,
        commit.body.at_ms,
        commit.number,
        encode_metrics({name: float(value) for name, value in op.metrics.items()}),
        _details(op),
    )
    fold.versions[row.id] = row
    run.versions.append(row.id)
    run.head = row.id
    for tag in op.tags:
        run.tags[tag] = row.id


def _details(op: Save) -> bytes:
    return msgspec.msgpack.encode(
        Details(
            op.manifest.key,
            op.manifest.stored_bytes,
            bytes.fromhex(op.manifest.digest),
            bytes.fromhex(op.content),
            {role: (item.logical, item.new, item.stored) for role, item in op.roles.items()},
            dict(op.receipt),
            bytes(op.metadata),
        )
    )


def _annotate(fold: Fold, op: Annotate, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    metrics = decode_metrics(row)
    metrics.update((name, float(value)) for name, value in op.metrics.items())
    if len(metrics) > limits.METRICS_MAX:
        raise _broken(commit, f"version {row.id} has more than {limits.METRICS_MAX} metrics")
    fold.versions[row.id] = msgspec.structs.replace(row, metrics=encode_metrics(metrics))


def _tag(fold: Fold, op: Tag, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    if row.run != op.run:
        raise _broken(commit, f"run {op.run!r} tags a version of run {row.run!r}")
    fold.run(op.run, commit).tags[op.tag] = row.id


def _untag(fold: Fold, op: Untag, commit: Commit) -> None:
    if fold.run(op.run, commit).tags.pop(op.tag, None) is None:
        raise _broken(commit, f"run {op.run!r} has no tag {op.tag!r}")


_APPLY: Final[dict[type[Op], Callable[[Fold, Any, Commit], None]]] = {
    CreateRun: _create_run,
    Declare: _declare,
    Save: _save,
    Annotate: _annotate,
    Tag: _tag,
    Untag: _untag,
}
"""Every operation of the format, once; a test holds that none is missing."""
