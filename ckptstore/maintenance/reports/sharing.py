"""Who holds which bytes: distinct chunks of live versions, and what versions and runs share.

Computed from the manifests of live versions, one after another. A chunk counts with its header and
its row in the pack's index. Packs are freed when nothing in them is live, or by a repack: what a
version holds alone is what deleting it makes free for these, not what vanishes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.manifest import Manifest
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.format.tables import BASE_ROLE
from ckptstore.maintenance.core.live_set import chunk_keys, live_versions
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["HeldBytes", "Share", "SharedUsage", "VersionSharing", "shared_usage", "version_sharing"]

_EACH = CHUNK_HEADER_BYTES + INDEX_ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Stored bytes of distinct chunks."""

    held: int = 0
    """All that is needed to load it."""
    exclusive: int = 0
    """The part that nothing else needs."""

    @property
    def shared(self) -> int:
        """The part that something else needs too."""
        return self.held - self.exclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Stored bytes that exactly these runs need together."""

    runs: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUsage:
    """What live versions hold, together and each."""

    versions_count: int
    chunks_count: int
    """Distinct ones."""
    stored_bytes: int
    """Of distinct chunks."""
    raw_bytes: int
    """The same, decoded."""
    roles: dict[str, int] = field(default_factory=dict)
    """Stored bytes of distinct chunks by role; one that holds several counts for the first."""
    runs: dict[str, HeldBytes] = field(default_factory=dict)
    """By run; exclusive is what no other run needs."""
    versions: dict[str, HeldBytes] = field(default_factory=dict)
    """By version id; exclusive is what no other version needs."""
    shares: tuple[Share, ...] = ()
    """By set of runs, the largest first; those of one run alone are left out."""
    skipped: tuple[str, ...] = ()
    """Why versions were left out, a sentence each: their manifests are gone or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSharing:
    """What one version holds, and with whom."""

    version: Version
    bytes: HeldBytes
    roles: dict[str, HeldBytes] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    """Stored bytes that versions of a run need too, by run, the most first."""
    versions: dict[str, int] = field(default_factory=dict)
    """The same by version id."""
    skipped: tuple[str, ...] = ()
    """Why other versions were left out; see :class:`SharedUsage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """Distinct chunks of one manifest, in the order of their keys."""

    keys: npt.NDArray[np.uint64]
    size: npt.NDArray[np.int64]
    raw: npt.NDArray[np.int64]
    role: npt.NDArray[np.int64]


class _Names:
    """Numbers for names, in the order of their first use."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places))


def _chunks(manifest: Manifest, packs: _Names, roles: _Names) -> _Chunks:
    table = manifest.pieces
    places = np.array([packs.of(pack) for pack in table.packs], np.uint64)
    keys = chunk_keys(places[table.pack], table.offset) if len(table) else table.offset
    unique, rows = np.unique(keys, return_index=True)
    by_tensor = np.array([roles.of(record.role) for record in manifest.tensors], np.int64)
    by_row = np.repeat(by_tensor, np.diff(manifest.first))
    if more := len(table) - len(by_row):  # what deltas refer to
        by_row = np.concatenate((by_row, np.full(more, roles.of(BASE_ROLE), np.int64)))
    return _Chunks(
        keys=unique,
        size=table.stored[rows].astype(np.int64) + _EACH,
        raw=table.slab[rows].astype(np.int64),
        role=by_row[rows],
    )


