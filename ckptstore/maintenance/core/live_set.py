"""Objects of a store: those that it holds, and those that its live versions need.

A listing begins as one, page after page. Most stores end there. Where it goes on for longer than
``GC_LIST_TOGETHER`` objects, the rest is listed by the first two digits of the ids, in tasks of an
engine; or in threads, if so far it was slow, as the pages of an object store are. A local folder,
where listing is work and not waiting, is read by one thread as fast as by any.

A version is live unless it was deleted or only its record is kept. Objects that live versions need
may never be condemned; so a manifest of a live version that cannot be read stops every collection.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.storage_classes import ColdStorage, ObjectState, class_named
from ckptstore.catalog.catalog import Catalog
from ckptstore.config import Environment
from ckptstore.errors import CkptStoreError, FormatError, IntegrityError, NotFoundError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.format.snapshot import Details
from ckptstore.maintenance.core.task_pool import Tasks, at_once
from ckptstore.manifests import read_manifest
from ckptstore.model import Version
from ckptstore.repo import Repo

# Folders that one task lists. Source: a task costs milliseconds; of 16 million objects its result
# has 20 MB.
_WIDTH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Some objects."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks of one pack, each once, in the order of their offsets."""

    offset: npt.NDArray[np.uint64]
    """Of the chunk's header, in bytes."""
    stored: npt.NDArray[np.uint32]
    """Stored bytes, without the header."""
    raw: npt.NDArray[np.uint32]
    """Bytes of the decoded chunk."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the chunks in a pack, with their headers and rows of the index."""
        each = CHUNK_HEADER_BYTES + INDEX_ROW_BYTES
        return int(self.stored.sum(dtype=np.uint64)) + each * len(self.stored)

    def joined(self, other: ChunkTable) -> ChunkTable:
        """Return the chunks of both."""
        if np.array_equal(self.offset, other.offset):
            return self
        offset = np.concatenate((self.offset, other.offset))
        offset, first = np.unique(offset, return_index=True)
        stored = np.concatenate((self.stored, other.stored))[first]
        return ChunkTable(offset, stored, np.concatenate((self.raw, other.raw))[first])


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Packs and chunks that one manifest needs; one table for all, since there may be thousands."""

    packs: tuple[str, ...]
    """Ids of the packs that hold a chunk of it."""
    starts: npt.NDArray[np.uint32]
    """Where the chunks of each pack begin in `table`, and where the last ones end."""
    table: ChunkTable
    """Chunks of all packs, each once, by pack and offset."""
    deltas: bool = False
    """Whether it names deltas, whose bases it needs too."""

    @classmethod
    def of(cls, manifest: Manifest) -> Footprint:
        """Return the footprint of a manifest."""
        table = manifest.pieces
        _, rows = np.unique(chunk_keys(table.pack, table.offset), return_index=True)
        places, starts = np.unique(table.pack[rows], return_index=True)
        return cls(
            packs=tuple(intern(table.packs[int(place)]) for place in places),
            starts=np.append(starts, len(rows)).astype(np.uint32),
            table=ChunkTable(table.offset[rows], table.stored[rows], table.slab[rows]),
            deltas=table.base is not None,
        )

    @property
    def chunks(self) -> Iterator[ChunkTable]:
        """The chunks of each pack, in the order of `packs`."""
        table = self.table
        for start, end in itertools.pairwise(self.starts.tolist()):
            part = slice(start, end)
            yield ChunkTable(table.offset[part], table.stored[part], table.raw[part])


def chunk_keys(packs: npt.NDArray[Any], offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a number for each chunk, by which chunks are ordered by pack and offset.

    Parameters
    ----------
    packs
        Numbers of packs, below 2**30: offsets have at most 33 bits (``PACK_BYTES_MAX``).
    """
    return (packs.astype(np.uint64) << np.uint64(34)) | offsets


