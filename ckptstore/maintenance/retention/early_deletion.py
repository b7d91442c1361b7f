"""What leaving costs before its time: packs whose storage class is charged for a least of days.

Which class a pack is in, and since when, is known to the storage alone; a listing tells it. So
first the packs are listed: where none is in such a class, which is nearly everywhere, that is all.
Then it is looked up which of the versions that are to go name one of those that are, and which of
the versions that stay need it too. Everything is bounded; what was not looked at is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo
from ckptstore.backends.cold import cold_storage
from ckptstore.backends.storage_classes import class_named
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.retention import Fate
from ckptstore.errors import FormatError, IntegrityError, NotFoundError
from ckptstore.format.keys import PACKS_PREFIX, pack_id
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.core.live_set import Footprint, days_left, live_versions
from ckptstore.maintenance.retention.reduce import weights_part
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """One version of which something is to go."""

    version: Version
    """As it is now, or was before it went."""
    fate: Fate
    """What stays of it; ``gone`` for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyClass:
    """Packs of one storage class that would leave it before its least days have passed."""

    storage_class: str
    min_days: int
    """Whoever deletes a pack before is charged for the rest of these."""
    days_left: int
    """Of the pack that has been there for the shortest time, counted from now."""
    versions_count: int
    """Of those that are to go, how many need one of the packs."""
    packs_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """What of versions that are to go is charged for longer, if a collection deletes it now."""

    classes: tuple[EarlyClass, ...] = ()
    unknown: tuple[str, ...] = ()
    """What was not looked at, since there is too much of it; a sentence each."""


def leaving_early(repo: Repo, catalog: Catalog, leaving: Sequence[Leaving]) -> Early:
    """Return what it costs that versions go: nothing where the storage has no classes.

    At most ``EARLY_PACKS_LISTED_MAX / 1000`` requests, and where packs were found that leave early,
    one for each of ``EARLY_MANIFESTS_MAX`` manifests; no pack is asked for by itself.

    Raises
    ------
    StorageError
        The storage failed.
    """
    if not leaving or cold_storage(repo.backend) is None:
        return Early()
    look = _Look(repo=repo)
    look.list_packs()
    if look.young:
        look.find_leaving(leaving)
    if look.found:
        gone = {one.version.id: one for one in leaving}
        staying = (one for one in live_versions(catalog) if one.id not in gone)
        look.leave_out(staying)
    return Early(classes=tuple(look.classes()), unknown=tuple(look.unknown))


@dataclass(slots=True, kw_only=True)
class _Look:
    """One look; owned by the calling thread."""

    repo: Repo
    young: dict[str, tuple[ObjectInfo, float]] = field(default_factory=dict)
    """Packs that would leave their class early, by id, and how many days are left."""
    found: dict[str, set[str]] = field(default_factory=dict)
    """Of those, which versions that are to go need each."""
    unknown: list[str] = field(default_factory=list)
    left: int = field(default_factory=lambda: limits.EARLY_MANIFESTS_MAX)
    """Manifests that may still be read."""

    def list_packs(self) -> None:
        """Find the packs that are in a class for less than its least days."""
        now_s = self.repo.environment.now_ms() / 1000
        listed = self.repo.backend.list(PACKS_PREFIX)
        for info in islice(listed, limits.EARLY_PACKS_LISTED_MAX):
            days = days_left(info, now_s=now_s)
            pack = pack_id(info.key)
            if pack is not None and class_named(info.storage_class).min_days and days > 0:
                self.young[pack] = (info, days)
        if next(iter(listed), None) is not None:
            count = limits.EARLY_PACKS_LISTED_MAX
            self.unknown.append(f"only the first {count} packs of the store were looked at")

    def find_leaving(self, leaving: Sequence[Leaving]) -> None:
        """Find out which of these packs versions let go of."""
        kept: set[str] = set()
        for one in leaving[: self.left]:
            manifest = self._manifest(one.version)
            if manifest is None:
                self.unknown.append(f"the manifest of #{one.version.id[:8]} cannot be read")
                continue
            if one.fate == "weights" and one.version.level == "full":
                kept |= self._packs(weights_part(manifest))
            for pack in self._packs(manifest):
                self.found.setdefault(pack, set()).add(one.version.id)
        for pack in kept:
            self.found.pop(pack, None)
        if len(leaving) > self.left:
            self.unknown.append(f"only {self.left} of {len(leaving)} versions were looked at")
        self.left -= len(leaving)

    def leave_out(self, staying: Iterable[Version]) -> None:
        """Forget packs that versions need which stay."""
        for version in staying:
            if not self.found:
                return
            if self.left <= 0:
                what = "what further versions share with them is counted, though it stays"
                self.unknown.append(what)
                return
            self.left -= 1
            manifest = self._manifest(version)
            if manifest is not None:
                for pack in self._packs(manifest):
                    self.found.pop(pack, None)

    def classes(self) -> Iterator[EarlyClass]:
        """Yield what was found, by class."""
        by_class: dict[str, list[str]] = {}
        for pack in self.found:
            by_class.setdefault(self.young[pack][0].storage_class, []).append(pack)
        for name, packs in sorted(by_class.items()):
            yield EarlyClass(
                storage_class=name,
                min_days=class_named(name).min_days,
                days_left=math.ceil(max(self.young[pack][1] for pack in packs)),
                versions_count=len(set().union(*(self.found[pack] for pack in packs))),
                packs_count=len(packs),
                size_bytes=sum(self.young[pack][0].size_bytes for pack in packs),
            )

    def _manifest(self, version: Version) -> Manifest | None:
        if version.level == "record":
            return None
        try:  # past the cache, which holds what training goes on from
            return read_manifest(self.repo.backend, version)
        except (IntegrityError, FormatError, NotFoundError):
            return None

    def _packs(self, manifest: Manifest) -> set[str]:
        """Return which of the packs that would leave early a manifest needs."""
        return {pack for pack in Footprint.of(manifest).packs if pack in self.young}
