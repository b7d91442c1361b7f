"""From pins that are wanted to the operations of a commit, and what a pin is told as.

As in ``changes``: called inside :meth:`ckptstore.catalog.log.Log.append_any` on the newest catalog,
again for every number that is tried; touch nothing.

A version is pinned for this store, by a person, or for another store that let its own content of
it go: for each on its own, and it may be deleted when no pin is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import LimitError, PolicyError
from ckptstore.format.commit import Op
from ckptstore.format.lifecycle_ops import Pin, Unpin
from ckptstore.model import Version

__all__ = ["pin_for", "pinned_error", "pinned_text", "unpin_for"]

_SHOWN: Final = 8


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
