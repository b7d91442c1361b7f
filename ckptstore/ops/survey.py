"""Looks at versions one after another and notes, piece by piece, what is damaged.

The ground of both ``verify``, which reports it, and ``repair``, which mends it. Where every byte is
read, tensors that follow from others are made, too, and compared with their digests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.errors import (
    CkptStoreError,
    FormatError,
    IntegrityError,
    NotFoundError,
)
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format import pack as packs
from ckptstore.format.keys import PACKS_PREFIX, pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.hashing import xxh3_64
from ckptstore.model import Version
from ckptstore.objects.reader import Want, read_pieces
from ckptstore.ops.recipes_followed import problem_with, recipe_key, row_of_recipe
from ckptstore.repo import Repo

__all__ = ["PieceKey", "Problem", "Sample", "Survey", "piece_key"]

# Manifests read ahead. Source: hides the latency of an object store (20 ms) behind the reading of
# data; a manifest of 1 TB takes some 16 MB.
_AHEAD = 8

PieceKey = tuple[str, int, int, bytes]
"""Pack, offset of the chunk, place in the decoded chunk, id: one piece where it lies."""

Known = Callable[[Version, range], Mapping[int, str] | None]
"""Tells what an earlier, interrupted check found of some rows of a version: what is wrong with
which row; None if it did not come so far."""
Told = Callable[[Version, range, Mapping[int, str]], None]
"""Is told what was found of some rows, as soon as they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it should be."""

    kind: str
    """Code of the error, as in ``CkptStoreError.kind``."""
    message: str
    version: str
    """Id of the version that it touches; empty for an object that no version needs to load."""
    run: str
    step: int
    """-1 without a version."""
    tensor: str
    """Path of the tensor that it touches; empty if it is the whole version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of some equal parts of all chunks.

    By a digest of pack and offset: each chunk is in exactly one part, for good, whoever asks.
    """

    parts: int
    part: int
    """0 to ``parts - 1``."""

    def holds(self, pack: str, offset: int) -> bool:
        """Say whether a chunk is in this part."""
        return xxh3_64(f"{pack} {offset}".encode()) % self.parts == self.part


def piece_key(table: PieceTable, row: int) -> PieceKey:
    """Return the key of the piece in one row."""
    return (
        table.packs[int(table.pack[row])],
        int(table.offset[row]),
        int(table.inner[row]),
        table.ids[row].tobytes(),
    )


@dataclass(slots=True)
class Survey:
    """What was looked at and what was found; owned by one thread.

    Parameters
    ----------
    full
        Read every byte; otherwise only records, and the sizes of packs.
    sample
        Of the chunks, at `full`; None for all.
    """

    repo: Repo
    cache: Manifests
    full: bool
    sample: Sample | None = None
    progress: ProgressCallback = silent
    known: Known = lambda _version, _rows: None
    told: Told = lambda _version, _rows, _wrong: None
    problems: list[Problem] = field(default_factory=list)
    read: set[PieceKey] = field(default_factory=set)
    """Pieces whose bytes were read."""
    bad: dict[PieceKey, str] = field(default_factory=dict)
    """Pieces that cannot be had, and why."""
    followed: set[bytes] = field(default_factory=set)
    """Keys of the recipes that were followed."""
    unlike: dict[bytes, str] = field(default_factory=dict)
    """Those of which something else came than there should, and what is wrong with it."""
    broken_packs: dict[str, str] = field(default_factory=dict)
    """Packs whose header, index or trailer is damaged; pieces may be sound."""
    unread: dict[str, CkptStoreError] = field(default_factory=dict)
    """Ids of versions whose manifest cannot be had, and why."""
    sound: dict[str, str] = field(default_factory=dict)
    """Ids of versions of which every byte was read and is right, with their manifest's digest."""
    seen: set[str] = field(default_factory=set)
    """Ids of versions that were checked."""
    packs: set[str] = field(default_factory=set)
    """Packs that are needed."""
    read_bytes: int = 0
    total_bytes: int = 0
    """What all versions hold, for the progress."""
    _done_bytes: int = 0
    _sizes: dict[str, ObjectInfo] | None = None

    @property
    def sizes(self) -> dict[str, ObjectInfo]:
        """Every pack that is there, by its key; listed once."""
        if self._sizes is None:
            self._sizes = {info.key: info for info in self.repo.backend.list(PACKS_PREFIX)}
        return self._sizes

    def found(self, error: CkptStoreError, version: Version | None, tensor: str = "") -> None:
        """Note a problem."""
        self.problems.append(
            Problem(
                kind=error.kind,
                message=error.message,
                version=version.id if version else "",
                run=version.run if version else "",
                step=version.step if version else -1,
                tensor=tensor,
            )
        )

    def check(self, version: Version) -> Content | None:
        """Check one version; return its content, None if its manifest cannot be had.

        Raises
        ------
        StorageError
            The storage failed: nothing is known of this version.
        """
        return self._check(version, self._load(version))

    def check_all(self, versions: Sequence[Version]) -> Iterator[tuple[Version, Content | None]]:
        """Check versions in their order; manifests are read a little ahead, in parallel.

        Raises
        ------
        StorageError
            As :meth:`check`.
        """
        workers = max(1, min(self.repo.backend.capabilities.concurrency, _AHEAD, len(versions)))
        ahead = iter(versions)
        with ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-verify") as pool:
            coming = deque((v, pool.submit(self._load, v)) for v in islice(ahead, workers))
            try:
                while coming:
                    version, loading = coming.popleft()
                    loaded = loading.result()
                    coming.extend((v, pool.submit(self._load, v)) for v in islice(ahead, 1))
                    yield version, self._check(version, loaded)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, version: Version) -> Content | CkptStoreError:
        try:
            return read_content(self.cache.load(version))
        except (IntegrityError, FormatError) as error:
            return error

    def _check(self, version: Version, loaded: Content | CkptStoreError) -> Content | None:
        began = self._done_bytes
        self.seen.add(version.id)
        if isinstance(loaded, CkptStoreError):
            self.unread[version.id] = loaded
            self.found(loaded, version)
        elif self.check_content(version, loaded) and self.full and self.sample is None:
            self.sound[version.id] = version.manifest_digest
        self._done_bytes = began + sum(part.logical for part in version.roles.values())
        self._tell(self._done_bytes)
        return None if isinstance(loaded, CkptStoreError) else loaded

    def check_content(self, version: Version, content: Content) -> bool:
        """Check the pieces that a manifest names; return whether all of them are right."""
        self._check_packs(version, content)
        if self.full:
            for rows in _batches(content.manifest.pieces):
                self._check_rows(version, content, rows)
            self._check_recipes(version, content)
        return self._report(version, content)

    def _check_packs(self, version: Version, content: Content) -> None:
        """Check that packs are there and long enough; at `full` also header and index."""
        table = content.manifest.pieces
        infos = [self.sizes.get(pack_key(pack)) for pack in table.packs]
        sizes = np.array([0 if info is None else info.size_bytes for info in infos], np.uint64)
        ends = table.offset + table.stored + np.uint64(packs.CHUNK_HEADER_BYTES)
        for row in np.nonzero(ends > sizes[table.pack])[0].tolist() if len(table) else ():
            info = infos[int(table.pack[row])]
            what = f"ends at {info.size_bytes}, before the chunk does" if info else "is gone"
            key = piece_key(table, row)
            msg = f"pack {key[0]}, chunk at byte {key[1]}: the pack {what}"
            self.bad.setdefault(key, msg)
        for pack, info in zip(table.packs, infos, strict=True):
            if self.full and pack not in self.packs and info is not None:
                self._check_frame(version, pack, info)
            self.packs.add(pack)

    def _check_frame(self, version: Version, pack: str, info: ObjectInfo) -> None:
        """Check header, index and trailer of a pack: what a rebuild would need, loads do not."""
        backend, key = self.repo.backend, pack_key(pack)

        def read(offset: int, size: int) -> bytes:
            memory = bytearray(size)
            backend.read_into(key, offset, [memoryview(memory)])
            return bytes(memory)

        try:
            packs.parse_header(read(0, packs.HEADER_BYTES), pack_id=pack)
            tail = read(max(0, info.size_bytes - packs.TRAILER_BYTES), packs.TRAILER_BYTES)
            offset, count, checksum = packs.parse_trailer(
                tail, pack_bytes=info.size_bytes, where=pack
            )
            index = read(offset, count * packs.INDEX_ROW_BYTES)
            packs.parse_index(index, checksum=checksum, offset=offset, where=pack)
        except (IntegrityError, FormatError, NotFoundError) as error:
            self.broken_packs[pack] = error.message
            msg = f"{error.message} (needed to rebuild, not to load {version.run}@{version.step})"
            self.found(type(error)(msg), None)

    def _check_rows(self, version: Version, content: Content, rows: range) -> None:
        """Read some pieces, those that were read before left out."""
        table = content.manifest.pieces
        keys = {row: piece_key(table, row) for row in rows}
        earlier = self.known(version, rows)
        if earlier is not None:
            self.read.update(keys.values())
            self.bad.update((keys[row], text) for row, text in earlier.items() if row in keys)
            return
        wants = []
        for row, key in keys.items():
            if key in self.read or key in self.bad:
                continue
            if self.sample is not None and not self.sample.holds(key[0], key[1]):
                continue
            self.read.add(key)
            wants.append(Want(row=row, out=None, label=""))

        def failed(want: Want, error: CkptStoreError) -> None:
            cause = error.__cause__
            why = cause.message if isinstance(cause, CkptStoreError) else error.message
            pack, offset, _, _ = keys[want.row]
            self.bad[keys[want.row]] = f"pack {pack}, chunk at byte {offset}: {why}"

        base = self._done_bytes
        read_pieces(
            table,
            wants,
            backend=self.repo.backend,
            options=self.repo.options,
            progress=lambda step: self._tell(base + step.done),
            on_failure=failed,
        )
        self.read_bytes += sum(int(table.raw[want.row]) for want in wants)
        self._done_bytes += int(table.raw[rows.start : rows.stop].sum())
        self._tell(self._done_bytes)
        self.told(version, rows, {row: self.bad[k] for row, k in keys.items() if k in self.bad})

    def _check_recipes(self, version: Version, content: Content) -> None:
        """Make the tensors that follow from others, but those that another version has too."""
        table = content.manifest.pieces
        batch: dict[int, bytes] = {}
        size = 0
        for index, record in enumerate(content.manifest.tensors):
            if record.recipe is None:
                continue
            key = recipe_key(content, index)
            if key in self.followed or (self.sample and not self.sample.holds(key.hex(), 0)):
                continue
            if self.bad and any(self.why(table, row) for row in content.rows(index)):
                continue
            self.followed.add(key)
            earlier = self.known(version, row_of_recipe(content, index))
            if earlier is not None:
                self.unlike.update((key, text) for text in earlier.values())
                continue
            if batch and size + record.nbytes > limits.VERIFY_BATCH_BYTES:
                self._follow(version, content, batch)
                batch, size = {}, 0
            batch[index] = key
            size += record.nbytes
        self._follow(version, content, batch)

    def _follow(self, version: Version, content: Content, batch: Mapping[int, bytes]) -> None:
        """Make some tensors; one by one, if something else comes than there should."""
        problem = problem_with(self.repo, content, list(batch))
        for index, key in batch.items():
            row = row_of_recipe(content, index)
            text = problem_with(self.repo, content, [index]) if problem else ""
            if text:
                self.unlike[key] = text
            self.told(version, row, {row.start: text} if text else {})

    def why(self, table: PieceTable, row: int) -> str:
        """Return why a piece cannot be had: for its own bytes, or those that it refers to."""
        found = self.bad.get(piece_key(table, row), "")
        if not found and (base := table.base_of(row)) is not None:
            found = self.bad.get(piece_key(table, base), "")
            found = found and f"its base is lost: {found}"
        return found

    def wrong(self, content: Content, index: int) -> list[str]:
        """Return what is wrong with a tensor: with its pieces, or with what follows from them."""
        table = content.manifest.pieces
        rows = content.rows(index) if self.bad else ()
        found = [why for row in rows if (why := self.why(table, row))]
        if self.unlike and content.manifest.tensors[index].recipe is not None:
            found += filter(None, [self.unlike.get(recipe_key(content, index))])
        return found

    def _report(self, version: Version, content: Content) -> bool:
        """Report each tensor that has a damaged piece, whoever met it first."""
        sound = True
        if not self.bad and not self.unlike:
            return sound
        for index, label in enumerate(content.labels):
            wrong = [] if index in content.hidden else self.wrong(content, index)
            if wrong:
                sound = False
                more = f" (and {len(wrong) - 1} more pieces)" if len(wrong) > 1 else ""
                self.found(IntegrityError(f"tensor {label}: {wrong[0]}{more}"), version, label)
        return sound

    def _tell(self, done: int) -> None:
        self.progress(Progress(stage="verify", done=done, total=max(self.total_bytes, done)))


def _batches(table: PieceTable) -> Iterator[range]:
    """Cut the rows of a table into ranges of at most ``VERIFY_BATCH_BYTES``, one row at least."""
    ends = np.cumsum(table.raw, dtype=np.uint64)
    start = 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limits.VERIFY_BATCH_BYTES, "right"))
        stop = max(stop, start + 1)
        yield range(start, stop)
        start = stop
