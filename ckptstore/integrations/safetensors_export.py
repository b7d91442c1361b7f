"""Export: the tensors of a version become one safetensors file, with bounded memory; torch-free.

The layout is a u64 length, a JSON header and the data. All sizes are known from the manifest, so
the header is written first and the tensors follow one after the other, as they are read and
checked. The file appears under its name when it is complete and on disk, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from ckptstore import limits
from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import sync_folder
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, check_made, piece_ends, read_ranges
from ckptstore.errors import CkptStoreError, ConflictError, CorruptObjectError, InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.blocks import gather
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.hashing import Hasher
from ckptstore.integrations.safetensors_plan import FileTensor, encode_header, plan_file
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.store import Store

_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    path: str
    version: Version
    tensors_count: int
    """Tensors in the file; a tied one counts once for each of its paths."""
    file_bytes: int
    left_out: tuple[str, ...]
    """Paths of values that were asked for, but are no tensors: numbers, texts, generators."""


def export_safetensors(
    store: Store,
    ref: str,
    path: str | os.PathLike[str],
    *,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] | None = None,
    strip_prefix: str = "",
    overwrite: bool = False,
    progress: ProgressCallback = silent,
) -> Exported:
    """Write the tensors of a version to a safetensors file; checks every byte.

    Tied tensors and views are written once for each path, NumPy arrays as tensors. Host memory
    stays near ``EXPORT_WINDOW_BYTES``, but a tensor that is not stored row by row
    (channels-last, transposed, a view, blocks of ranks) is held whole.

    Parameters
    ----------
    ref
        Names the version.
    path
        A local file; it appears when it is complete and synced, or not at all.
    include, exclude
        Patterns of paths as in :meth:`ckptstore.Store.load`.
    strip_prefix
        Prefix removed from names: ``model.`` makes ``model.embed.weight`` the
        ``embed.weight`` that ``load_state_dict`` expects.
    overwrite
        Replace an existing file.
    progress
        Called with the bytes done.

    Raises
    ------
    StateError
        A tensor has a dtype that safetensors does not know (complex128, quantized, sub-byte
        integers); names it. Nothing was written.
    TensorNotFoundError
        A pattern matches nothing, or there is no tensor at all.
    InvalidInputError
        Two tensors would have one name; or the name does not end in ``.safetensors``.
    ConflictError
        The file exists, and `overwrite` is False.
    CorruptTensorError
        A stored tensor is damaged; names it. No file appears.
    StorageError
        The store or the local disk failed. No file appears.
    """
    _check_name(Path(path))
    repo = store.repo
    version = store.resolve(ref)
    content = store._session.replicas.content(version)
    items, left_out = plan_file(content, PathFilter(include, exclude), strip_prefix)
    header = encode_header(items, version)
    with _new_file(Path(path), repo.environment.random_hex(8), overwrite=overwrite) as file:
        file.write(header)
        total = sum(item.nbytes for item in items)
        writer = _Writer(file=file, content=content, repo=repo, progress=progress, total=total)
        writer.write(items)
        size = _checked_size(file, header, items)
    return Exported(
        path=os.fspath(path),
        version=version,
        tensors_count=len(items),
        file_bytes=size,
        left_out=left_out,
    )


def _check_name(path: Path) -> None:
    """Refuse a file name that hides the format from readers, ``import`` included."""
    if path.is_dir():
        msg = f"{path} is a folder, but an export is one file"
        raise InvalidInputError(msg, hint=f"name the file: {path / ('model' + _SUFFIX)}")
    if path.suffix != _SUFFIX:
        msg = f"{path} does not end in {_SUFFIX}, the format of the export"
        name = "NAME" if path.name == "-" or not path.name else path.stem or path.name
        raise InvalidInputError(msg, hint=f"call it {path.with_name(name + _SUFFIX)}")


def _checked_size(file: BinaryIO, header: bytes, items: Sequence[FileTensor]) -> int:
    """Return the number of bytes written, after comparing it with the header's."""
    size = file.tell()
    expected = len(header) + sum(item.nbytes for item in items)
    if size != expected:  # the manifest and its skeleton were checked, so this is a bug
        msg = f"{size} bytes were written, not {expected}"
        raise CorruptObjectError(msg)
    return size


