"""``ckpt://``: versions as files for fsspec, without a server; read-only.

::

    fsspec.open("ckpt://gpt@best:val_loss/model.safetensors", store="s3://bucket/ckpts")
    fsspec.open("ckpt://gpt@300/config.json::file:///mnt/ckpts")
    fsspec.open("ckpt://gpt@300?dtype=bf16/model.safetensors")  # of CKPTSTORE_URL
"""

from __future__ import annotations

import errno
import os
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError
from ckptstore.serving.model_folder import ModelFolder
from ckptstore.serving.serving_limits import WINDOW_BYTES
from ckptstore.serving.versions import ServedVersions
from ckptstore.store import open_store


class CkptFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """The versions of one store as folders ``RUN@REF``.

    Parameters
    ----------
    store
        URL of the store; empty for the location behind ``::``, or else ``CKPTSTORE_URL``.
    fo, target_protocol, target_options
        The location behind ``::``, as fsspec gives it.
    options
        For :func:`ckptstore.open`: storage options, ``encryption_key``.
    """

    protocol = "ckpt"
    cachable = False  # the store depends on the environment and the working directory, too

    def __init__(
        self, store: str = "", fo: str = "", target_protocol: str = "file",
        target_options: dict[str, Any] | None = None, **options: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__()
        behind = fo if target_protocol in {"file", "local"} else f"{target_protocol}://{fo}"
        url = store or (behind if fo else os.environ.get("CKPTSTORE_URL"))
        if not url:
            hint = "store=URL, ckpt://RUN@REF/FILE::URL, or CKPTSTORE_URL"
            raise InvalidInputError("no store is named", hint=hint)
        opened = open_store(url, read_only=True, **(target_options or {}), **options)
        self._versions = ServedVersions(opened)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: ANN401
        """Return the folders of all versions, or what is in one."""
        path = self._strip_protocol(path)
        if not path:
            runs = self._versions.runs()
            names = [f"{run}@{ref}" for run in runs for ref in self._versions.refs(run)]
            found = [_folder(name) for name in names]
        else:
            folder, ref, rest = self._find(path)
            names = [rest] if rest in folder.files else folder.below(rest)
            found = [self._entry(folder, ref, name) for name in names]
            if rest and not found:
                raise _missing(path)
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return name, size, type, ETag and time of a file or folder."""
        path = self._strip_protocol(path)
        if not path:
            return _folder("")
        folder, ref, rest = self._find(path)
        if rest and rest not in folder.files and not folder.below(rest):
            raise _missing(path)
        return self._entry(folder, ref, rest)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any  # noqa: ANN401
    ) -> bytes:  # fmt: skip
        """Return a range of a file; negative places count from its end."""
        folder, _ref, rest = self._find(self._strip_protocol(path))
        if rest not in folder.files:
            raise _missing(path)
        low, high, _step = slice(start, end).indices(folder.files[rest].nbytes)
        try:
            return b"".join(folder.read(rest, low, high))
        except CkptStoreError as error:
            raise OSError(errno.EIO, str(error), path) from error

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:  # noqa: ANN401
        if mode != "rb":
            raise OSError(errno.EROFS, "versions cannot be written as files; save to a run", path)
        folder, _ref, rest = self._find(self._strip_protocol(path))
        dtype = f"?dtype={folder.dtype}" if folder.dtype else ""
        fixed = f"#{folder.version.id}{dtype}/{rest}"  # whatever the ref names later
        options["block_size"] = min(int(options.get("block_size") or WINDOW_BYTES), WINDOW_BYTES)
        return _CkptFile(self, fixed, mode, **options)

    def _find(self, path: str) -> tuple[ModelFolder, str, str]:
        """Return the folder that a path leads into, its ref, and the rest."""
        run, at, below = path.partition("@")
        try:
            if path.startswith("#"):
                ref, _, rest = path.partition("/")
                return self._versions.folder(ref), ref, rest
            if not at:
                raise _missing(path)
            folder, ref, rest = self._versions.below(run, below.split("/"))
        except (NotFoundError, InvalidInputError) as error:
            raise FileNotFoundError(errno.ENOENT, str(error), path) from error
        return folder, f"{run}@{ref}", rest

    def _entry(self, folder: ModelFolder, ref: str, name: str) -> dict[str, Any]:
        path, file = f"{ref}/{name}" if name else ref, folder.files.get(name)
        if file is None:
            return _folder(path)
        time = folder.version.created_at
        return {"name": path, "size": file.nbytes, "type": "file", "etag": file.etag, "time": time}


class _CkptFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec ships no types
    """One file, opened to read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.cat_file(self.path, start, end)
        return found


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such file; paths are RUN@REF/FILE", path)
