"""Operations that name replicas of a store: where else its versions are kept.

A name says nothing about which versions are there: the operation ``replicated`` does
(:mod:`ckptstore.catalog.replica_ops`).

As in :mod:`ckptstore.catalog.run_ops`: the method ``apply`` of a record changes the catalog, and
functions return the operations for what a caller wants.
"""

from __future__ import annotations

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Fold, Op
from ckptstore.catalog.suggestions import did_you_mean
from ckptstore.errors import ConflictError, LimitError, NotFoundError
from ckptstore.format.fields import Id
from ckptstore.format.names import check_replica_name, check_replica_url
from ckptstore.model import ReplicaInfo


class NameReplica(Op, frozen=True, kw_only=True, tag="name-replica"):
    """Another store has a name from now on; if it had it before, it is reached elsewhere now."""

    name: str
    url: str
    """Where it is, without credentials and without options."""
    store: Id
    """Its id; a store of another id at this place is another store."""

    def apply(self, fold: Fold) -> None:
        """Add the name, or replace where the replica is."""
        known = fold.replicas.get(self.name)
        if known is not None and known.store != self.store:
            raise fold.broken(f"the replica {self.name!r} is the store {known.store}")
        if known is None and len(fold.replicas) == limits.REPLICAS_MAX:
            raise fold.broken(f"more than {limits.REPLICAS_MAX} replicas have names")
        found = ReplicaInfo(name=self.name, url=self.url, store=self.store)
        fold.replicas = {**fold.replicas, self.name: found}  # one that has the name keeps its place


class UnnameReplica(Op, frozen=True, kw_only=True, tag="unname-replica"):
    """A replica has no name any more; what lies there stays."""

    name: str

    def apply(self, fold: Fold) -> None:
        """Remove the name."""
        if self.name not in fold.replicas:
            raise fold.broken(f"there is no replica {self.name!r}")
        fold.replicas = {name: one for name, one in fold.replicas.items() if name != self.name}


def find_replica(catalog: Catalog, name: str) -> ReplicaInfo:
    """Return the replica that has a name.

    Raises
    ------
    NotFoundError
        None has it; the hint names similar ones.
    """
    found = catalog.replicas.get(name)
    if found is None:
        msg = f"no replica is called {name[:100]!r}"
        hint = did_you_mean(name, catalog.replicas) if catalog.replicas else ""
        raise NotFoundError(msg, hint=hint or f"name it: ckptstore replica add {name[:40]} URL")
    return found


def name_replica(catalog: Catalog, *, name: str, url: str, store: str) -> list[Op]:
    """Return what gives a replica a name, or says that it is reached elsewhere now.

    Raises
    ------
    InvalidInputError
        The name or the location is not accepted.
    ConflictError
        Another store has the name, or this one has another.
    LimitError
        ``REPLICAS_MAX`` have names.
    """
    check_replica_name(name)
    check_replica_url(url)
    known = catalog.replicas.get(name)
    if known == ReplicaInfo(name=name, url=url, store=store):
        return []
    if known is not None and known.store != store:
        msg = f"the replica {name!r} is the store {known.store[:8]} at {known.url}, not {store[:8]}"
        raise ConflictError(msg, hint=f"take the name away first: ckptstore replica rm {name}")
    for other in catalog.replicas.values():
        if other.store == store and other.name != name:
            msg = f"the store at {url} is the replica {other.name!r} already"
            raise ConflictError(msg, hint=f"take that name away: ckptstore replica rm {other.name}")
    if known is None and len(catalog.replicas) >= limits.REPLICAS_MAX:
        msg = f"{limits.REPLICAS_MAX} replicas have names"
        raise LimitError(msg, hint="take one away: ckptstore replica rm NAME")
    return [NameReplica(name=name, url=url, store=store)]


def unname_replica(catalog: Catalog, name: str) -> list[Op]:
    """Return what takes the name of a replica away.

    Raises
    ------
    NotFoundError
        No replica has it.
    """
    return [UnnameReplica(name=find_replica(catalog, name).name)]
