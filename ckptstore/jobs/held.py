"""What the target of a job holds of a version, by its log as it was last read."""

from __future__ import annotations

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVELS
from ckptstore.catalog.replica_ops import had_content
from ckptstore.model import Version


def has(there: Catalog, version: Version) -> bool:
    """Return whether a store has as much of a version; or had, and let it go itself."""
    if not there.has_version(version.id):
        return False
    found = there.version(version.id)
    at_least = LEVELS.index(found.level) >= LEVELS.index(version.level)
    return is_settled(found) or (at_least and not found.damaged)


def is_settled(there: Version) -> bool:
    """Return whether a store has deleted a version itself, or reduced it to its record."""
    return there.deleted or (there.level == "record" and had_content(there))


def rests_on(there: Catalog, version: Version, store: str) -> bool:
    """Return whether only the record of a version is left, and `store` alone is noted to have it.

    Then it may have been let go there since it is in `store`, which must not let it go since it
    was there.
    """
    if not there.has_version(version.id):
        return False
    found = there.version(version.id)
    return found.level == "record" and not found.deleted and set(found.replicas) == {store}
