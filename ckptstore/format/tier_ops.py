"""Operations that name replicas of a store: where else its versions are kept.

Each is one record of a commit's ``ops``; what it does to the catalog is in
:mod:`ckptstore.catalog.fold_tiers`. A name says nothing about which versions are there: the
operation ``replicated`` does (:mod:`ckptstore.format.replica_ops`).
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from ckptstore import limits
from ckptstore.errors import InvalidInputError
from ckptstore.format.fields import Id
from ckptstore.format.names import check_replica_name

__all__ = ["NameReplica", "UnnameReplica", "check_replica_url"]


class NameReplica(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="name-replica"):
    """Another store has a name from now on; if it had it before, it is reached elsewhere now."""

    name: str
    url: str
    """Where it is, without credentials and without options."""
    store: Id
    """Its id; a store of another id at this place is another store."""

    def __post_init__(self) -> None:
        """Check name and location."""
        check_replica_name(self.name)
        check_replica_url(self.url)


class UnnameReplica(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="unname-replica"
):
    """A replica has no name any more; what lies there stays."""

    name: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_replica_name(self.name)


def check_replica_url(url: str) -> str:
    """Return the location of a replica if the log may hold it.

    Raises
    ------
    InvalidInputError
        It is empty, too long, does not print, or has a user, a password or a query in it.
    """
    if not url or type(url) is not str or len(url) > limits.REPLICA_URL_CHARS_MAX:
        most = limits.REPLICA_URL_CHARS_MAX
        msg = f"the location of a replica is text of 1 to {most} characters"
        raise InvalidInputError(msg)
    if not url.isprintable() or url != url.strip():
        msg = f"the location {url[:80]!r} holds what does not print, or begins or ends in a space"
        raise InvalidInputError(msg)
    _, mark, rest = url.rpartition("://")
    if not mark:
        return url
    try:
        parts = urlsplit("x://" + rest)
    except ValueError as error:
        msg = f"the location {url[:80]!r} is no URL: {error}"
        raise InvalidInputError(msg) from error
    if "@" in parts.netloc or parts.query:
        msg = "the location of a replica has a user, a password or a query in it"
        raise InvalidInputError(msg, hint="credentials belong into their usual chains")
    return url
