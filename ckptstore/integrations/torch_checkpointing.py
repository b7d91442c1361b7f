"""torch_checkpointing: its ``Storage`` on a run of a store; see docs/howto/torch-checkpointing.md.

::

    storage = CkptStoreStorageConfig(url="s3://bucket/ckpts", run="gpt")
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    manager.save("step_100", {"model": model.state_dict()})

Paths are names only. The ranks write the files of a checkpoint into a folder, and each file is a
version of the run ``NAME/files`` that holds its bytes. The library then renames the folder: that
makes it one version of the run, which has the files by their names. No byte is written again.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from torch_checkpointing.storage.base_storage import ReadArgs

from ckptstore.checkpoint.assemble import RankPart, ShardInfo, commit_parts
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import shareable
from ckptstore.errors import InvalidInputError
from ckptstore.format.manifest import PieceTable
from ckptstore.format.roles import role_of_name
from ckptstore.integrations.arguments import check_run_name, check_store
from ckptstore.integrations.file_streams import FileWriter, reading
from ckptstore.integrations.libraries import library
from ckptstore.model import Version
from ckptstore.objects.piece_writer import Written
from ckptstore.states.lazy import LazyTensor
from ckptstore.store import Run, Store
from ckptstore.store.loading import lazy_version
from ckptstore.store.opening import open_store

with library("torch_checkpointing", "'ckptstore[torch-checkpointing]'"):
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig


_KEY: Final = "torch_checkpointing"
"""Entry of a version's metadata: the path of its folder, or of its file."""

_Path = str | os.PathLike[str]


@dataclass
class CkptStoreStorageConfig(StorageConfig):  # type: ignore[misc]  # not followed by mypy
    """A ``StorageConfig``: the store, and the run whose versions checkpoints become.

    It is pickled for the process that saves in the background, with the options.

    Parameters
    ----------
    url
        Of the store, which is created if there is none.
    run
        Name of the run.
    retain
        Apply the retention policy that holds for the run after each save.
    options
        For :func:`ckptstore.open`, such as ``endpoint_url``. Credentials belong into their usual
        chains, not here.
    """

    url: str
    run: str
    retain: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def create_storage(self) -> CkptStoreStorage:
        """Open the store; it is closed when the process ends."""
        store = open_store(self.url, create=True, **self.options)
        return CkptStoreStorage(store, self.run, retain=self.retain)


