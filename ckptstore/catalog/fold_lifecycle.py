"""What the operations on existing versions do to the catalog; see ``fold`` for the rest.

No operation forgets a version: deleted ones stay as records, so that lineage, the audit trail and
ids remain, and so that they can come back until their objects are condemned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import intern
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.catalog.state import Fold, RunState, broken
from ckptstore.format.commit import Commit
from ckptstore.format.lifecycle_ops import (
    Condemn,
    Delete,
    Fork,
    Level,
    Part,
    Pin,
    Quarantine,
    Relocate,
    Rollback,
    SetPolicy,
    Swept,
    Undelete,
    Unpin,
    Verified,
)
from ckptstore.format.snapshot import (
    ABANDONED,
    DAMAGED,
    DELETED,
    PINNED,
    RECORD_ONLY,
    VERIFIED,
    WEIGHTS_ONLY,
    VersionRow,
    decode_details,
)

__all__ = ["APPLY", "LEVELS", "level_of", "parts_of_level", "pins_of"]

LEVELS: Final[tuple[Level, ...]] = ("record", "weights-int8", "weights-bf16", "weights", "full")
"""From the least that is kept to the most."""

_STORED: Final[dict[Level, tuple[Part, str]]] = {
    "record": ("record", ""),
    "weights-int8": ("weights", "int8"),
    "weights-bf16": ("weights", "bf16"),
    "weights": ("weights", ""),
    "full": ("full", ""),
}
_ROUNDED: Final[dict[str, Level]] = {
    encoding: level for level, (_, encoding) in _STORED.items() if encoding
}


def parts_of_level(level: Level) -> tuple[Part, str]:
    """Return what is kept at a level, and what it is rounded to; how the log writes a level."""
    return _STORED[level]


def level_of(row: VersionRow) -> Level:
    """Return how much of a version is kept.

    What a newer ckptstore rounds to and this one does not know counts as ``weights``.
    """
    return _level(row.flags, row.encoding)


def _level(flags: int, encoding: str) -> Level:
    if flags & RECORD_ONLY:
        return "record"
    if flags & WEIGHTS_ONLY:
        return _ROUNDED.get(encoding, "weights")
    return "full"


def _set(fold: Fold, row: VersionRow, flags: int) -> None:
    if row.flags != flags:
        fold.versions[row.id] = msgspec.structs.replace(row, flags=flags)


def _fork(fold: Fold, op: Fork, commit: Commit) -> None:
    source = fold.version(op.source, commit)
    if source.flags & DELETED:
        raise broken(commit, f"run {op.run!r} is forked from the deleted version {source.id}")
    run = RunState(
        name=intern(op.run),
        created_at_ms=commit.body.at_ms,
        metrics=dict(op.metrics),
        origin=source.id,
    )
    fold.add_run(run, commit)


def _line(fold: Fold, head: str, run: str) -> list[str]:
    """Return a version and its ancestors within one run, newest first."""
    found = []
    while head and fold.versions[head].run == run:
        found.append(head)
        head = fold.versions[head].parent
    return found


def _rollback(fold: Fold, op: Rollback, commit: Commit) -> None:
    run = fold.run(op.run, commit)
    target = fold.version(op.version, commit)
    if target.run != op.run or target.flags & DELETED:
        raise broken(commit, f"run {op.run!r} cannot go back to {target.id}")
    kept = _line(fold, target.id, op.run)
    for version_id in set(_line(fold, run.head, op.run)) - set(kept):
        row = fold.versions[version_id]
        _set(fold, row, row.flags | ABANDONED)
    for version_id in kept:
        row = fold.versions[version_id]
        _set(fold, row, row.flags & ~ABANDONED)
    run.head = target.id
    run.held = not op.store


def _delete(fold: Fold, op: Delete, commit: Commit) -> None:
    for version_id in op.versions:
        row = fold.version(version_id, commit)
        if row.flags & (DELETED | PINNED):
            what = "deleted already" if row.flags & DELETED else "pinned"
            raise broken(commit, f"version {row.id} is {what}")
        _set(fold, row, row.flags | DELETED)
    for version_id in op.versions:
        row = fold.versions[version_id]
        run = fold.run(row.run, commit)
        if run.head == version_id:
            run.head = _newest(fold, run.versions)


def _newest(fold: Fold, ids: Iterable[str]) -> str:
    """Return the newest version that is there, abandoned ones last; empty if none is."""
    left = [fold.versions[version_id] for version_id in ids]
    left = [row for row in left if not row.flags & DELETED][::-1]
    if not left:
        return ""
    # Of records that came in one commit the last is the newest, which is the first found here.
    return max(left, key=lambda row: (not row.flags & ABANDONED, row.commit)).id


def _undelete(fold: Fold, op: Undelete, commit: Commit) -> None:
    for version_id in op.versions:
        row = fold.version(version_id, commit)
        if not row.flags & DELETED:
            raise broken(commit, f"version {row.id} is not deleted")
        if not row.flags & RECORD_ONLY and decode_details(row).manifest_key in fold.gone:
            raise broken(commit, f"the manifest of version {row.id} was condemned")
        _set(fold, row, row.flags & ~DELETED)
        run = fold.run(row.run, commit)
        if not run.head:
            run.head = _newest(fold, run.versions)


def _pin(fold: Fold, op: Pin, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    if row.flags & DELETED:
        raise broken(commit, f"the deleted version {row.id} is pinned")
    stores = dict.fromkeys((*pins_of(row), op.store))
    if len(stores) > limits.REPLICAS_MAX + 1:
        raise broken(commit, f"version {row.id} is pinned for too many stores")
    _set_pins(fold, row, stores)


def _unpin(fold: Fold, op: Unpin, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    # One without a store ends them all: so do readers that do not know the field.
    _set_pins(fold, row, [store for store in pins_of(row) if op.store and store != op.store])


def pins_of(row: VersionRow) -> tuple[str, ...]:
    """Return the stores that a version is pinned for; the own one is empty."""
    return (decode_details(row).pinned_by or ("",)) if row.flags & PINNED else ()


def _set_pins(fold: Fold, row: VersionRow, stores: Iterable[str]) -> None:
    pinned_by = tuple(stores)
    flags = row.flags | PINNED if pinned_by else row.flags & ~PINNED
    if pinned_by == ("",):
        pinned_by = ()
    details = decode_details(row)
    if details.pinned_by == pinned_by:
        _set(fold, row, flags)
        return
    packed = msgspec.msgpack.encode(msgspec.structs.replace(details, pinned_by=pinned_by))
    fold.versions[row.id] = msgspec.structs.replace(row, flags=flags, details=packed)


def _set_policy(fold: Fold, op: SetPolicy, commit: Commit) -> None:
    policy = b"" if bytes(op.policy) == b"{}" else bytes(op.policy)
    if op.run:
        fold.run(op.run, commit).policy = policy
    else:
        fold.policy = policy


def _verified(fold: Fold, op: Verified, commit: Commit) -> None:
    for version_id in op.versions:
        row = fold.version(version_id, commit)
        _set(fold, row, (row.flags | VERIFIED) & ~DAMAGED)


def _quarantine(fold: Fold, op: Quarantine, commit: Commit) -> None:
    for version_id in op.versions:
        row = fold.version(version_id, commit)
        _set(fold, row, (row.flags | DAMAGED) & ~VERIFIED)


def _relocate(fold: Fold, op: Relocate, commit: Commit) -> None:
    row = fold.version(op.version, commit)
    details = decode_details(row)
    if row.flags & DELETED or details.manifest_digest.hex() != op.based_on:
        raise broken(commit, f"version {row.id} changed before it was relocated")
    flags = row.flags & ~(WEIGHTS_ONLY | RECORD_ONLY | VERIFIED | DAMAGED)
    flags |= {"full": 0, "weights": WEIGHTS_ONLY, "record": RECORD_ONLY}[op.level]
    # A writer that does not know the field moves a version about and says nothing of it.
    encoding = op.encoding or (row.encoding if op.level == "weights" else "")
    if LEVELS.index(_level(flags, encoding)) > LEVELS.index(level_of(row)):
        raise broken(commit, f"version {row.id} cannot have more than it has")
    if op.manifest is not None:
        if op.manifest.key in fold.gone:
            raise broken(commit, f"{op.manifest.key} was condemned")
        details = msgspec.structs.replace(
            details,
            manifest_key=op.manifest.key,
            manifest_bytes=op.manifest.stored_bytes,
            manifest_digest=bytes.fromhex(op.manifest.digest),
        )
    details = msgspec.structs.replace(
        details,
        content=bytes.fromhex(op.content),
        roles={role: (item.logical, item.new, item.stored) for role, item in op.roles.items()},
    )
    fold.versions[row.id] = msgspec.structs.replace(
        row, flags=flags, details=msgspec.msgpack.encode(details), encoding=intern(encoding)
    )


def _condemn(fold: Fold, op: Condemn, commit: Commit) -> None:
    fold.condemned = {**fold.condemned, **dict.fromkeys(op.keys, commit.number)}
    fold.gone = fold.gone.union(op.keys)


def _swept(fold: Fold, op: Swept, commit: Commit) -> None:
    done = set(op.keys)
    if not done <= fold.condemned.keys():
        raise broken(commit, "an object was swept that is not condemned")
    fold.condemned = {key: at for key, at in fold.condemned.items() if key not in done}


APPLY: Final[dict[Any, Callable[[Fold, Any, Commit], None]]] = {
    Fork: _fork,
    Rollback: _rollback,
    Delete: _delete,
    Undelete: _undelete,
    Pin: _pin,
    Unpin: _unpin,
    SetPolicy: _set_policy,
    Verified: _verified,
    Quarantine: _quarantine,
    Relocate: _relocate,
    Condemn: _condemn,
    Swept: _swept,
}
