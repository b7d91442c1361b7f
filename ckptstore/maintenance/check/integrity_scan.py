"""Findings of a check of versions: damage of packs, of pieces, and of tensors made from others.

``verify`` reports them, ``repair`` mends them; :mod:`ckptstore.maintenance.check.verify_tasks` does
the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckptstore.backends.base import ObjectInfo
from ckptstore.checkpoint.content import Content, read_content
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format import pack as packs
from ckptstore.format.keys import PACKS_PREFIX, pack_key
from ckptstore.format.manifest import PieceTable
from ckptstore.maintenance.check.piece_checks import (
    PieceKey,
    Sample,
    piece_key,
)
from ckptstore.maintenance.check.recipe_checks import recipe_key, row_of_recipe
from ckptstore.maintenance.core.cold_packs import cold_packs, cold_rows
from ckptstore.maintenance.core.task_pool import at_once
from ckptstore.model import Version
from ckptstore.repo import Repo

__all__ = ["Loaded", "PieceKey", "Problem", "Sample", "Survey", "piece_key"]

# Manifests read ahead. Source: hides the latency of an object store (20 ms) behind the reading of
# data; a manifest of 1 TB takes some 16 MB.
_AHEAD = 8

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


Loaded = Content | CkptStoreError
"""What a version holds, or why that cannot be known."""


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
    cold_packs: set[str] = field(default_factory=set)
    """Those of them that cannot be read unless they are restored, and so were not, at `full`."""
    cold_pieces: set[PieceKey] = field(default_factory=set)
    """Pieces that lie there, or refer to what does."""
    cold_versions: set[str] = field(default_factory=set)
    """Ids of versions that need such packs: of those it is not known whether they are sound."""
    read_bytes: int = 0
    total_bytes: int = 0
    """What all versions hold, of a sample its share; for the progress."""
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

    def loaded(self, versions: Sequence[Version]) -> Generator[tuple[Version, Loaded], None, None]:
        """Yield versions with their content, or with the reason why it cannot be had.

        Manifests are read a little ahead, in parallel.

        Raises
        ------
        StorageError
            The storage failed: nothing is known of this version.
        """
        found = at_once(self.repo.backend, self._load, versions, most=_AHEAD)
        yield from zip(versions, found, strict=True)

    def _load(self, version: Version) -> Loaded:
        try:
            return read_content(self.repo.manifests.read(version))
        except (IntegrityError, FormatError) as error:
            return error.with_traceback(None)  # whose frames hold the manifest

    def conclude(
        self, version: Version, loaded: Loaded, *, sound: bool, counted_bytes: int
    ) -> Content | None:
        """Note that a version was checked, and whether every piece that was looked at is right.

        In all it counts for its :meth:`share`, of which `counted_bytes` were counted before.
        """
        self.seen.add(version.id)
        if isinstance(loaded, CkptStoreError):
            self.unread[version.id] = loaded
            self.found(loaded, version)
        elif sound and self.full and self.sample is None and version.id not in self.cold_versions:
            self.sound[version.id] = version.manifest_digest
        self.advance(max(0, self.share(version) - counted_bytes))
        return None if isinstance(loaded, CkptStoreError) else loaded

    def share(self, version: Version) -> int:
        """Return the bytes of a version that are to be read, about those of a sample."""
        parts = 1 if self.sample is None else self.sample.parts
        return sum(part.logical for part in version.roles.values()) // parts

    def check_sizes(self, content: Content) -> list[tuple[str, ObjectInfo]]:
        """Check that packs are there and long enough; return those that no version had before.

        Without those that cannot be read since they lie in an archive class.
        """
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
        there = zip(table.packs, infos, strict=True)
        fresh = [(pack, info) for pack, info in there if info and pack not in self.packs]
        self.packs.update(table.packs)
        if self.full:
            self.cold_packs |= cold_packs(self.repo.backend, fresh)
            self._note_cold(content)
        return [(pack, info) for pack, info in fresh if pack not in self.cold_packs]

    def _note_cold(self, content: Content) -> None:
        """Note the pieces of a version that cannot be read, for themselves or for their bases."""
        table = content.manifest.pieces
        if rows := cold_rows(table, self.cold_packs):
            self.cold_versions.add(content.manifest.version)
            self.cold_pieces.update(piece_key(table, row) for row in rows)

    def found_frame(self, version: Version, pack: str, problem: CkptStoreError | None) -> None:
        """Note what is wrong with header, index or trailer of a pack, if anything is."""
        if problem is not None:
            self.broken_packs[pack] = problem.message
            msg = f"{problem.message} (needed to rebuild, not to load {version.run}@{version.step})"
            self.found(type(problem)(msg), None)

    def choose(
        self, version: Version, rows: range, keys: Mapping[int, PieceKey]
    ) -> list[int] | None:
        """Return the rows that are to be read; None if an interrupted check has done so."""
        earlier = self.known(version, rows)
        if earlier is not None:
            self.read.update(keys.values())
            self.bad.update((keys[row], text) for row, text in earlier.items() if row in keys)
            return None
        chosen = []
        for row, key in keys.items():
            if key in self.read or key in self.bad or key in self.cold_pieces:
                continue
            if self.sample is not None and not self.sample.holds(key[0], key[1]):
                continue
            self.read.add(key)
            chosen.append(row)
        return chosen

    def recipes(self, content: Content, but: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield tensors that are to be made, with the keys of their recipes.

        Those of which a piece is lost or cold are left out.

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
            if key in but or (self.sample and not self.sample.holds(key.hex(), 0)):
                continue
            if self.bad and any(self.why(table, row) for row in content.rows(index)):
                continue
            if self.cold_pieces and self.is_cold(content, index):
                continue
            yield index, key

    def is_cold(self, content: Content, index: int) -> bool:
        """Say whether a tensor cannot be made since a piece of it is in an archive class."""
        table = content.manifest.pieces
        return any(piece_key(table, row) in self.cold_pieces for row in content.rows(index))

    def followed_as(
        self, version: Version, content: Content, index: int, key: bytes, text: str
    ) -> None:
        """Note what came of the recipe of a tensor: empty if it was what it should be."""
        self.followed.add(key)
        if text:
            self.unlike[key] = text
        row = row_of_recipe(content, index)
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

    def report(self, version: Version, content: Content) -> bool:
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

    def advance(self, size_bytes: int) -> None:
        """Count bytes of tensors as done, and tell."""
        self._done_bytes += size_bytes
        self.tell(0)

    def tell(self, size_bytes: int) -> None:
        """Tell the progress, with some bytes that are not yet counted as done."""
        done = self._done_bytes + size_bytes
        self.progress(Progress(stage="verify", done=done, total=max(self.total_bytes, done)))
