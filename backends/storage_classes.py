"""Table of storage classes: fees for early deletion, and duration of a restore.

It serves warnings and estimates of the time that a restore takes; prices are out of its scope. A
class that is not in it (an administrator of Ceph may choose any name) counts as one that can be
read at any time and costs nothing to leave.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptstore.errors import InvalidInputError
from ckptstore.limits import KIB

STANDARD: Final = "STANDARD"
"""Class of every object that was not moved; S3, GCS and Ceph share the name."""

TIERING: Final = "INTELLIGENT_TIERING"
"""Class within which S3 itself moves objects that nobody reads."""

_NAME = re.compile(r"[A-Z][A-Z0-9_-]{0,63}\Z")
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
_DEEP: Final = {"Standard": (9 * _HOUR, 12 * _HOUR), "Bulk": (24 * _HOUR, 48 * _HOUR)}

# Sources, read in November 2026:
# S3: https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html (days, bytes)
#     https://docs.aws.amazon.com/AmazonS3/latest/userguide/restoring-objects-retrieval-options.html
#     Archived objects are charged for 8 KiB of index and 32 KiB of metadata besides.
# GCS: https://cloud.google.com/storage/docs/storage-classes
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
    )
}
"""By name. Those of S3 and of GCS have different names, but for ``STANDARD``."""


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
    """Return the table's entry of a class; empty names and ``STANDARD`` mean the same."""
    known = CLASSES.get(name or STANDARD)
    return StorageClass(name=name) if known is None else known