class _Ledger:
    """All chunks met so far: how many versions and which runs hold each.

    40 bytes a distinct chunk. New ones are sorted in when they are as many as the old, so that the
    work grows with n log n.
    """

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.uint64)
        self.size = np.zeros(0, np.int64)
        self.raw = np.zeros(0, np.int64)
        self.role = np.zeros(0, np.int64)
        self.owner = np.zeros(0, np.int64)
        """Number of the only version that holds it; -1 if there are several."""
        self.runs = np.zeros(0, np.int64)
        """Number of the set of runs that hold it."""
        self.sets: list[frozenset[int]] = []
        self._places: dict[frozenset[int], int] = {}
        self._waiting: list[tuple[_Chunks, int, int]] = []
        self._waiting_count = 0

    def add(self, chunks: _Chunks, version: int, run: int) -> None:
        """Take in the chunks of a version; they are sorted in with others, many at once."""
        self._waiting.append((chunks, version, run))
        self._waiting_count += len(chunks.keys)
        if self._waiting_count > max(len(self.keys), 1 << 16):
            self.settle()

    def settle(self) -> None:
        """Sort in what waits."""
        if not self._waiting:
            return
        parts = [part for part, _, _ in self._waiting]
        keys = np.concatenate([self.keys, *(part.keys for part in parts)])
        unique, first = np.unique(keys, return_index=True)
        old = self.keys
        for name in ("size", "raw", "role"):
            columns = [getattr(self, name), *(getattr(part, name) for part in parts)]
            setattr(self, name, np.concatenate(columns)[first])
        at = np.searchsorted(unique, old)
        owner, runs = (np.full(len(unique), fill, np.int64) for fill in (-2, self._set(())))
        owner[at], runs[at] = self.owner, self.runs
        for part, version, run in self._waiting:
            at = np.searchsorted(unique, part.keys)
            owner[at] = np.where(owner[at] == -2, version, -1)
            before, inverse = np.unique(runs[at], return_inverse=True)
            after = [self._set(self.sets[int(place)] | {run}) for place in before]
            runs[at] = np.array(after, np.int64)[inverse]
        self.keys, self.owner, self.runs = unique, owner, runs
        self._waiting, self._waiting_count = [], 0

    def _set(self, runs: Sequence[int] | frozenset[int]) -> int:
        wanted = frozenset(runs)
        if wanted not in self._places:
            self._places[wanted] = len(self.sets)
            self.sets.append(wanted)
        return self._places[wanted]


def shared_usage(repo: Repo, *, progress: ProgressCallback = silent) -> SharedUsage:
    """Return what the live versions of a store hold; reads each of their manifests once.

    A version whose manifest cannot be read is left out, and the report says so. Memory: 40 bytes a
    distinct chunk, and one manifest.

    Raises
    ------
    StorageError
        The storage failed.
    """
    versions = _Live.of(repo.refresh())
    packs, roles, runs = _Names(), _Names(), _Names()
    ledger = _Ledger()
    held = np.zeros(len(versions.ids), np.int64)
    skipped: dict[str, str] = {}
    for place, version in enumerate(versions.all):
        manifest = _manifest(repo, version, skipped)
        if manifest is not None:
            chunks = _chunks(manifest, packs, roles)
            held[place] = chunks.size.sum()
            ledger.add(chunks, place, runs.of(version.run))
        _tell(progress, place + 1, len(versions.ids))
    ledger.settle()
    alone = ledger.owner >= 0
    exclusive = _sums(ledger.owner[alone], ledger.size[alone], len(versions.ids))
    by_role = _sums(ledger.role, ledger.size, len(roles.places))
    by_set = _sums(ledger.runs, ledger.size, len(ledger.sets))
    names = list(runs.places)
    return SharedUsage(
        versions_count=len(versions.ids) - len(skipped),
        chunks_count=len(ledger.keys),
        stored_bytes=int(ledger.size.sum()),
        raw_bytes=int(ledger.raw.sum()),
        roles={role: int(size) for role, size in sorted(zip(roles.places, by_role, strict=True))},
        runs={name: _of_run(ledger, by_set, place) for place, name in enumerate(names)},
        versions={
            version_id: HeldBytes(held=int(all_of_it), exclusive=int(own))
            for version_id, all_of_it, own in zip(versions.ids, held, exclusive, strict=True)
            if version_id not in skipped
        },
        shares=_shares(ledger, by_set, names),
        skipped=tuple(skipped.values()),
    )


