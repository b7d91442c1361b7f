"""Who holds what: the bytes of packs that a version needs, and those that it alone needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.backends.base import ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.format.keys import pack_key
from ckptstore.maintenance.core.live_set import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One live version and the objects that it keeps from being collected."""

    version: str
    run: str
    step: int
    tags: tuple[str, ...]
    pinned: bool
    held_bytes: int
    """Of its manifest and of all packs that it needs."""
    alone_bytes: int
    """The part that would be free if this version alone were deleted."""


def holders_of(
    catalog: Catalog, reach: Reach, objects: Mapping[str, ObjectInfo]
) -> tuple[Holder, ...]:
    """Return what each live version holds, those that hold most alone first.

    Raises
    ------
    CorruptObjectError, UnsupportedFeatureError, StorageError
        As :meth:`ckptstore.maintenance.core.live_set.Reach.of`.
    """

    def size(key: str) -> int:
        info = objects.get(key)
        return info.size_bytes if info is not None else 0

    needs = reach.of(catalog)
    shared = Counter(pack for need in needs.values() for pack in need.packs)
    found = []
    for version_id, need in needs.items():
        version = catalog.version(version_id)
        own = size(version.manifest_key)
        sizes = {pack: size(pack_key(pack)) for pack in need.packs}
        found.append(
            Holder(
                version=version.id,
                run=version.run,
                step=version.step,
                tags=version.tags,
                pinned=version.pinned,
                held_bytes=own + sum(sizes.values()),
                alone_bytes=own + sum(n for pack, n in sizes.items() if shared[pack] == 1),
            )
        )
    return tuple(sorted(found, key=lambda h: (-h.alone_bytes, -h.held_bytes, h.version)))