class Reach:
    """Reads the needs of live versions, each manifest once. Owned by one thread.

    Memory: 16 bytes for each chunk of each manifest, and 100 for each pack, as long as it is held.
    """

    def __init__(
        self, repo: Repo, *, progress: ProgressCallback = silent, tasks: Tasks | None = None
    ) -> None:
        self._repo = repo
        self._progress = progress
        self._tasks = tasks or Tasks.of(repo)
        self._known: dict[bytes, Footprint] = {}
        """By digest of the manifest."""
        self._details: dict[bytes, Details] = {}

    def of(self, catalog: Catalog) -> dict[str, Footprint]:
        """Return the footprint of each version that is live in `catalog`, by its id.

        Reads the manifests that were not read before. A version that changed while they were
        read, so that its manifest is gone, is left out: then `catalog` is not the newest, and
        nothing that follows from it can be committed.

        Raises
        ------
        CorruptObjectError, UnsupportedFeatureError
            The manifest of a live version cannot be read; the message names it.
        StorageError
            The storage failed.
        """
        needs = self.by_manifest(catalog)
        return {
            version: needs[details.manifest_digest]
            for version, details in self.contents(catalog)
            if details.manifest_digest in needs
        }

    def contents(self, catalog: Catalog) -> Iterator[tuple[str, Details]]:
        """Yield id and details of each version that has more than its record."""
        return catalog.contents(known=self._details)

    def by_manifest(
        self, catalog: Catalog, *, without: Container[bytes] = (), read: bool = True
    ) -> dict[bytes, Footprint]:
        """Return footprints as :meth:`of`, by the digests of the manifests.

        Parameters
        ----------
        without
            Digests of manifests that are neither read nor returned.
        read
            False: of manifests that were read before, alone.
        """
        live = [
            (version, details.manifest_digest)
            for version, details in self.contents(catalog)
            if details.manifest_digest not in without
        ]
        if read:
            new = [version for version, digest in live if digest not in self._known]
            self._read([catalog.version(version) for version in new])
        return {digest: self._known[digest] for _, digest in live if digest in self._known}

    def keys(self, catalog: Catalog, packs: Iterable[str] | None = None) -> set[str]:
        """Return the keys of all objects that versions live in `catalog` need; as :meth:`of`.

        Parameters
        ----------
        packs
            The packs among them, if they are known; then no manifest is read.
        """
        if packs is None:
            packs = {pack for need in self.of(catalog).values() for pack in need.packs}
        found = {details.manifest_key for _, details in self.contents(catalog)}
        return found.union(map(pack_key, packs))

    def chunks(self, catalog: Catalog, *, read: bool = True) -> Iterator[tuple[str, ChunkTable]]:
        """Yield each pack that is needed, once, with its live chunks; as :meth:`by_manifest`.

        Of packs that several manifests name, which come last, the chunks are put together.
        """
        needs = list(self.by_manifest(catalog, read=read).values())
        names = Counter(pack for need in needs for pack in need.packs)
        joined: dict[str, ChunkTable] = {}
        for need in needs:
            for pack, chunks in zip(need.packs, need.chunks, strict=True):
                if names[pack] == 1:
                    yield pack, chunks
                else:
                    joined[pack] = joined[pack].joined(chunks) if pack in joined else chunks
        yield from joined.items()

    def note(self, digest: str, manifest: Manifest) -> None:
        """Take over a manifest that was just written, so that it need not be read."""
        self._known[bytes.fromhex(digest)] = Footprint.of(manifest)

    def _read(self, versions: Sequence[Version]) -> None:
        found = self._tasks.map(
            _footprint,
            versions,
            count=limits.GC_TASK_MANIFESTS,
            bytes_of=lambda version: version.manifest_bytes,
            bytes_max=limits.GC_TASK_MANIFEST_BYTES,
        )
        for done, (version, need) in enumerate(zip(versions, found, strict=True), 1):
            if isinstance(need, Footprint):  # names that many manifests share are kept once
                need = replace(need, packs=tuple(map(intern, need.packs)))
                self._known[bytes.fromhex(version.manifest_digest)] = need
            else:
                self._refuse(version, need)
            step = Progress(stage="manifests", done=done, total=len(versions), unit="versions")
            self._progress(step)

    def _refuse(self, version: Version, error: CkptStoreError) -> None:
        """Return if the version changed since it was read; else raise the error that stops all."""
        if changed(self._repo, version):
            return
        why = f"it is not known what {version.label} needs: {error.message}"
        msg = f"nothing is collected, since {why}"
        hint = "mend it: ckptstore verify, then repair; or give it up: ckptstore rm"
        raise type(error)(msg, hint=hint) from error