def _manifest(repo: Repo, version: Version, skipped: dict[str, str]) -> Manifest | None:
    """Return the manifest of a version; None, and why in `skipped`, if it is gone or damaged."""
    try:
        return repo.manifests.load(version)
    except (IntegrityError, FormatError) as error:
        skipped[version.id] = error.message
        return None


def _of_run(ledger: _Ledger, by_set: npt.NDArray[np.int64], run: int) -> HeldBytes:
    held = sum(int(by_set[at]) for at, runs in enumerate(ledger.sets) if run in runs)
    own = sum(int(by_set[at]) for at, runs in enumerate(ledger.sets) if runs == {run})
    return HeldBytes(held=held, exclusive=own)


def _shares(
    ledger: _Ledger, by_set: npt.NDArray[np.int64], names: Sequence[str]
) -> tuple[Share, ...]:
    found = [
        Share(runs=tuple(sorted(names[run] for run in runs)), size_bytes=int(by_set[at]))
        for at, runs in enumerate(ledger.sets)
        if len(runs) > 1 and by_set[at]
    ]
    return tuple(sorted(found, key=lambda share: (-share.size_bytes, share.runs)))


def version_sharing(
    repo: Repo, version: Version, *, progress: ProgressCallback = silent
) -> VersionSharing:
    """Return what one version holds and with whom; reads the manifest of each live version once.

    Memory: two manifests.

    Raises
    ------
    VersionNotFoundError
        Only its record is kept.
    CorruptObjectError
        The manifest of the version itself is gone or damaged; that of another is left out.
    StorageError
        The storage failed.
    """
    packs, roles = _Names(), _Names()
    mine = _chunks(repo.manifests.load(version), packs, roles)
    shared = np.zeros(len(mine.keys), np.bool_)
    own_packs = len(packs.places)
    by_run: dict[str, npt.NDArray[np.bool_]] = {}
    by_version: dict[str, int] = {}
    versions = _Live.of(repo.refresh())
    skipped: dict[str, str] = {}
    for place, other in enumerate(versions.all):
        manifest = None if other.id == version.id else _manifest(repo, other, skipped)
        if manifest is not None:
            others = _chunks(manifest, packs, _Names())
            common = np.isin(mine.keys, others.keys, assume_unique=True)
            if common.any():
                shared |= common
                by_run[other.run] = by_run.get(other.run, common) | common
                by_version[other.id] = int(mine.size[common].sum())
            # What only others hold is never asked for again.
            for pack in list(packs.places)[own_packs:]:
                del packs.places[pack]
        _tell(progress, place + 1, len(versions.ids))
    held = _sums(mine.role, mine.size, len(roles.places))
    own = _sums(mine.role[~shared], mine.size[~shared], len(roles.places))
    most = {run: int(mine.size[common].sum()) for run, common in by_run.items()}
    return VersionSharing(
        version=version,
        bytes=HeldBytes(held=int(mine.size.sum()), exclusive=int(mine.size[~shared].sum())),
        roles={
            role: HeldBytes(held=int(all_of_it), exclusive=int(alone))
            for role, all_of_it, alone in sorted(zip(roles.places, held, own, strict=True))
        },
        runs=dict(sorted(most.items(), key=lambda item: (-item[1], item[0]))),
        versions=by_version,
        skipped=tuple(skipped.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    all: Sequence[Version]
    ids: Sequence[str]

    @classmethod
    def of(cls, catalog: Catalog) -> _Live:
        found = list(live_versions(catalog))
        return cls(all=found, ids=[version.id for version in found])


def _sums(
    places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the sum of sizes at each place, exact."""
    found = np.zeros(count, np.int64)
    np.add.at(found, places, sizes)
    return found


def _tell(progress: ProgressCallback, done: int, total: int) -> None:
    progress(Progress(stage="manifests", done=done, total=total, unit="versions"))