def _segments(content: Content, index: int) -> Iterator[Range]:
    """Yield a tensor in parts of at most the window, or one piece if that is larger."""
    item = ITEM_BYTES[content.manifest.tensors[index].dtype]
    start = stop = 0
    for end in (piece_ends(content.manifest, index) * item).tolist():
        if stop > start and end - start > limits.EXPORT_WINDOW_BYTES:
            yield Range(index=index, start=start, nbytes=stop - start, out=None)
            start = stop
        stop = end
    if stop > start:
        yield Range(index=index, start=start, nbytes=stop - start, out=None)


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Writes tensors to a file; reads small ones many at a time, up to the window."""

    file: BinaryIO
    content: Content
    repo: Repo
    progress: ProgressCallback
    total: int
    done: int = 0
    batch: list[Range] = field(default_factory=list)
    batch_bytes: int = 0
    made: Hasher = field(default_factory=Hasher)
    """Of the tensor that is being read in parts; one comes after the other."""

    def write(self, items: Sequence[FileTensor]) -> None:
        """Write all tensors, in the order of the file."""
        for item in items:
            if item.streams:
                for segment in _segments(self.content, item.index):
                    self._add(segment)
            elif item.nbytes:
                self._flush()
                self._write_rearranged(item)
        self._flush()

    def _add(self, segment: Range) -> None:
        """Append the next segment of the file."""
        if self.batch_bytes + segment.nbytes > limits.EXPORT_WINDOW_BYTES:
            self._flush()
        self.batch.append(segment)
        self.batch_bytes += segment.nbytes

    def _flush(self) -> None:
        """Write the collected segments."""
        memory = memoryview(bytearray(self.batch_bytes))
        ranges: list[Range] = []
        at = 0
        for part in self.batch:
            ranges.append(replace(part, out=memory[at : at + part.nbytes]))
            at += part.nbytes
        self._read(ranges)
        for one in ranges:
            self._check(one)
        self.file.write(memory)
        self.done += self.batch_bytes
        self.batch, self.batch_bytes = [], 0

    def _check(self, one: Range) -> None:
        """Compare a derived tensor with its digest, once all of it was read."""
        record = self.content.manifest.tensors[one.index]
        if record.recipe is None or one.out is None or one.nbytes == record.nbytes:
            return  # tensors read whole are compared by their reader
        if one.start == 0:
            self.made = Hasher()
        self.made.update(one.out)
        if one.start + one.nbytes == record.nbytes:
            check_made(self.content, one.index, self.made)

    def _write_rearranged(self, item: FileTensor) -> None:
        """Write a tensor whose stored order is not the file's."""
        record = self.content.manifest.tensors[item.index]
        memory = memoryview(bytearray(record.nbytes))
        self._read([Range(index=item.index, start=0, nbytes=len(memory), out=memory)])
        if record.blocks is not None:
            stored, memory = memory, memoryview(bytearray(record.nbytes))
            gather(record.blocks, record.shape, ITEM_BYTES[record.dtype], stored, memory)
        element = np.dtype(f"V{ITEM_BYTES[item.dtype]}")
        if item.view is not None:
            offset, steps = item.view
            strides = [step * element.itemsize for step in steps]
            array = np.ndarray(item.shape, element, memory, offset, strides)
        else:
            order = range(len(item.shape)) if item.order is None else item.order
            dense = np.frombuffer(memory, element).reshape([item.shape[dim] for dim in order])
            array = dense.transpose(np.argsort(order))
        self.file.write(np.ascontiguousarray(array).tobytes())
        self.done += item.nbytes

    def _read(self, ranges: Sequence[Range]) -> None:
        base = self.done

        def step(part: Progress) -> None:
            done = min(base + part.done, self.total)
            self.progress(Progress(stage="export", done=done, total=self.total))

        if ranges:
            read_ranges(
                self.content,
                ranges,
                backend=self.repo.backend,
                options=self.repo.options,
                progress=step,
            )


@contextmanager
def _new_file(path: Path, mark: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file that gets its name, durably, if the block succeeds, and is removed otherwise.

    Between the last check and the rename another process could make the file, which is then
    replaced.
    """
    if not overwrite and path.exists():
        raise _taken(path)
    temporary = path.with_name(f".{path.name[:200]}.{mark}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not overwrite and path.exists():
            raise _taken(path)
        temporary.replace(path)
        sync_folder(str(path.parent))
    except CkptStoreError:
        raise
    except OSError as error:
        raise translate(error, f"writing {path}", writing=True) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _taken(path: Path) -> ConflictError:
    msg = f"{path} is there already"
    return ConflictError(msg, hint="choose another name, or overwrite it (--force)")
