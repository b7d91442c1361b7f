"""From what a caller wants replicas to be called to the operations of a commit.

As in ``changes``: called inside :meth:`ckptstore.catalog.log.Log.append_any` on the newest catalog,
again for every number that is tried; raise when a precondition fails; touch nothing.
"""

from __future__ import annotations

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.suggestions import did_you_mean
from ckptstore.errors import ConflictError, LimitError, NotFoundError
from ckptstore.format.commit import Op
from ckptstore.format.names import check_replica_name
from ckptstore.format.tier_ops import NameReplica, UnnameReplica, check_replica_url
from ckptstore.model import ReplicaInfo

__all__ = ["find_replica", "name_replica", "unname_replica"]


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
