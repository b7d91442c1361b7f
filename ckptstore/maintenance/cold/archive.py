"""Packs move to a colder storage class: exactly those that nothing but the named versions needs.

Stateless: where a pack lies is what the storage says, nothing of it is in the log. So a call that
was killed is finished by the next one, a repetition finds nothing left to do, and two at once do
each other no harm. Only packs move; ``store.json``, commits, manifests and snapshots never do, so
that a store opens and lists as fast as before.

A pack that a version needs which is not named stays where it is, whatever else is in it. A version
that appears while packs are moved is looked at before each batch; one that is committed in the
moment between may come to share a pack that has just moved, and is then named in the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore import errors, limits
from ckptstore.backends import storage_classes
from ckptstore.backends.base import ObjectInfo
from ckptstore.catalog.catalog import Catalog
from ckptstore.chunking import batches
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.keys import PACKS_PREFIX, pack_key
from ckptstore.maintenance.core.live_set import Footprint, Reach, Tally, states_of
from ckptstore.maintenance.core.select_versions import select_versions
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.core.task_pool import at_once
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import Shown

_GONE = "it is gone; see ckptstore verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftPack:
    """A pack that stays, since versions need it that are not named."""

    pack: str
    size_bytes: int
    versions: tuple[str, ...]
    """Their ids, some of them if there are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPack:
    """A pack that could not be moved."""

    pack: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ArchiveReport(Shown):
    """Result of an archiving, or of its dry run."""

    dry_run: bool
    storage_class: str
    versions: tuple[str, ...] = ()
    """Ids of the versions that were named, without those kept as a record only."""
    moved: Tally = field(default_factory=Tally)
    """With `dry_run`, the packs that would be."""
    there: Tally = field(default_factory=Tally)
    """In the class already."""
    left: tuple[LeftPack, ...] = ()
    skipped: tuple[SkippedPack, ...] = ()
    cooled: tuple[str, ...] = ()
    """Ids of versions that appeared meanwhile, and share a pack that has just moved."""
    warnings: tuple[str, ...] = ()
    """Costs that are higher than they seem, a sentence each."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether everything was moved that could be."""
        return not self.skipped


def cold_storage_of(repo: Repo) -> storage_classes.ColdStorage:
    """Return the access to the classes of a store's storage.

    Raises
    ------
    InvalidInputError
        It has none.
    """
    cold = repo.backend.cold_storage()
    if cold is None:
        msg = f"the storage of {repo.url} has no storage classes"
        hint = "S3, GCS and Azure have; ckptstore replicate --to URL copies it there"
        raise errors.InvalidInputError(msg, hint=hint)
    return cold


def archivable(
    repo: Repo,
    *,
    runs: Sequence[str] = (),
    keep_hot: str | Sequence[str] | None = None,
    min_age_s: float = 0.0,
) -> list[Version]:
    """Return the versions that may get cold: old enough, no head of a run, kept by no rule.

    Parameters
    ----------
    runs
        Of these runs; all if none is named.
    keep_hot
        Rules as in a retention policy, for versions that stay as they are.
    min_age_s
        Since they were saved, in seconds by the storage's clock.

    Raises
    ------
    RunNotFoundError, InvalidInputError
        A run or a rule is none.
    """
    chosen = select_versions(repo, runs=runs)
    hot = {info.head for info in repo.catalog.runs()}
    if keep_hot is not None:
        hot |= {version.id for version in select_versions(repo, runs=runs, rules=keep_hot)}
    times = StorageTimes(repo)
    cooled = [version for version in chosen if version.id not in hot]
    return [one for one in cooled if not min_age_s or times.age_s(one) >= min_age_s]


def archive(
    repo: Repo,
    versions: Sequence[Version],
    storage_class: str,
    *,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
) -> ArchiveReport:
    """Move what only these versions need to a storage class; return what was done.

    With ``STANDARD`` everything that they need comes back, also where others need it: what was
    restored for some days stays readable for good.

    Raises
    ------
    InvalidInputError
        The storage has no classes, or none may be called so.
    ReadOnlyError
        The store was opened read-only.
    CorruptObjectError, UnsupportedFeatureError
        The manifest of a version cannot be read, so that it is not known what it needs.
    StorageError
        The storage failed; what was moved stays so, and a repetition goes on.
    """
    began = repo.environment.monotonic()
    found = storage_classes.class_named(storage_classes.check_class(storage_class))
    cold = cold_storage_of(repo)
    if repo.options.read_only and not dry_run:
        raise errors.ReadOnlyError(f"{repo.url} was opened read-only")
    reach, named = Reach(repo, progress=progress), {version.id for version in versions}
    work = _Archiving(repo, cold, reach, found, named, progress, dry_run=dry_run)
    work.plan()
    if not dry_run:
        work.move()
    return work.report(repo.environment.monotonic() - began)


