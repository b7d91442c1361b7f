"""Findings of a check of versions: damage of packs, of pieces, and of tensors made from others.

``verify`` reports them, ``repair`` mends them; :mod:`ckptstore.maintenance.check.verify_tasks` does
the reading. A file of the user's keeps the progress of a resumable check: one JSON object a line;
the first says which check it is, each further one holds the findings of some rows of a version. A
line is on disk before the check goes on; a last line that is cut off is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo
from ckptstore.catalog.unlisted import find
from ckptstore.checkpoint.content import Content
from ckptstore.errors import CkptStoreError, IntegrityError, InvalidInputError, StorageError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format import pack as packs
from ckptstore.format.keys import PACKS_PREFIX, pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.hashing import blake3_of, xxh3_64
from ckptstore.maintenance.core.live_set import changed, cold_packs, cold_rows
from ckptstore.model import Version, naming
from ckptstore.repo import Repo

PieceKey = tuple[str, int, int, bytes]
"""Pack, offset of the chunk, place in the decoded chunk, id: one piece where it lies."""


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


def piece_key(table: PieceTable, row: int) -> PieceKey:
    """Return the key of the piece in one row."""
    return *table.chunk_of(row), int(table.inner[row]), table.ids[row].tobytes()


def recipe_key(content: Content, index: int) -> bytes:
    """Return a digest, equal for tensors that follow in the same way from the same pieces."""
    records = content.manifest.tensors
    record = records[index]
    assert record.recipe is not None  # noqa: S101  # for the type checker: callers have asked
    sources = [records[place].dtype for place in record.recipe.sources]
    recipe = replace(record.recipe, sources=())
    what = msgspec.msgpack.encode((record.dtype, record.nbytes, sources, recipe.encode(0)))
    return blake3_of([what, content.manifest.pieces.ids[content.rows(index)].tobytes()])


def row_of_recipe(content: Content, index: int) -> range:
    """Return a row beyond those of the pieces: the findings of a recipe are kept under it."""
    row = len(content.manifest.pieces) + index
    return range(row, row + 1)


@dataclass
class Survey:
    """The versions that were checked and the damage that was found; owned by one thread.

    Parameters
    ----------
    full
        Read every byte; otherwise only records, and the sizes of packs.
    sample
        Of the chunks, at `full`; None for all.
    """

    repo: Repo
    full: bool
    sample: Sample | None = None
    progress: ProgressCallback = silent
    state: VerifyState | None = None
    """Findings of an interrupted check, to which those of this one are added."""
    problems: list[Problem] = field(default_factory=list)
    read: set[PieceKey] = field(default_factory=set)
    """Pieces whose bytes were read."""
    bad: dict[PieceKey, str] = field(default_factory=dict)
    """Damaged pieces, each with its damage."""
    followed: set[bytes] = field(default_factory=set)
    """Keys of the recipes that were followed."""
    unlike: dict[bytes, str] = field(default_factory=dict)
    """Those of them that gave other bytes than they should, each with the difference."""
    broken_packs: dict[str, str] = field(default_factory=dict)
    """Packs whose header, index or trailer is damaged; pieces may be sound."""
    unread: dict[str, CkptStoreError] = field(default_factory=dict)
    """Ids of versions whose manifest cannot be read, each with the reason."""
    sound: dict[str, str] = field(default_factory=dict)
    """Ids of versions that were read whole and are right, with their manifest's digest."""
    seen: set[str] = field(default_factory=set)
    """Ids of versions that were checked."""
    packs: set[str] = field(default_factory=set)
    """Packs that are needed."""
    cold_packs: set[str] = field(default_factory=set)
    """Those of them that cannot be read unless they are restored, and so were not, at `full`."""
    cold_pieces: set[PieceKey] = field(default_factory=set)
    """Pieces that lie there, or refer to one that does."""
    cold_versions: set[str] = field(default_factory=set)
    """Ids of versions that need such packs: of those it is not known whether they are sound."""
    read_bytes: int = 0
    total_bytes: int = 0
    """Bytes of all versions, of a sample its share; for the progress."""
    _done_bytes: int = 0
    _stats: dict[str, ObjectInfo | None] = field(default_factory=dict)
    """By key, the packs that were looked up where they cannot be listed."""

    @cached_property
    def sizes(self) -> dict[str, ObjectInfo]:
        """Every pack that is there, by its key; listed once."""
        return {info.key: info for info in self.repo.backend.list(PACKS_PREFIX)}

    def _info(self, key: str) -> ObjectInfo | None:
        """Return the size of a pack; None if it is gone."""
        if self.repo.backend.capabilities.lists:
            return self.sizes.get(key)
        if key not in self._stats:
            self._stats[key] = find(self.repo.backend, key)
        return self._stats[key]

    def found(self, error: CkptStoreError, version: Version | None, tensor: str = "") -> None:
        """Note a problem."""
        told = naming(version) if version else {"version": "", "run": "", "step": -1}
        self.problems.append(Problem(kind=error.kind, message=error.message, tensor=tensor, **told))

    def share(self, version: Version) -> int:
        """Return the bytes of a version that are to be read, about those of a sample."""
        parts = 1 if self.sample is None else self.sample.parts
        return sum(part.logical for part in version.roles.values()) // parts

    def check_sizes(self, content: Content) -> list[tuple[str, int]]:
        """Check that packs are there and long enough; return those that no version had before.

        With their sizes, and without those that cannot be read since they lie in an archive class.
        """
        table = content.manifest.pieces
        infos = [self._info(pack_key(pack)) for pack in table.packs]
        sizes = np.array([0 if info is None else info.size_bytes for info in infos], np.uint64)
        ends = table.offset + table.stored + np.uint64(packs.CHUNK_HEADER_BYTES)
        for row in np.nonzero(ends > sizes[table.pack])[0].tolist() if len(table) else ():
            info = infos[int(table.pack[row])]
            what = f"ends at {info.size_bytes}, before the chunk does" if info else "is gone"
            key = piece_key(table, row)
            self.bad.setdefault(key, f"pack {key[0]}, chunk at byte {key[1]}: the pack {what}")
        there = zip(table.packs, infos, strict=True)
        fresh = [(pack, info) for pack, info in there if info and pack not in self.packs]
        self.packs.update(table.packs)
        if self.full:
            self.cold_packs |= cold_packs(self.repo.backend, fresh)
            if rows := cold_rows(table, self.cold_packs):
                self.cold_versions.add(content.manifest.version)
                self.cold_pieces.update(piece_key(table, row) for row in rows)
        return [(pack, info.size_bytes) for pack, info in fresh if pack not in self.cold_packs]

    def choose(self, version: Version, table: PieceTable, rows: range) -> list[int] | None:
        """Return the rows that are to be read; None if an interrupted check has done so."""
        earlier = self.known(version, rows)
        if earlier is not None:
            self.read.update(piece_key(table, row) for row in rows)
            found = ((piece_key(table, row), text) for row, text in earlier.items() if row in rows)
            self.bad.update(found)
            return None
        chosen = []
        part = slice(rows.start, rows.stop)
        names = (table.packs[place] for place in table.pack[part].tolist())
        ids = (piece_id.tobytes() for piece_id in table.ids[part])
        keys = zip(names, table.offset[part].tolist(), table.inner[part].tolist(), ids, strict=True)
        for row, key in zip(rows, keys, strict=True):
            done = key in self.read or key in self.bad or key in self.cold_pieces
            if not done and (self.sample is None or self.sample.holds(key[0], key[1])):
                self.read.add(key)
                chosen.append(row)
        return chosen

    def known(self, version: Version, rows: range) -> Mapping[int, str] | None:
        """Return the damage that an interrupted check found in some rows; None if it read none.

        Of a version that is known to be damaged all is read again: it may be so since then.
        """
        return None if self.state is None or version.damaged else self.state.known(version, rows)

    def keep(self, version: Version, rows: range, wrong: Mapping[int, str]) -> None:
        """Keep the findings of some rows for a check that continues this one, if any may.

        Not of versions in an archive class: they may be thawed when the check continues.
        """
        if self.state is not None and version.id not in self.cold_versions:
            self.state.told(version, rows, wrong)

    def recipes(self, content: Content, but: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield tensors that are to be made, with the keys of their recipes.

        Tensors with a lost or cold piece are left out.

        Parameters
        ----------
        but
            Keys of recipes that are left out; they may grow between two results.
        """
        table = content.manifest.pieces
        for index, record in enumerate(content.manifest.tensors):
            if record.recipe is None:
                continue
            key = recipe_key(content, index)
            chosen = self.sample is None or self.sample.holds(key.hex(), 0)
            if not chosen or key in but or self.lost(content, index):
                continue
            rows = content.rows(index) if self.cold_pieces else ()
            if not any(piece_key(table, row) in self.cold_pieces for row in rows):
                yield index, key

    def followed_as(
        self, version: Version, content: Content, index: int, key: bytes, text: str
    ) -> None:
        """Note the result of a tensor's recipe: its difference, empty if there is none."""
        self.followed.add(key)
        if text:
            self.unlike[key] = text
        row = row_of_recipe(content, index)
        self.keep(version, row, {row.start: text} if text else {})

    def why(self, table: PieceTable, row: int) -> str:
        """Return the damage of a piece, its own or that of its base; empty if there is none."""
        found = self.bad.get(piece_key(table, row), "")
        if not found and (base := table.base_of(row)) is not None:
            found = self.bad.get(piece_key(table, base), "")
            found = found and f"its base is lost: {found}"
        return found

    def lost(self, content: Content, index: int) -> dict[int, str]:
        """Return the damaged pieces that a tensor is read from, by row, each with its damage."""
        table = content.manifest.pieces
        rows = content.rows(index) if self.bad else ()
        return {row: why for row in rows if (why := self.why(table, row))}

    def wrong(self, content: Content, index: int) -> list[str]:
        """Return the damage of a tensor: that of its pieces, or of the result of its recipe."""
        found = list(self.lost(content, index).values())
        if self.unlike and content.manifest.tensors[index].recipe is not None:
            found += filter(None, [self.unlike.get(recipe_key(content, index))])
        return found

    def report(self, version: Version, content: Content) -> bool:
        """Report each tensor that has a damaged piece; return whether there is none.

        Nothing of a version that was deleted, or moved, since it was read.
        """
        if not self.bad and not self.unlike:
            return True
        visible = ((n, label) for n, label in enumerate(content.labels) if n not in content.hidden)
        found = [(label, wrong) for n, label in visible if (wrong := self.wrong(content, n))]
        for label, wrong in [] if found and changed(self.repo, version) else found:
            more = f" (and {len(wrong) - 1} more pieces)" if len(wrong) > 1 else ""
            self.found(IntegrityError(f"tensor {label}: {wrong[0]}{more}"), version, label)
        return not found

    def advance(self, size_bytes: int) -> None:
        """Count bytes of tensors as done, and report the progress."""
        self._done_bytes += size_bytes
        self.tell(0)

    def tell(self, size_bytes: int) -> None:
        """Report the progress, with some bytes that are not yet counted as done."""
        done = self._done_bytes + size_bytes
        self.progress(Progress(stage="verify", done=done, total=max(self.total_bytes, done)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One of some equal parts of all chunks, which a digest of pack and offset tells apart."""

    parts: int
    part: int
    """0 to ``parts - 1``."""

    def holds(self, pack: str, offset: int) -> bool:
        """Return whether a chunk is in this part."""
        return xxh3_64(f"{pack} {offset}".encode()) % self.parts == self.part


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verify: int
    """Version of this file's format."""
    store: str
    parts: int
    part: int


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    manifest: str
    """Digest: rows of another manifest of the version mean other pieces."""
    first: int
    end: int
    bad: dict[str, str] = {}
    """Damaged rows, in decimal, each with its damage."""


class VerifyState:
    """The file, open for appending; owned by one thread and one check."""

    def __init__(self, path: Path, lines: list[_Line], file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._lines = {(line.version, line.manifest, line.first, line.end): line for line in lines}

    def known(self, version: Version, rows: range) -> Mapping[int, str] | None:
        """Return the damage that the interrupted check found in some rows; None if it read none."""
        line = self._lines.get((version.id, version.manifest_digest, rows.start, rows.stop))
        return None if line is None else {int(row): text for row, text in line.bad.items()}

    def told(self, version: Version, rows: range, wrong: Mapping[int, str]) -> None:
        """Keep the findings of some rows."""
        bad = {str(row): text for row, text in wrong.items()}
        line = _Line(version.id, version.manifest_digest, rows.start, rows.stop, bad)
        with _typed_errors(self._path):
            _append(self._file, line)


@contextmanager
def open_state(
    path: Path | None, *, store_id: str, sample: Sample | None
) -> Iterator[VerifyState | None]:
    """Open the file of a check, new or interrupted; remove it when the block completes the check.

    Without a path, the check keeps no progress.

    Raises
    ------
    InvalidInputError
        It is the file of another check, or something else.
    StorageError
        It cannot be read or written.
    """
    if path is None:
        yield None
        return
    parts, part = (1, 0) if sample is None else (sample.parts, sample.part)
    head = _Head(verify=1, store=store_id, parts=parts, part=part)
    with ExitStack() as stack:
        with _typed_errors(path):
            lines, size = _read(path, head)
            file = stack.enter_context(path.open("ab"))
            file.truncate(size)
            if not size:
                _append(file, head)
        yield VerifyState(path, lines, file)
    with _typed_errors(path):
        path.unlink(missing_ok=True)


def _read(path: Path, head: _Head) -> tuple[list[_Line], int]:
    """Return the whole lines after the first, and how many bytes are whole."""
    if not path.exists():
        return [], 0
    if path.stat().st_size > limits.VERIFY_STATE_BYTES_MAX:
        raise _foreign(path, "it is too large")
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        # Cut off in its first line, or not ours: only what could have become ours is replaced.
        if (msgspec.json.encode(head) + b"\n").startswith(data):
            return [], 0
        raise _foreign(path, "it holds something else")
    first, *rest = whole.splitlines()
    try:
        found = msgspec.json.decode(first, type=_Head)
        lines = [msgspec.json.decode(line, type=_Line) for line in rest]
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _foreign(path, str(error)) from error
    if not all(row.isdecimal() for line in lines for row in line.bad):
        raise _foreign(path, "a row is no number")
    if found != head:
        raise _foreign(path, "it is of another store, another sample or another format")
    return lines, len(whole)


def _append(file: BinaryIO, line: msgspec.Struct) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _foreign(path: Path, why: str) -> InvalidInputError:
    msg = f"{path} is not the state of this verification: {why}"
    return InvalidInputError(msg, hint="name another file, or remove it to start again")


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Raise StorageError where the system refuses to read or write the file."""
    try:
        yield
    except OSError as error:
        msg = f"the state of the verification in {path}: {error.strerror or error}"
        hint = "name a file in a folder that is there and may be written to"
        raise StorageError(msg, hint=hint) from error
