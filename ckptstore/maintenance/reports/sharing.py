"""Bytes that versions and runs hold, alone and together: distinct chunks of live versions.

Computed from the manifests of live versions, one after another. A chunk counts with its header and
its row in the pack's index. Packs are freed when nothing in them is live, or by a repack: bytes
that a version holds alone are dead when it is deleted, and do not vanish at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.manifest import Manifest
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.format.tables import BASE_ROLE
from ckptstore.maintenance.core.live_set import chunk_keys, live_versions
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.shown import Shown

_EACH = CHUNK_HEADER_BYTES + INDEX_ROW_BYTES

_Holders = tuple[str | None, frozenset[str]]
"""The version that holds a chunk, None if there are several; and the runs that do."""


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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SharedUsage(Shown):
    """Bytes that live versions hold, together and each."""

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
    """By run; exclusive are bytes that no other run needs."""
    versions: dict[str, HeldBytes] = field(default_factory=dict)
    """By version id; exclusive are bytes that no other version needs."""
    shares: tuple[Share, ...] = ()
    """By set of runs, the largest first; those of one run alone are left out."""
    skipped: tuple[str, ...] = ()
    """Why versions were left out, a sentence each: their manifests are gone or damaged."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Distinct chunks, in the order of their keys."""

    keys: npt.NDArray[np.uint64]
    facts: npt.NDArray[np.int64]
    """Three rows: stored bytes, decoded bytes, number of the role."""

    @classmethod
    def of(cls, manifest: Manifest, packs: dict[str, int], roles: dict[str, int]) -> _Chunks:
        """Return the chunks of a manifest; new packs and roles get the next numbers."""
        table = manifest.pieces
        places = np.array([_number(packs, pack) for pack in table.packs], np.uint64)
        keys = chunk_keys(places[table.pack], table.offset) if len(table) else table.offset
        unique, rows = np.unique(keys, return_index=True)
        by_tensor = np.array([_number(roles, one.role) for one in manifest.tensors], np.int64)
        by_row = np.repeat(by_tensor, np.diff(manifest.first))
        if more := len(table) - len(by_row):  # bases of deltas
            base = np.full(more, _number(roles, BASE_ROLE), np.int64)
            by_row = np.concatenate((by_row, base))
        size = table.stored[rows].astype(np.int64) + _EACH
        return cls(unique, np.stack((size, table.slab[rows].astype(np.int64), by_row[rows])))

    @property
    def size(self) -> npt.NDArray[np.int64]:
        """Stored bytes of each chunk."""
        sizes: npt.NDArray[np.int64] = self.facts[0]
        return sizes


def _number(numbers: dict[str, int], name: str) -> int:
    """Return the number of a name, in the order of first uses."""
    return numbers.setdefault(name, len(numbers))


class _Ledger:
    """All chunks met so far, each with its holders: 40 bytes a distinct chunk.

    New ones are sorted in when they are as many as the old, so that the work grows with n log n.
    """

    def __init__(self) -> None:
        self.chunks = _Chunks(np.zeros(0, np.uint64), np.zeros((3, 0), np.int64))
        self.holders = np.zeros(0, np.int64)
        """Place in `sets` of the holders of each chunk."""
        self.sets: list[_Holders] = [(None, frozenset())]
        self._places: dict[_Holders, int] = {}
        self._waiting: list[tuple[_Chunks, str, str]] = []
        self._waiting_count = 0

    def add(self, chunks: _Chunks, version: str, run: str) -> None:
        """Take in the chunks of a version; they are sorted in with others, many at once."""
        self._waiting.append((chunks, version, run))
        self._waiting_count += len(chunks.keys)
        if self._waiting_count > max(len(self.holders), 1 << 16):
            self.settle()

    def settle(self) -> None:
        """Sort in the chunks that wait."""
        parts = [self.chunks, *(part for part, _, _ in self._waiting)]
        keys, first = np.unique(np.concatenate([part.keys for part in parts]), return_index=True)
        facts = np.concatenate([part.facts for part in parts], axis=1)[:, first]
        holders = np.zeros(len(keys), np.int64)
        holders[np.searchsorted(keys, self.chunks.keys)] = self.holders
        for part, version, run in self._waiting:
            at = np.searchsorted(keys, part.keys)
            before, inverse = np.unique(holders[at], return_inverse=True)
            after = [self._with(int(place), version, run) for place in before]
            holders[at] = np.array(after, np.int64)[inverse]
        self.chunks, self.holders = _Chunks(keys, facts), holders
        self._waiting, self._waiting_count = [], 0

    def _with(self, place: int, version: str, run: str) -> int:
        """Return the place of some holders and one more."""
        _, runs = self.sets[place]
        wanted = (None if runs else version, runs | {run})
        if wanted not in self._places:
            self._places[wanted] = len(self.sets)
            self.sets.append(wanted)
        return self._places[wanted]