@dataclass(slots=True)
class _Archiving:
    """One call; owned by the calling thread."""

    repo: Repo
    cold: storage_classes.ColdStorage
    reach: Reach
    target: storage_classes.StorageClass
    named: set[str]
    progress: ProgressCallback
    dry_run: bool
    catalog: Catalog = field(init=False)
    planned: int = 0
    """Number of the commit that the plan follows."""
    needs: Mapping[str, Footprint] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    """Packs that the named versions need."""
    hot: set[str] = field(default_factory=set)
    """Packs that stay, since versions need them that are not named."""
    infos: Mapping[str, ObjectInfo | storage_classes.ObjectState] = field(default_factory=dict)
    """Of those of `wanted` that are there."""
    moving: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    cooled: list[str] = field(default_factory=list)

    def plan(self) -> None:
        """Find out what the versions of this moment need, and where those packs lie."""
        self._refresh()
        self.planned = self.catalog.number
        self.wanted = self._packs(self.needs.keys() & self.named)
        self.infos = _infos(self.repo, self.cold, sorted(self.wanted))
        for pack in sorted(self.wanted):
            info = self.infos.get(pack)
            if info is None:
                self.skipped[pack] = _GONE
            elif info.storage_class == self.target.name:
                self.there.append(pack)
            elif pack not in self.hot:
                self.moving.append(pack)

    def _refresh(self) -> None:
        self.catalog = self.repo.refresh()
        try:
            self.needs = self.reach.of(self.catalog)
        except (errors.IntegrityError, errors.FormatError) as error:
            cause = error.__cause__
            why = cause.message if isinstance(cause, errors.CkptStoreError) else error.message
            msg = f"nothing is moved, since it is not known what every version needs: {why}"
            raise type(error)(msg, hint=error.hint) from error
        if self.target.name != storage_classes.STANDARD:
            self.hot = self._packs(self.needs.keys() - self.named)

    def _packs(self, versions: Iterable[str]) -> set[str]:
        """Return the packs that some versions need."""
        return {pack for version in versions for pack in self.needs[version].packs}

    def move(self) -> None:
        """Move pack after pack, some at once; look between batches whether somebody needs one."""
        total, done = sum(map(self._size, self.moving)), 0
        for part in batches(self.moving, limits.ARCHIVE_BATCH_PACKS):
            self._look_again()
            batch = [pack for pack in part if pack not in self.hot]
            for pack, why in zip(batch, at_once(self.repo.backend, self._move, batch), strict=True):
                if why:
                    self.skipped[pack] = why
                else:
                    self.moved.append(pack)
                done += self._size(pack)
                self.progress(Progress(stage="archive", done=done, total=total))
        self._look_again()
        if self.catalog.number == self.planned:
            return
        needed = self._packs(self.needs)  # the rest a collection may have deleted
        self.skipped = {pack: why for pack, why in self.skipped.items() if pack in needed}
        if self.target.name != storage_classes.STANDARD:
            moved = set(self.moved)
            self.cooled = [
                version
                for version, need in self.needs.items()
                if version not in self.named and not moved.isdisjoint(need.packs)
            ]

    def _look_again(self) -> None:
        """Take into account what was committed meanwhile."""
        if self.repo.refresh().number != self.catalog.number:
            self._refresh()

    def _move(self, pack: str) -> str:
        """Move a pack; return why that cannot be, empty if it was done."""
        try:
            self.cold.set_class(pack_key(pack), self.target.name)
        except errors.ObjectNotFoundError:
            return _GONE
        except (errors.ColdObjectError, errors.LimitError) as error:
            return str(error)
        return ""

    def report(self, seconds: float) -> ArchiveReport:
        """Return what was done, or would be."""
        moved = self.moving if self.dry_run else self.moved
        return ArchiveReport(
            dry_run=self.dry_run,
            storage_class=self.target.name,
            versions=tuple(version for version in self.needs if version in self.named),
            moved=self._tally(moved),
            there=self._tally(self.there),
            left=tuple(self._left({*moved, *self.there, *self.skipped})),
            skipped=tuple(
                SkippedPack(pack=pack, size_bytes=self._size(pack), why=why)
                for pack, why in sorted(self.skipped.items())
            ),
            cooled=tuple(self.cooled),
            warnings=tuple(self._warnings(moved)),
            seconds=seconds,
        )

    def _size(self, pack: str) -> int:
        info = self.infos.get(pack)
        return 0 if info is None else info.size_bytes

    def _tally(self, packs: Sequence[str]) -> Tally:
        return Tally(count=len(packs), size_bytes=sum(map(self._size, packs)))

    def _left(self, done: set[str]) -> Iterator[LeftPack]:
        """Yield the packs that stay, with the versions that keep them."""
        left = self.wanted - done
        keepers: dict[str, list[str]] = {pack: [] for pack in left}
        for version, need in self.needs.items():
            if version in self.named:
                continue
            for pack in left.intersection(need.packs):
                if len(keepers[pack]) < limits.KEEPERS_LISTED_MAX:
                    keepers[pack].append(version)
        for pack in sorted(left):
            yield LeftPack(pack=pack, size_bytes=self._size(pack), versions=tuple(keepers[pack]))

    def _warnings(self, moved: Sequence[str]) -> Iterator[str]:
        """Say what costs more than it seems."""
        small = sum(self._size(pack) < self.target.min_bytes for pack in moved)
        if small:
            yield (
                f"{small} packs are smaller than {self.target.min_bytes} bytes, and are"
                f" charged in {self.target.name} as if they were not"
            )
        if moved and self.target.min_days:
            yield (
                f"a pack that leaves {self.target.name} within {self.target.min_days} days, deleted"
                " or moved, is charged for all of them"
            )
        for info in self.catalog.runs():
            if self.target.is_archive and info.head in self.named:
                yield (
                    f"a head is among them, that of {info.name}: what is saved after it may share"
                    " its packs, and is then cold from the beginning"
                )


def _infos(
    repo: Repo, cold: storage_classes.ColdStorage, packs: Sequence[str]
) -> dict[str, ObjectInfo | storage_classes.ObjectState]:
    """Return size and class of the packs that are there.

    By one request each; of many, from a listing, which tells a thousand at once.
    """
    if len(packs) > limits.LIST_PAGE_OBJECTS:
        keys = {pack_key(pack): pack for pack in packs}
        listed = repo.backend.list(PACKS_PREFIX)
        return {keys[info.key]: info for info in listed if info.key in keys}
    states = states_of(repo.backend, cold, packs)
    return {pack: state for pack, state in states.items() if state is not None}
