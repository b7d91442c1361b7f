"""Storage classes: an optional service of backends whose storage has some, besides keys and bytes.

``Backend.cold_storage`` returns None where there are none. Only packs are ever moved to another
class; ``store.json``, commits, manifests and snapshots stay where they were written, so that a
store opens, lists and verifies its records whatever the class of its packs.

The table of classes serves warnings and estimates of the time that a restore takes; prices are out
of its scope. A class that is not in it (an administrator of Ceph may choose any name) counts as one
that can be read at any time and costs nothing to leave.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

from ckptstore.errors import InvalidInputError
from ckptstore.limits import KIB

STANDARD: Final = "STANDARD"
"""Class of every object that was not moved; S3, GCS and Ceph share the name."""

TIERING: Final = "INTELLIGENT_TIERING"
"""Class within which S3 itself moves objects that nobody reads."""

CLASSED_PREFIX: Final = "packs/"
"""Prefix of the only keys whose objects may be in a class other than the standard one."""

Access: TypeAlias = Literal["readable", "cold", "restoring", "restored"]
"""``readable``: at any time; ``cold``: a restore must be asked for; ``restoring``: one was;
``restored``: for some days."""

HOT: Final = "Hot"
"""Azure's name of the standard class; both names are accepted."""

_NAME = re.compile(r"[A-Z][A-Za-z0-9_-]{0,63}\Z")
_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageClass:
    """One class of a provider."""

    name: str
    min_days: int = 0
    """Least storage duration; deleting or moving an object earlier is charged for the rest."""
    min_bytes: int = 0
    """A smaller object is charged as if it were so large."""
    tiers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Ways to restore an object: name to the usual seconds, from and to. Empty for a class that
    can be read at any time."""
    restored_for_good: bool = False
    """A restore moves the object to the standard class, where it stays; days have no effect."""

    @property
    def is_archive(self) -> bool:
        """Return whether an object must be restored before it can be read."""
        return bool(self.tiers)

    @property
    def may_be_cold(self) -> bool:
        """Return whether only the object itself tells if it can be read.

        Intelligent tiering has archive tiers of its own, where a bucket's owner activated them.
        """
        return self.is_archive or self.name == TIERING


_FLEXIBLE: Final = {
    "Expedited": (60.0, 300.0),
    "Standard": (3 * _HOUR, 5 * _HOUR),
    "Bulk": (5 * _HOUR, 12 * _HOUR),
}
# Published are only the longest times: 15 hours, and an hour for objects below 10 GB.
_REHYDRATION: Final = {"Standard": (1 * _HOUR, 15 * _HOUR), "High": (0.1 * _HOUR, 1 * _HOUR)}
_DEEP: Final = {"Standard": (9 * _HOUR, 12 * _HOUR), "Bulk": (24 * _HOUR, 48 * _HOUR)}

# Sources, read in November 2026:
# S3: https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html (days, bytes)
#     https://docs.aws.amazon.com/AmazonS3/latest/userguide/restoring-objects-retrieval-options.html
#     Archived objects are charged for 8 KiB of index and 32 KiB of metadata besides.
# GCS: https://cloud.google.com/storage/docs/storage-classes
# Azure: https://learn.microsoft.com/azure/storage/blobs/access-tiers-overview
#     https://learn.microsoft.com/azure/storage/blobs/archive-rehydrate-overview
CLASSES: Final[Mapping[str, StorageClass]] = {
    known.name: known
    for known in (
        StorageClass(name=STANDARD),
        StorageClass(name="REDUCED_REDUNDANCY"),
        StorageClass(name=TIERING),
        StorageClass(name="STANDARD_IA", min_days=30, min_bytes=128 * KIB),
        StorageClass(name="ONEZONE_IA", min_days=30, min_bytes=128 * KIB),
        StorageClass(name="GLACIER_IR", min_days=90, min_bytes=128 * KIB),
        StorageClass(name="GLACIER", min_days=90, min_bytes=40 * KIB, tiers=_FLEXIBLE),
        StorageClass(name="DEEP_ARCHIVE", min_days=180, min_bytes=40 * KIB, tiers=_DEEP),
        StorageClass(name="NEARLINE", min_days=30),
        StorageClass(name="COLDLINE", min_days=90),
        StorageClass(name="ARCHIVE", min_days=365),
        StorageClass(name="Cool", min_days=30),
        StorageClass(name="Cold", min_days=90),
        StorageClass(name="Archive", min_days=180, tiers=_REHYDRATION, restored_for_good=True),
    )
}
"""By name. Those of S3, GCS and Azure have different names, but for ``STANDARD``."""


def check_class(name: object) -> str:
    """Return `name` if it may be the name of a class.

    Raises
    ------
    InvalidInputError
        It may not be one.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        msg = f"no storage class is called {name!r:.80}"
        raise InvalidInputError(msg, hint="such as " + ", ".join(CLASSES))
    return name


def class_named(name: str) -> StorageClass:
    """Return the table's entry of a class; empty names and ``Hot`` mean ``STANDARD``."""
    known = CLASSES.get(STANDARD if name in {"", HOT} else name)
    return StorageClass(name=name) if known is None else known


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
        hint = f"move versions there later: ckptstore archive REF --class {found.name}"
        raise InvalidInputError(msg, hint=hint)
    return found.name
