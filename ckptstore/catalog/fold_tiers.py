"""What the operations that name replicas do to the catalog; see ``fold`` for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ckptstore import limits
from ckptstore.catalog.state import Fold, broken
from ckptstore.format.commit import Commit
from ckptstore.format.tier_ops import NameReplica, UnnameReplica
from ckptstore.model import ReplicaInfo

__all__ = ["APPLY"]


def _name(fold: Fold, op: NameReplica, commit: Commit) -> None:
    known = fold.replicas.get(op.name)
    if known is not None and known.store != op.store:
        raise broken(commit, f"the replica {op.name!r} is the store {known.store}")
    if known is None and len(fold.replicas) == limits.REPLICAS_MAX:
        raise broken(commit, f"more than {limits.REPLICAS_MAX} replicas have names")
    found = ReplicaInfo(name=op.name, url=op.url, store=op.store)
    fold.replicas = {**fold.replicas, op.name: found}  # one that has the name keeps its place


def _unname(fold: Fold, op: UnnameReplica, commit: Commit) -> None:
    if op.name not in fold.replicas:
        raise broken(commit, f"there is no replica {op.name!r}")
    fold.replicas = {name: one for name, one in fold.replicas.items() if name != op.name}


APPLY: Final[dict[Any, Callable[[Fold, Any, Commit], None]]] = {
    NameReplica: _name,
    UnnameReplica: _unname,
}