def _footprint(backend: Backend, version: Version) -> Footprint | CkptStoreError:
    """Return the footprint of a version, or why its manifest cannot be read."""
    try:
        return Footprint.of(read_manifest(backend, version))
    except (IntegrityError, FormatError, NotFoundError) as error:
        return error


def changed(repo: Repo, version: Version) -> bool:
    """Return whether a version was deleted or relocated since it was read.

    By the key of its manifest: one that was written again may have the same bytes as before.

    Raises
    ------
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.refresh`.
    """
    newest = repo.refresh().version(version.id)
    return newest.deleted or newest.level == "record" or newest.manifest_key != version.manifest_key


def live_versions(catalog: Catalog) -> Iterator[Version]:
    """Yield the versions that have content: neither deleted nor kept as a record only."""
    return (version for version in catalog.versions() if version.level != "record")


# --- listings ------------------------------------------------------------------------------------


def list_objects(tasks: Tasks, prefix: str, *, environment: Environment) -> Iterator[ObjectInfo]:
    """Yield the objects below ``packs/`` or ``manifests/``, in the order of their keys.

    Raises
    ------
    StorageError
        The storage failed.
    """
    backend = tasks.storage.value
    began, count = environment.monotonic(), 0
    last = ""
    for info in backend.list(prefix):
        yield info
        count += 1
        last = info.key
        if count == limits.GC_LIST_TOGETHER:
            break
    else:
        return
    slow = environment.monotonic() - began > count * limits.GC_LIST_SLOW_S
    if tasks.engine is None and not slow:
        yield from backend.list(prefix, after=last)
        return
    for part in tasks.map(_list_folder, list(_folders(prefix, last)), count=_WIDTH):
        yield from part


def _list_folder(backend: Backend, folder: tuple[str, str]) -> list[ObjectInfo]:
    """Return the objects below a prefix, after a key."""
    prefix, after = folder
    return list(backend.list(prefix, after=after))


def _folders(prefix: str, last: str) -> Iterator[tuple[str, str]]:
    """Yield the prefixes that may hold keys after `last`, each with the key to begin after.

    Ids begin with two hex digits, which are their folder; nothing else is an object of the store.
    """
    for number in range(256):
        part = f"{prefix}{number:02x}/"
        if last < part:
            yield part, ""
        elif last.startswith(part):
            yield part, last


# --- archive classes ------------------------------------------------------------------------------


def cold_packs(backend: Backend, packs: Iterable[tuple[str, ObjectInfo]]) -> set[str]:
    """Return the ids of packs that cannot be read unless they are restored.

    Parameters
    ----------
    packs
        Ids, and what a listing told of each.

    Raises
    ------
    StorageError
        The storage failed.
    """
    asked = [pack for pack, info in packs if class_named(info.storage_class).may_be_cold]
    cold = backend.cold_storage() if asked else None
    if cold is None:
        return set()
    found = states_of(backend, cold, asked)
    return {pack for pack, state in found.items() if state is not None and not state.is_readable}


def cold_rows(table: PieceTable, cold: Collection[str]) -> list[int]:
    """Return the rows of pieces that lie in some packs, or refer to what does."""
    if not cold or not any(pack in cold for pack in table.packs):
        return []
    lies = np.array([pack in cold for pack in table.packs])[table.pack]
    if table.base is not None:
        deltas = np.flatnonzero(table.base < len(table))
        lies[deltas] |= lies[table.base[deltas]]
    return [int(row) for row in np.flatnonzero(lies)]


def states_of(
    backend: Backend, cold: ColdStorage | None, packs: Sequence[str]
) -> Mapping[str, ObjectState | None]:
    """Return class and state of packs, by one request each; None for one that is gone.

    Parameters
    ----------
    cold
        None where everything can be read at any time.

    Raises
    ------
    StorageError
        The storage failed.
    """

    def ask(pack: str) -> ObjectState | None:
        """Return the state of one pack; None if it is gone."""
        try:
            if cold is not None:
                return cold.restore_state(pack_key(pack))
            info = backend.stat(pack_key(pack))
        except NotFoundError:
            return None
        return ObjectState(
            storage_class=info.storage_class,
            size_bytes=info.size_bytes,
            modified_at=info.modified_at,
            access="readable",
        )

    return dict(zip(packs, at_once(backend, ask, packs), strict=True))
