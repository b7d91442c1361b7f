"""Storage classes: an optional service of backends whose storage has some, besides keys and bytes.

:func:`cold_storage` returns None for a backend without classes. Only packs are ever moved to
another class; ``store.json``, commits, manifests and snapshots stay where they were written, so
that a store opens, lists and verifies its records whatever the class of its packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from ckptstore.backends.storage_classes import check_class, class_named
from ckptstore.errors import InvalidInputError

CLASSED_PREFIX: Final = "packs/"
"""Prefix of the only keys whose objects may be in a class other than the standard one."""

Access: TypeAlias = Literal["readable", "cold", "restoring", "restored"]
"""``readable``: at any time; ``cold``: a restore must be asked for; ``restoring``: one was;
``restored``: for some days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectState:
    """Class of one object, and whether it can be read now."""

    storage_class: str
    size_bytes: int
    modified_at: float
    """Seconds since 1970 by the storage's clock; a change of the class counts."""
    access: Access
    restored_until: float | None = None
    """Time when a restored object is cold again, in seconds since 1970; None if not reported."""

    @property
    def is_readable(self) -> bool:
        """Return whether it can be read now."""
        return self.access in {"readable", "restored"}


class ColdStorage(Protocol):
    """Access to the classes of one storage. Any thread may call; errors as of a backend."""

    def set_class(self, key: str, name: str) -> bool:
        """Move an object to another class; return False if it was there already.

        At every moment readers find the object as it was, whole, in the one class or the other.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        ColdObjectError
            It is in an archive class and was not restored.
        LimitError
            It is too large for this storage to move.
        StorageError
            The storage does not know the class, or failed.
        """

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        """Request that an object be readable for some days; return False if that is under way.

        If the object is restored already, the days are counted from this request.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        StorageError
            The storage refuses the tier, or failed.
        """

    def restore_state(self, key: str) -> ObjectState:
        """Return class and state of an object.

        Raises
        ------
        ObjectNotFoundError
            No such key.
        """


class _Storage(Protocol):
    """A backend with access to storage classes."""

    def cold_storage(self) -> ColdStorage | None:
        """Return access to the storage classes; None if there are none."""


def cold_storage(backend: _Storage) -> ColdStorage | None:
    """Return access to the storage classes of a backend, through all wrappers, or None."""
    return backend.cold_storage()


def is_classed(key: str) -> bool:
    """Return whether an object may be in a class other than the standard one."""
    return key.startswith(CLASSED_PREFIX)


def check_pack_class(name: object) -> str:
    """Return the storage class for new packs, empty for the standard one.

    Raises
    ------
    InvalidInputError
        There is no such class; or its objects must be restored before they can be read.
    """
    if name in (None, ""):
        return ""
    found = class_named(check_class(str(name)))
    if found.is_archive:
        msg = f"new packs cannot be written in {found.name}: saves and checks read them back"
        raise InvalidInputError(
            msg, hint=f"move versions there later: ckptstore archive REF --class {found.name}"
        )
    return found.name