class CkptStoreStorage(Storage):  # type: ignore[misc]  # not followed by mypy
    """A ``Storage`` on a run of an open store; any thread may use it.

    A version's step is the last number in the name of its folder; without one, that of the version
    before. Folders exist as long as there are files in them, as on object stores. Errors about
    paths are those of the operating system, all others descend from ``CkptStoreError``.

    Parameters
    ----------
    store
        Stays the caller's, who closes it.
    run
        Name of the run.
    retain
        Apply the retention policy that holds for the run after each save.

    Raises
    ------
    InvalidInputError
        `store` is no open store, or `run` no name of a run.
    """

    def __init__(self, store: Store, run: str, *, retain: bool = False) -> None:
        check_store(store)
        check_run_name(run)
        self._session = store._session
        self._repo = store.repo
        self._store = store
        self._folders = store.run(run)
        self._files = store.run(f"{run}/files")
        self._repo.log.others.expect(self._files.name)
        self._retain = retain

    # --- files --------------------------------------------------------------------------------

    def stream_write(self, path: _Path) -> FileWriter:
        """Return a stream; the file is there when the stream was closed without an error.

        Raises
        ------
        IsADirectoryError
            The path is a folder.
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to.
        """
        key = _key(path)
        if self.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
        self._repo.check_writable()
        return FileWriter(
            repo=self._repo,
            name=posixpath.basename(key),
            shared=shareable(self._repo, self._folders.head),
            looked=self._repo.catalog.number,
            done=lambda parts: self._commit(self._files, key, parts),
        )

    def write(self, path: _Path, data: Any) -> None:  # any buffer
        """Write a file; raises as :meth:`stream_write`, and the errors of the storage."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def stream_read(self, path: _Path, read_args: ReadArgs | None = None) -> io.BufferedReader:
        """Return a stream that fetches the chunks that are read; raises FileNotFoundError.

        Parameters
        ----------
        read_args
            Not used: no cache of the operating system is involved, and nothing is read ahead.
        """
        del read_args
        return reading(self._existing(path))

    def getsize(self, path: _Path) -> int:
        """Return the bytes of a file; raises FileNotFoundError."""
        return len(self._existing(path))

    def delete(self, path: _Path) -> None:
        """Delete a file that is no part of a version.

        Raises
        ------
        PermissionError
            It is a part of a version, which does not change.
        FileNotFoundError
            There is no such file.
        """
        key = _key(path)
        mine = [version for at, version in self._versions(self._files) if at == key]
        if not mine:
            self._existing(path)
            msg = "it is a part of a version: delete the folder"
            raise PermissionError(errno.EPERM, msg, os.fspath(path))
        self._remove(mine, force=True)

    # --- folders ------------------------------------------------------------------------------

    def exists(self, path: _Path) -> bool:
        """Return whether there is a file or a folder."""
        return self._file(_key(path)) is not None or self.isdir(path)

    def isdir(self, path: _Path) -> bool:
        """Return whether there is a folder, that is, a file in it."""
        return any(True for _ in self._below(_key(path)))

    def ls(self, path: _Path) -> list[str]:
        """Return the names in a folder; raises FileNotFoundError."""
        names = sorted({name.partition("/")[0] for name in self._below(_key(path))})
        if not names:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", os.fspath(path))
        return names

    def mkdir(self, path: _Path, recursive: bool = True) -> None:
        """Do nothing, since files make their folders; raises FileExistsError if it is a file."""
        del recursive
        if self._file(_key(path)) is not None:
            raise FileExistsError(errno.EEXIST, "it is a file", os.fspath(path))

    def rmdir(self, path: _Path) -> None:
        """Delete a folder with its versions and files, by commits that can be undone.

        Raises
        ------
        PolicyError
            A version is pinned, tagged, the newest of several, or the only verified one. Nothing
            was deleted.
        """
        for run, force in ((self._folders, False), (self._files, True)):
            below = [one for at, one in self._versions(run) if f"{at}/".startswith(_in(_key(path)))]
            self._remove(below, force=force)

    def rename(
        self,
        src_path: _Path,
        dst_path: _Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Give files another path; those of a folder become one version, by one commit.

        Raises
        ------
        FileExistsError
            There is something at `dst_path`, other than a file that a file replaces.
        FileNotFoundError
            There is nothing at `src_path`.
        OSError
            It is a folder that has checkpoints and files beside them. Nothing changed.
        CkptStoreError
            It could not be committed, and nothing changed.
        """
        del is_directory, background_cleanup
        src, dst = _key(src_path), _key(dst_path)
        files = self._versions(self._files)
        single = [version for at, version in files if at == src]
        if self.isdir(dst_path) or (not single and self._file(dst) is not None):
            raise FileExistsError(errno.ENOTEMPTY, "it is occupied", os.fspath(dst_path))
        if single:
            self._commit(self._files, dst, self._parts({posixpath.basename(dst): single[-1]}))
            self._remove([*single, *(one for at, one in files if at == dst)], force=True)
            return
        inside = {at.removeprefix(_in(src)): one for at, one in files if at.startswith(_in(src))}
        below = [one for one in self._versions(self._folders) if f"{one[0]}/".startswith(_in(src))]
        if inside and below:
            raise OSError(errno.ENOTEMPTY, "it has checkpoints and files", os.fspath(src_path))
        if inside:
            self._commit(self._folders, dst, self._parts(inside))
            self._remove([one for at, one in files if at.startswith(_in(src))], force=True)
            if self._retain:
                self._folders._retain_after_save()
        for at, version in below:
            moved = posixpath.join(dst, at.removeprefix(src).lstrip("/")).rstrip("/")
            self._folders.annotate(f"#{version.id}", metadata={_KEY: moved})
        if not (inside or below):
            raise FileNotFoundError(errno.ENOENT, "there is nothing", os.fspath(src_path))

    def remap_path(self, path: _Path) -> str:
        """Return the path: files have no other place."""
        return os.fspath(path)

    # --- versions -----------------------------------------------------------------------------

    def _versions(self, run: Run, *, fresh: bool = True) -> list[tuple[str, Version]]:
        """Return paths and versions of a run, oldest first."""
        catalog = self._repo.refresh() if fresh else self._repo.catalog
        versions = catalog.versions(run.name) if catalog.has_run(run.name) else ()
        return [(str(one.metadata[_KEY]), one) for one in versions if _KEY in one.metadata]

    def _remove(self, versions: Sequence[Version], *, force: bool) -> None:
        if versions:
            refs = [f"#{one.id}" for one in versions]
            self._store.remove(refs, reason="torch_checkpointing", force=force)

    def _names(self, version: Version) -> dict[str, LazyTensor]:
        """Return the files of a version by their names; reads the manifest."""
        lazy = lazy_version(self._session, version)
        return {name: lazy[name,] for name in lazy}

    def _existing(self, path: _Path) -> LazyTensor:
        found = self._file(_key(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", os.fspath(path))
        return found

    def _file(self, key: str) -> LazyTensor | None:
        """Return the file at a path, unread: the newest, or that of the folder's version."""
        alone = dict(self._versions(self._files)).get(key)
        if alone is not None:
            return next(iter(self._names(alone).values()))
        for place, version in dict(self._versions(self._folders, fresh=False)).items():
            if key.startswith(_in(place)):
                found = self._names(version).get(key.removeprefix(_in(place)))
                if found is not None:
                    return found
        return None

    def _below(self, key: str) -> Iterator[str]:
        """Yield the paths of files and folders in a folder, as seen from it."""
        mine = _in(key)
        for at, _ in self._versions(self._files):
            if at.startswith(mine):
                yield at.removeprefix(mine)
        for at, version in dict(self._versions(self._folders, fresh=False)).items():
            if at != key and at.startswith(mine):
                yield at.removeprefix(mine)
            elif mine.startswith(_in(at)):
                rest = mine.removeprefix(_in(at))
                yield from (
                    n.removeprefix(rest) for n in self._names(version) if n.startswith(rest)
                )

    def _parts(self, files: Mapping[str, Version]) -> list[RankPart]:
        """Return files, by their new names, as what ranks wrote: parts of another version."""
        before = shareable(self._repo, self._folders.head)
        known = {each for table in before for each in _ids(table)}
        return [self._part(name, version, known) for name, version in files.items()]

    def _part(self, name: str, version: Version, known: AbstractSet[bytes]) -> RankPart:
        manifest = self._repo.manifests.load(version)
        table, shape = manifest.pieces, manifest.tensors[0].shape
        new = np.array([each not in known for each in _ids(table)], np.bool_)
        box: Any = {"shape": shape, "offsets": (0,), "sizes": shape, "rows": manifest.first}
        shard = ShardInfo(name=name, dtype="uint8", **box)
        places: Any = {"table": table, "first": manifest.first, "pack_bytes": 0, "packs_count": 0}
        stored = np.where(new, table.stored, 0).astype(np.int64)
        written = Written(is_new=new, stored_new=stored, **places)
        looked = self._repo.catalog.number
        return RankPart(shards=(shard,), values=(), written=written, looked=looked, seconds=0.0)

    def _commit(self, run: Run, key: str, parts: Sequence[RankPart]) -> None:
        """Commit files as a version."""
        names = {shard.name for part in parts for shard in part.shards}
        folder = key if run is self._folders else posixpath.dirname(key)
        request = WriteRequest(run=run.name, step=self._step(folder), metadata={_KEY: key})
        version = commit_parts(
            self._repo,
            parts,
            {name: (name,) for name in sorted(names)},
            request,
            roles={(name,): _role(name) for name in names},
        )
        if run is self._folders:
            self._session.tell_durable(version)

    def _step(self, folder: str) -> int:
        head = self._folders.head
        numbers = re.findall(r"\d+", posixpath.basename(folder))
        return int(numbers[-1]) if numbers else head.step if head is not None else 0


def path_of(version: Version) -> str:
    """Return the path of a checkpoint, for ``CheckpointManager.load``.

    Raises
    ------
    InvalidInputError
        The version was not saved by torch_checkpointing.
    """
    if _KEY not in version.metadata:
        msg = f"{version.label} was not saved by torch_checkpointing"
        raise InvalidInputError(msg, hint="load it with store.load")
    return str(version.metadata[_KEY])


def _key(path: _Path) -> str:
    """Return a path without what does not tell it from others."""
    text = posixpath.normpath(os.fspath(path)).lstrip("/")
    if f"{text}/".startswith("../"):
        msg = f"{os.fspath(path)!r} leads out of the run"
        raise InvalidInputError(msg, hint="use paths without '..'")
    return "" if text == "." else text


def _in(key: str) -> str:
    return f"{key}/" if key else ""


def _ids(table: PieceTable) -> Iterator[bytes]:
    return (one.tobytes() for one in table.ids)


def _role(name: str) -> str:
    """Return the role of a file; the metadata, which weights cannot be read without, is one."""
    return role_of_name(posixpath.basename(name).partition(".")[0])
