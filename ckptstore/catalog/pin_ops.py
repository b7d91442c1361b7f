"""Operations that pin versions, and how a pin is told.

A version is pinned for this store, by a person, or for another store that let its own content of
it go: for each on its own, and it may be deleted when no pin is left.

As in :mod:`ckptstore.catalog.run_ops`: the method ``apply`` of a record changes the catalog, and
functions return the operations for what a caller wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.rows import pins_of
from ckptstore.catalog.run_ops import IdOrEmpty, there
from ckptstore.catalog.state import Fold, Op
from ckptstore.errors import LimitError, PolicyError
from ckptstore.format.fields import Id
from ckptstore.format.snapshot import DELETED, PINNED, VersionRow, decode_details
from ckptstore.model import Version

_SHOWN: Final = 8


class Pin(Op, frozen=True, kw_only=True, omit_defaults=True, tag="pin"):
    """A version may not be deleted, by anyone, until it is unpinned."""

    version: Id
    store: IdOrEmpty = ""
    """Id of the store that it is kept for, since only its record is there; empty: somebody wants
    it here."""

    def apply(self, fold: Fold) -> None:
        """Add the store to those that the version is pinned for."""
        row = fold.version(self.version)
        if row.flags & DELETED:
            raise fold.broken(f"the deleted version {row.id} is pinned")
        stores = dict.fromkeys((*pins_of(row), self.store))
        if len(stores) > limits.REPLICAS_MAX + 1:
            raise fold.broken(f"version {row.id} is pinned for too many stores")
        _set_pins(fold, row, stores)


class Unpin(Op, frozen=True, kw_only=True, omit_defaults=True, tag="unpin"):
    """A version may be deleted again, unless pins of others are left."""

    version: Id
    store: IdOrEmpty = ""
    """Whose pin goes; empty: all of them."""

    def apply(self, fold: Fold) -> None:
        """Remove the pin of one store, or all."""
        row = fold.version(self.version)
        # One without a store ends them all: so do readers that do not know the field.
        _set_pins(
            fold, row, [store for store in pins_of(row) if self.store and store != self.store]
        )


def _set_pins(fold: Fold, row: VersionRow, stores: Iterable[str]) -> None:
    pinned_by = tuple(stores)
    flags = row.flags | PINNED if pinned_by else row.flags & ~PINNED
    if pinned_by == ("",):
        pinned_by = ()
    details = msgspec.structs.replace(decode_details(row), pinned_by=pinned_by)
    packed = msgspec.msgpack.encode(details)
    fold.versions[row.id] = msgspec.structs.replace(row, flags=flags, details=packed)


def pin(catalog: Catalog, version: str) -> list[Op]:
    """Return what pins a version for this store; nothing if it is pinned for this one alone."""
    found = there(catalog, version)
    return [] if found.pinned and not found.pinned_for else [Pin(version=version)]


def unpin(catalog: Catalog, version: str) -> list[Op]:
    """Return what takes all pins of a version away, of whomever; nothing if it has none."""
    return [Unpin(version=version)] if catalog.version(version).pinned else []


def pin_for(catalog: Catalog, versions: Iterable[str], store: str) -> list[Op]:
    """Return what pins versions for another store; those that are deleted are left out.

    Raises
    ------
    LimitError
        One is pinned for ``REPLICAS_MAX`` others.
    """
    found = [catalog.version(one) for one in versions if catalog.has_version(one)]
    for version in found:
        if len(version.pinned_for) >= limits.REPLICAS_MAX and store not in version.pinned_for:
            msg = f"#{version.id[:8]} is pinned for {limits.REPLICAS_MAX} stores"
            raise LimitError(
                msg, hint="take those of stores that are gone away: pin --delete --for"
            )
    return [
        Pin(version=version.id, store=store)
        for version in found
        if not version.deleted and store not in version.pinned_for
    ]


def unpin_for(catalog: Catalog, versions: Iterable[str], store: str) -> list[Op]:
    """Return what takes the pins of another store away, no others.

    Where others are left, one of them is said once more, which changes nothing: readers that do not
    know for whom a pin is see it go, and come back.
    """
    ops: list[Op] = []
    for version_id in versions:
        pins = catalog.pins(version_id) if catalog.has_version(version_id) else ()
        if store not in pins:
            continue
        ops.append(Unpin(version=version_id, store=store))
        left = [one for one in pins if one != store]
        ops += [Pin(version=version_id, store=one) for one in left[:1]]
    return ops


def pinned_text(version: Version) -> str:
    """Return for whom a version is pinned, as a reason."""
    if not version.pinned_for:
        return "pinned"
    stores = " and ".join(one[:_SHOWN] for one in version.pinned_for)
    return f"pinned for the store {stores}, which evicted it"


def pinned_error(version: Version) -> PolicyError:
    """Return what refuses to delete a pinned version, or a part of it."""
    named = f"{version.run}@{version.step} (#{version.id[:8]})"
    hint = f"unpin it first: ckptstore pin --delete {version.id[:12]}"
    if version.pinned_for:
        hint += "; this may be the only copy: there, load with refill=True brings it back"
    return PolicyError(f"{named} is {pinned_text(version)}", hint=hint)
