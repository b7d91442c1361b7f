"""What each operation does to the catalog: the one place to touch when an operation is added.

A fold takes the state after commit n and commits n+1, n+2 ..., and gives the state after them.
It is deterministic and depends on nothing else, so every client that has read the same log has
the same catalog. An operation that breaks an invariant is an error that names its commit: no
correct writer makes one, since a writer folds its own commit before it writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import intern
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.catalog import fold_lifecycle, fold_replicas, fold_tiers
from ckptstore.catalog.state import Fold, RunState, State, broken
from ckptstore.errors import CkptStoreError, CorruptObjectError, IntegrityError
from ckptstore.format.commit import Annotate, Commit, CreateRun, Declare, Op, Save, Tag, Untag
from ckptstore.format.snapshot import Details, VersionRow, decode_metrics, encode_metrics

__all__ = ["extend"]


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
            _apply(fold, commit)
        except IntegrityError as error:
            # The commit may have been applied in part: fold again up to the one before.
            return (extend(state, commits[:index])[0], error)
    return (fold.state() if commits else state, None)


def _apply(fold: Fold, commit: Commit) -> None:
    """Fold one commit.

    Raises
    ------
    CorruptObjectError
        If it does not follow the one before, or breaks an invariant of the catalog.
    """
    if commit.number != fold.number + 1:
        msg = f"{commit.key} follows commit {fold.number}, but {fold.number + 1} should"
        raise CorruptObjectError(msg)
    if commit.body.previous != fold.digest:
        msg = (
            f"the history was changed: {commit.key} says that the commit before it has the "
            f"digest {commit.body.previous!r}, but it has {fold.digest!r}"
        )
        raise CorruptObjectError(msg, hint="restore the log from a replica or a backup")
    for op in commit.ops:
        _APPLY[type(op)](fold, op, commit)
    fold.number, fold.digest = commit.number, commit.digest


def _create_run(fold: Fold, op: CreateRun, commit: Commit) -> None:
    run = RunState(name=intern(op.run), created_at_ms=commit.body.at_ms, metrics=dict(op.metrics))
    fold.add_run(run, commit)


def _declare(fold: Fold, op: Declare, commit: Commit) -> None:
    known = fold.run(op.run, commit).metrics
    for name, direction in op.metrics.items():
        if known.setdefault(name, direction) != direction:
            raise broken(commit, f"metric {name!r} of run {op.run!r} changes its direction")
    if len(known) > limits.METRICS_MAX:
        raise broken(commit, f"run {op.run!r} declares more than {limits.METRICS_MAX} metrics")


def _save(fold: Fold, op: Save, commit: Commit) -> None:
    run = fold.run(op.run, commit)
    if op.version in fold.versions:
        raise broken(commit, f"the version {op.version} exists")
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
    run.held = False
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
        raise broken(commit, f"version {row.id} has more than {limits.METRICS_MAX} metrics")
    fold.versions[row.id] = msgspec.structs.replace(row, metrics=encode_metrics(metrics))


def _tag(fold: Fold, op: Tag, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    if row.run != op.run:
        raise broken(commit, f"run {op.run!r} tags a version of run {row.run!r}")
    fold.run(op.run, commit).tags[op.tag] = row.id


def _untag(fold: Fold, op: Untag, commit: Commit) -> None:
    if fold.run(op.run, commit).tags.pop(op.tag, None) is None:
        raise broken(commit, f"run {op.run!r} has no tag {op.tag!r}")


_APPLY: Final[dict[type[Op], Callable[[Fold, Any, Commit], None]]] = {
    **fold_lifecycle.APPLY,
    **fold_replicas.APPLY,
    **fold_tiers.APPLY,
    CreateRun: _create_run,
    Declare: _declare,
    Save: _save,
    Annotate: _annotate,
    Tag: _tag,
    Untag: _untag,
}
"""Every operation of the format, once; a test holds that none is missing."""
