"""What the operations of replication do to the catalog; see ``fold`` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from sys import intern
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.catalog.fold_lifecycle import LEVELS, level_of
from ckptstore.catalog.state import Fold, broken
from ckptstore.format.commit import Commit
from ckptstore.format.replica_ops import Replicate, Replicated
from ckptstore.format.snapshot import (
    ABANDONED,
    DAMAGED,
    DELETED,
    RECORD_ONLY,
    VERIFIED,
    WEIGHTS_ONLY,
    Details,
    VersionRow,
    decode_details,
    encode_metrics,
)

__all__ = ["APPLY", "NOWHERE"]

_LEVELS: Final = {"full": 0, "weights": WEIGHTS_ONLY, "record": RECORD_ONLY}
_ANEW: Final = DELETED | WEIGHTS_ONLY | RECORD_ONLY | VERIFIED | DAMAGED
"""Flags that are about content that was here before."""


def _replicate(fold: Fold, op: Replicate, commit: Commit) -> None:
    run = fold.run(op.run, commit)
    parent = fold.version(op.parent, commit).id if op.parent else ""
    if op.manifest is not None and op.manifest.key in fold.gone:
        raise broken(commit, f"{op.manifest.key} was condemned")
    known = fold.versions.get(op.version)
    row = VersionRow(
        op.version,
        run.name,
        op.step,
        parent,
        op.created_at_ms,
        commit.number,
        encode_metrics({name: float(value) for name, value in op.metrics.items()}),
        _details(op),
        _LEVELS[op.level] | (ABANDONED if op.abandoned else 0),
        intern(op.encoding),
    )
    if known is not None:
        same = (known.run, known.step, known.parent) == (row.run, row.step, row.parent)
        less = LEVELS.index(level_of(known)) < LEVELS.index(level_of(row))
        if op.level == "record" or not same or not (less or known.flags & DELETED):
            raise broken(commit, f"the version {op.version} exists")
        # Its place in the log, and what was said of it here, stay.
        before = decode_details(known)
        details = msgspec.structs.replace(
            decode_details(row),
            origin=before.origin,
            replicas=before.replicas,
            pinned_by=before.pinned_by,
        )
        row = msgspec.structs.replace(
            row,
            commit=known.commit,
            metrics=known.metrics,
            details=msgspec.msgpack.encode(details),
            flags=_LEVELS[op.level] | (known.flags & ~_ANEW),
        )
    else:
        run.versions.append(row.id)
    fold.versions[row.id] = row
    if op.head:
        run.head, run.held = row.id, False
    elif not run.head and known is not None and known.flags & DELETED:
        run.head = row.id


def _details(op: Replicate) -> bytes:
    where = op.manifest
    return msgspec.msgpack.encode(
        Details(
            NOWHERE if where is None else where.key,
            0 if where is None else where.stored_bytes,
            bytes(32) if where is None else bytes.fromhex(where.digest),
            bytes.fromhex(op.content),
            {role: (item.logical, item.new, item.stored) for role, item in op.roles.items()},
            dict(op.receipt),
            bytes(op.metadata),
            origin=intern(op.store),
        )
    )


NOWHERE: Final = f"manifests/00/{'0' * 32}.manifest"
"""In the place of a manifest of a version that never had one here; no object has this name."""


def _replicated(fold: Fold, op: Replicated, commit: Commit) -> None:
    for version_id in op.versions:
        row = fold.version(version_id, commit)
        details = decode_details(row)
        if op.store in details.replicas:
            continue
        noted = (*details.replicas, op.store)[-limits.REPLICAS_MAX :]
        more = msgspec.structs.replace(details, replicas=noted)
        packed = msgspec.msgpack.encode(more)
        fold.versions[row.id] = msgspec.structs.replace(row, details=packed)


APPLY: Final[dict[Any, Callable[[Fold, Any, Commit], None]]] = {
    Replicate: _replicate,
    Replicated: _replicated,
}
