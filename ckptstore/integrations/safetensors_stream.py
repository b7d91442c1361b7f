"""Streams ranges of a safetensors file from the pieces of a version; each is checked first.

Tensors whose stored bytes are the file's pass window by window, a window ending where pieces end.
Others are brought into order some rows at a time.

An export is a whole such file, written with bounded memory and without torch. The layout is a u64
length, a JSON header and the data. All sizes are known from the manifest, so the header comes first
and the tensors follow one after the other, as they are read and checked. The file appears under its
name when it is complete and on disk, or not at all.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptstore import limits
from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, check_made, piece_ends, read_ranges
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.encodings.casts import raw_dtype, recast
from ckptstore.errors import CorruptObjectError, InvalidInputError, LimitError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.blocks import gather
from ckptstore.format.dtypes import ITEM_BYTES, strides_of
from ckptstore.format.paths import PathFilter, Pattern
from ckptstore.hashing import Hasher
from ckptstore.integrations.safetensors_plan import FileTensor, encode_header, plan_file
from ckptstore.jobs.job_outputs import new_file
from ckptstore.model import Version
from ckptstore.objects.joining import Growing
from ckptstore.objects.piece_reader import read_alone
from ckptstore.repo import Repo
from ckptstore.store import Store

Window = Callable[[Growing], Sequence[memoryview]]
"""Reads and checks the bytes of a window, in that memory or in memory of their own."""


class Scratch(threading.local, Growing):
    """Memory for stored bytes that are decoded, used again; each thread has its own."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a file, as it is stored and as it is in the file."""

    stored: FileTensor
    served: FileTensor
    """Equal, or of another dtype: it is cast."""


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file that is made while it is read."""

    header: bytes
    weights: tuple[Weight, ...]
    """In the order of the file."""

    @cached_property
    def stops(self) -> list[int]:
        """Where each tensor ends in the file."""
        sizes = (weight.served.nbytes for weight in self.weights)
        return list(accumulate(sizes, initial=len(self.header)))[1:]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.stops[-1] if self.stops else len(self.header)


@dataclass(slots=True)
class _Segment:
    """Consecutive elements of one tensor that are read at once."""

    weight: Weight
    part: Range
    """What is read of the record."""
    skip: int
    """Bytes of it before the first element."""
    source_bytes: int
    low: int
    """First byte wanted of the served elements, and where to stop."""
    high: int
    first: int
    """The first element in the tensor, and the one after the last."""
    stop: int
    row: int | None
    """In the piece table, of the stored piece that begins with the first element, if one does."""

    def served(self, memory: memoryview) -> memoryview:
        """Return the bytes of the file, from those that were read."""
        data = memory[self.skip : self.skip + self.source_bytes]
        return _cast(self.weight, data)[self.low : self.high]


@dataclass(slots=True)
class FileStream:
    """Reads of one file; one thread at a time asks for windows, any thread reads them."""

    content: Content
    repo: Repo
    file: PlannedFile
    window_bytes: int
    """Bytes of tensors that are read at a time; one piece at least."""
    view_bytes_max: int | None = None
    """Largest base of a view that is not contiguous, which is held whole."""
    scratch: Scratch = field(default_factory=Scratch)
    made: dict[int, tuple[int, Hasher]] = field(default_factory=dict)
    """Digest of each tensor with a recipe, up to an element, if all before it was read."""

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, some MiB at a time.

        Raises
        ------
        CorruptTensorError
            A piece is damaged: its window was not yielded.
        LimitError
            A view is too large to be brought into order.
        StorageError
            The storage failed.
        """
        for window in self.windows(start, stop):
            yield from window(Growing())

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the windows of a range, in order; see :meth:`read`."""
        ends = self.file.stops
        touched = slice(bisect_right(ends, start), bisect_left(ends, stop) + 1)
        if start < len(self.file.header) and start < stop:
            yield _known(memoryview(self.file.header)[start:stop])
        batch: list[_Segment] = []
        held = 0
        for weight, end in zip(self.file.weights[touched], ends[touched], strict=True):
            begin = end - weight.served.nbytes
            low, high = max(0, start - begin), min(stop, end) - begin
            if low >= high:
                continue
            base = _base(weight.stored)
            if base is None:
                yield self._window(batch)
                batch, held = [], 0
                yield from map(_known, self._rearranged(weight, low, high))
                continue
            for segment in self._segments(weight, base, low, high):
                if batch and held + segment.part.nbytes > self.window_bytes:
                    yield self._window(batch)
                    batch, held = [], 0
                batch.append(segment)
                held += segment.part.nbytes
        yield self._window(batch)

    def _segments(self, weight: Weight, base: int, low: int, high: int) -> Iterator[_Segment]:
        """Yield the segments of a range of a tensor's bytes in the file."""
        one, record = weight.stored, self.content.manifest.tensors[weight.stored.index]
        item, out = ITEM_BYTES[one.dtype], ITEM_BYTES[weight.served.dtype]
        unit = ITEM_BYTES[record.dtype]
        ends = (piece_ends(self.content.manifest, one.index) * unit - base) // item
        first = None if record.recipe else self.content.manifest.first[one.index]
        at, last = low // out, -(-high // out)
        while at < last:
            piece = bisect_right(ends, at)
            most = max(at + self.window_bytes // item, int(ends[piece]))
            stop = int(ends[bisect_right(ends, most) - 1])
            stop = last if most >= last else stop
            begins = int(ends[piece - 1]) if piece else -base // item
            begin, end = base + at * item, base + stop * item
            lead = begin % unit
            nbytes = min(record.nbytes, -(-end // unit) * unit) - (begin - lead)
            yield _Segment(
                weight,
                Range(index=one.index, start=begin - lead, nbytes=nbytes, out=None),
                skip=lead,
                source_bytes=end - begin,
                low=max(low - at * out, 0),
                high=min(high, stop * out) - at * out,
                first=at,
                stop=stop,
                row=first + piece if first is not None and at == begins else None,
            )
            at = stop

    def _window(self, batch: list[_Segment]) -> Window:
        """Return the window of some segments; it is read already where the order counts."""
        if all(segment.row is not None for segment in batch):
            return partial(self._read, batch)
        return _known(*self._read(batch, Growing()))

    def _read(self, batch: list[_Segment], room: Growing) -> list[memoryview]:
        """Return the bytes of some segments, which are read together."""
        memory = room(sum(segment.part.nbytes for segment in batch))
        row = batch[0].row if len(batch) == 1 and self.content.read is None else None
        if row is not None:
            table, backend = self.content.manifest.pieces, self.repo.load_backend
            if read_alone(table, row, memory, backend, self.scratch):
                return [batch[0].served(memory)]
        ranges, at = [], 0
        for segment in batch:
            ranges.append(replace(segment.part, out=memory[at : at + segment.part.nbytes]))
            at += segment.part.nbytes
        self._fetch(ranges)
        parts = []
        for segment, one in zip(batch, ranges, strict=True):
            assert one.out is not None  # noqa: S101  # for the type checker: it was just read
            self._check(segment, one.out)
            parts.append(segment.served(one.out))
        if any(_is_cast(one.weight) for one in batch) or sum(map(len, parts)) < len(memory):
            return parts
        return [memory] if batch else []

    def _fetch(self, ranges: list[Range]) -> None:
        backend, options = self.repo.load_backend, self.repo.options
        read_ranges(self.content, ranges, backend=backend, options=options)

    def _check(self, segment: _Segment, data: memoryview) -> None:
        """Compare the digest of a tensor with a recipe, once all of it was read in order."""
        index = segment.part.index
        record = self.content.manifest.tensors[index]
        if record.recipe is None or segment.weight.stored.view is not None:
            return
        done, made = self.made.pop(index, (0, Hasher()))
        if done != segment.first:
            return
        made.update(data)
        if segment.stop * ITEM_BYTES[record.dtype] == record.nbytes:
            check_made(self.content, index, made)
        else:
            self.made[index] = segment.stop, made

    def _rearranged(self, weight: Weight, low: int, high: int) -> Iterator[memoryview]:
        """Yield a range of a tensor whose stored order is not the file's."""
        one = weight.stored
        row = weight.served.nbytes // one.shape[0]
        step = max(1, 4 * self.window_bytes // row)  # each step reads all of its pieces
        whole = self._whole(one) if one.view is not None else None
        for first in range(low // row, -(-high // row), step):
            stop = min(first + step, one.shape[0])
            if whole is not None:
                rows = np.ascontiguousarray(whole[first:stop])
            else:
                rows = np.empty((stop - first, *one.shape[1:]), f"V{ITEM_BYTES[one.dtype]}")
                offsets = (first, *(0 for _ in one.shape[1:]))
                region = Region(content=self.content, index=one.index, offsets=offsets, out=rows)
                backend, options = self.repo.load_backend, self.repo.options
                read_regions([region], backend=backend, options=options)
            data = _cast(weight, rows.reshape(-1).view(np.uint8).data)
            yield data[max(0, low - first * row) : high - first * row]

    def _whole(self, one: FileTensor) -> np.ndarray[Any, Any]:
        """Return a view that is not contiguous, over all of its record."""
        record = self.content.manifest.tensors[one.index]
        if self.view_bytes_max is not None and record.nbytes > self.view_bytes_max:
            msg = f"the tensor {one.name!r} is a view of {record.nbytes} bytes out of order"
            raise LimitError(msg, hint="ckptstore export writes it")
        memory = memoryview(bytearray(record.nbytes))
        self._fetch([Range(index=one.index, start=0, nbytes=len(memory), out=memory)])
        if record.blocks is not None:
            stored, memory = memory, memoryview(bytearray(record.nbytes))
            gather(record.blocks, record.shape, ITEM_BYTES[record.dtype], stored, memory)
        offset, steps = one.view or (0, ())
        element = np.dtype(f"V{ITEM_BYTES[one.dtype]}")
        strides = [step * element.itemsize for step in steps]
        return np.ndarray(one.shape, element, memory, offset, strides)


def _known(*parts: memoryview) -> Window:
    return lambda _: parts


def _base(one: FileTensor) -> int | None:
    """Return where a tensor begins in its record, if its bytes lie there in order."""
    if one.streams:
        return 0
    if one.view is None or one.blocks:
        return None
    offset, strides = one.view
    dense = strides_of(one.shape, None)
    alike = all(s == d or n == 1 for s, d, n in zip(strides, dense, one.shape, strict=True))
    return offset if alike else None


def _is_cast(weight: Weight) -> bool:
    return weight.stored.dtype != weight.served.dtype


def _cast(weight: Weight, data: memoryview) -> memoryview:
    """Return elements as they are served."""
    if not _is_cast(weight):
        return data
    source, target = weight.stored.dtype, weight.served.dtype
    made = recast(source, target, np.frombuffer(data, raw_dtype(source)))
    return np.ascontiguousarray(made).data.cast("B")


# --- export ---------------------------------------------------------------------------------------

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


@operation("export")
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
    stays near ``EXPORT_WINDOW_BYTES``, unless a tensor is not stored row by row.

    Parameters
    ----------
    ref
        Names the version.
    path
        A local file; it appears when it is complete and synced, or not at all. It keeps the owner
        and mode of a file that it replaces; of a symbolic link, the target is replaced.
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
    repo, version = store.repo, store.resolve(ref)
    content = store._session.replicas.content(version)
    items, left_out = plan_file(content, PathFilter(include, exclude), strip_prefix)
    plan = PlannedFile(encode_header(items, version), tuple(Weight(one, one) for one in items))
    stream = FileStream(content, repo, plan, limits.EXPORT_WINDOW_BYTES)
    with new_file(Path(path), overwrite=overwrite) as file:
        for part in stream.read(0, plan.nbytes):
            file.write(part)
            done, total = (size - len(plan.header) for size in (file.tell(), plan.nbytes))
            progress(Progress(stage="export", done=done, total=total))
        size = file.tell()
        if size != plan.nbytes:  # the manifest and its skeleton were checked, so this is a bug
            raise CorruptObjectError(f"{size} bytes were written, not {plan.nbytes}")
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