def shared_usage(repo: Repo, *, progress: ProgressCallback = silent) -> SharedUsage:
    """Return the bytes that the live versions of a store hold; reads each of their manifests once.

    A version whose manifest cannot be read is left out, and the report says so. Memory: 40 bytes a
    distinct chunk, and one manifest.

    Raises
    ------
    StorageError
        The storage failed.
    """
    packs: dict[str, int] = {}
    roles: dict[str, int] = {}
    ledger = _Ledger()
    held: dict[str, int] = {}
    runs: dict[str, None] = {}
    skipped: list[str] = []
    for version, manifest in _manifests(repo, skipped, progress):
        chunks = _Chunks.of(manifest, packs, roles)
        held[version.id] = int(chunks.size.sum())
        runs[version.run] = None
        ledger.add(chunks, version.id, version.run)
    ledger.settle()
    found = ledger.chunks
    exclusive: dict[str | None, int] = {}
    by_runs: dict[frozenset[str], int] = {}
    sizes = _sums(ledger.holders, found.size, len(ledger.sets)).tolist()
    for (only, together), size in zip(ledger.sets, sizes, strict=True):
        exclusive[only] = size
        by_runs[together] = by_runs.get(together, 0) + size
    by_role = _sums(found.facts[2], found.size, len(roles))
    return SharedUsage(
        versions_count=len(held),
        chunks_count=len(found.keys),
        stored_bytes=int(found.size.sum()),
        raw_bytes=int(found.facts[1].sum()),
        roles=dict(sorted(zip(roles, by_role.tolist(), strict=True))),
        runs={
            run: HeldBytes(
                held=sum(size for together, size in by_runs.items() if run in together),
                exclusive=by_runs.get(frozenset({run}), 0),
            )
            for run in runs
        },
        versions={
            version: HeldBytes(held=size, exclusive=exclusive.get(version, 0))
            for version, size in held.items()
        },
        shares=_shares(by_runs),
        skipped=tuple(skipped),
    )


def _shares(by_runs: dict[frozenset[str], int]) -> tuple[Share, ...]:
    found = (
        Share(runs=tuple(sorted(together)), size_bytes=size)
        for together, size in by_runs.items()
        if len(together) > 1 and size
    )
    return tuple(sorted(found, key=lambda share: (-share.size_bytes, share.runs)))


def _manifests(
    repo: Repo, skipped: list[str], progress: ProgressCallback
) -> Iterator[tuple[Version, Manifest]]:
    """Yield the live versions with their manifests.

    Those whose manifest is gone or damaged are left out, and `skipped` says why.
    """
    versions = list(live_versions(repo.refresh()))
    for done, version in enumerate(versions, 1):
        try:
            manifest = repo.manifests.load(version)
        except (IntegrityError, FormatError) as error:
            skipped.append(error.message)
        else:
            yield version, manifest
        progress(Progress(stage="manifests", done=done, total=len(versions), unit="versions"))


def _sums(
    places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the sum of sizes at each place, exact."""
    found = np.zeros(count, np.int64)
    np.add.at(found, places, sizes)
    return found
