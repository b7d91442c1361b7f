"""Ranges of tensors: read from the pieces that hold them, or made from what they follow from.

The one place that knows both. A tensor in pieces is decoded straight into its destination. One with
a recipe (:mod:`ckptstore.format.tables`) is made step by step, a step being a piece of its first
source: what it needs of the sources is read, many steps at a time, turned into elements in
the destination, and dropped. Where all of a tensor is made, its bytes must have the digest that the
recipe names. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Backend
from ckptstore.backends.transfers import FillingThreads
from ckptstore.checkpoint.cold_reads import naming_cold
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.derived_decode import DerivedDecode, follows
from ckptstore.chunking import in_batches
from ckptstore.config import Options
from ckptstore.encodings.casts import Rounding
from ckptstore.encodings.coding import decode_elements
from ckptstore.errors import CorruptTensorError
from ckptstore.events import Counted, Progress, ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import Manifest
from ckptstore.hashing import Hasher
from ckptstore.objects.piece_reader import read_pieces
from ckptstore.objects.plan import ReadItem

_SCALE_BYTES = 4


@dataclass(slots=True, kw_only=True)
class Range:
    """Some consecutive elements of one tensor, and the memory that they go to."""

    index: int
    """The tensor's record."""
    start: int
    """The first byte, in stored order; that of an element."""
    nbytes: int
    """How many bytes; whole elements."""
    out: memoryview | None
    """Writable, C-contiguous, `nbytes` long; None to check what is read and drop it."""


class _Ends:
    """Where the pieces of tensors end, in bytes; each is added up once."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._known: dict[int, npt.NDArray[np.int64]] = {}

    def of(self, index: int) -> npt.NDArray[np.int64]:
        """Return where the pieces of one tensor end: ``int64[pieces]``."""
        if index not in self._known:
            first = self._manifest.first
            raw = self._manifest.pieces.raw[first[index] : first[index + 1]]
            one = len(raw) == 1  # most tensors; ten times as fast
            self._known[index] = raw.astype(np.int64) if one else raw.cumsum(dtype=np.int64)
        return self._known[index]


class _Part:
    """Some consecutive bytes of a tensor in pieces, to be read together with others."""

    def __init__(
        self,
        content: Content,
        ends: _Ends,
        part: Range,
        label: str,
        following: Sequence[DerivedDecode] = (),
    ) -> None:
        manifest = content.manifest
        index, start, nbytes, out = part.index, part.start, part.nbytes, part.out
        self.items: list[ReadItem] = []
        """What must be read for them; whole pieces, some into memory of their own."""
        self.edge_bytes = 0
        """Memory of pieces that are wanted only in part."""
        self._edges: list[tuple[memoryview, int]] = []
        self._start, self._out = start, out
        if not nbytes:
            return
        end, base = start + nbytes, manifest.first[index]
        if not start and nbytes == manifest.pieces.raw[base]:  # most tensors are one piece
            then = tuple([one.taking(0) for one in following]) if following else ()
            self.items.append(ReadItem(base, out, label, then))
            return
        stops = ends.of(index)
        low, high = 0, len(stops)
        if nbytes < int(stops[-1]):
            low = int(stops.searchsorted(start, "right"))
            high = int(stops.searchsorted(end, "left")) + 1
        at = int(stops[low - 1]) if low else 0
        for piece, stop in enumerate(stops[low:high].tolist(), low):
            memory = None
            if out is not None and start <= at and stop <= end:
                memory = out[at - start : stop - start]
            elif out is not None:
                memory = memoryview(bytearray(stop - at))
                self.edge_bytes += stop - at
                self._edges.append((memory, at))
            then = tuple(one.taking(piece) for one in following) if following else ()
            self.items.append(ReadItem(row=base + piece, out=memory, label=label, then=then))
            at = stop

    def finish(self) -> None:
        """Bring what was read to where it goes; every item must have been read."""
        for memory, at in self._edges:
            assert self._out is not None  # noqa: S101  # for the type checker: edges go somewhere
            low = max(at, self._start)
            high = min(at + len(memory), self._start + len(self._out))
            self._out[low - self._start : high - self._start] = memory[low - at : high - at]
        self._edges.clear()


def read_ranges(
    content: Content,
    ranges: Sequence[Range],
    *,
    backend: Backend,
    options: Options,
    progress: ProgressCallback = silent,
    rounding: Rounding | None = None,
) -> None:
    """Fill the memory of some ranges; every byte that is read is checked.

    Host memory beyond the destinations, and beyond whole pieces at the ends of ranges, stays
    within ``options.host_bytes`` (one piece of each source at least). A tensor that others follow
    from, and that is asked for whole too, is read once.

    Parameters
    ----------
    rounding
        Rounds to bfloat16 faster than NumPy; None for NumPy.

    Raises
    ------
    CorruptTensorError
        A piece that is needed is damaged, or a tensor that is made whole is not what its recipe
        names; names the tensor.
    ColdObjectError
        A pack must be thawed first; the hint is the command.
    StorageError
        The storage failed.
    """
    records = content.manifest.tensors
    stored = [one for one in ranges if records[one.index].recipe is None]
    made = [one for one in ranges if records[one.index].recipe is not None]
    total = sum(one.nbytes for one in ranges)
    first = sum(one.nbytes for one in stored)
    count = Counted(progress, "read", total, first)
    ready = {
        one.index: one.out
        for one in stored
        if one.out is not None and one.nbytes == records[one.index].nbytes
    }
    ends = _Ends(content.manifest)

    if stored:
        following, made = _following(content, ends, made, ready, rounding)
        left = dict(following)  # each is made once
        parts = []
        for one in stored:
            makes = left.pop(one.index, ()) if one.nbytes == records[one.index].nbytes else ()
            parts.append(_Part(content, ends, one, content.labels[one.index], makes))
        _read_parts(
            content,
            parts,
            backend=backend,
            options=options,
            progress=lambda step: progress(
                Progress(stage=step.stage, done=min(step.done, first), total=total)
            ),
        )
        for derived in itertools.chain.from_iterable(following.values()):
            check_made(content, derived.index, derived.made(ready[derived.source]))
            count.add(derived.nbytes)
    if made:
        making = _Making(
            content=content,
            ends=ends,
            ready=ready,
            backend=backend,
            options=options,
            note=count.add,
            rounding=rounding,
        )
        making.run(made)


def _following(
    content: Content,
    ends: _Ends,
    made: Sequence[Range],
    ready: Mapping[int, memoryview],
    rounding: Rounding | None,
) -> tuple[dict[int, list[DerivedDecode]], list[Range]]:
    """Return what can be made while its source is read, by source, and what cannot."""
    manifest = content.manifest
    found: dict[int, list[DerivedDecode]] = {}
    rest = []
    for one in made:
        recipe = manifest.tensors[one.index].recipe
        source = recipe.sources[0] if recipe and follows(manifest, one.index) else -1
        whole = one.nbytes == manifest.tensors[one.index].nbytes
        if source in ready and whole and one.out is not None:
            following = DerivedDecode(manifest, one.index, ends.of(source), one.out, rounding)
            found.setdefault(source, []).append(following)
        else:
            rest.append(one)
    return found, rest


def _read_parts(
    content: Content,
    parts: Sequence[_Part],
    *,
    backend: Backend,
    options: Options,
    progress: ProgressCallback = silent,
) -> None:
    """Read some parts together, and bring them to where they go."""
    items = [item for part in parts for item in part.items]
    if items:
        read = content.read or read_pieces
        table = content.manifest.pieces
        with naming_cold(content.manifest.version, backend.url):
            read(table, items, backend=backend, options=options, progress=progress)
    for part in parts:
        part.finish()


def piece_ends(manifest: Manifest, index: int) -> npt.NDArray[np.int64]:
    """Return where the pieces end that a tensor is read from, in elements of the tensor.

    Of one with a recipe these are the pieces of its first source, which has as many elements.

    Returns
    -------
    numpy.ndarray
        ``int64[pieces]``; empty for an empty tensor.
    """
    recipe = manifest.tensors[index].recipe
    place = recipe.sources[0] if recipe else index
    return _Ends(manifest).of(place) // ITEM_BYTES[manifest.tensors[place].dtype]


def check_made(content: Content, index: int, made: Hasher) -> None:
    """Compare the digest of a tensor that was made with the one that its recipe names.

    :func:`read_ranges` does so for whole tensors; callers that read them in parts may call it.

    Raises
    ------
    CorruptTensorError
        They have another digest; names the tensor.
    """
    recipe = content.manifest.tensors[index].recipe
    if recipe is not None and made.digest() != recipe.digest:
        msg = f"tensor {content.labels[index]}: what its {recipe.kind} gives has another digest"
        hint = "run ckptstore verify; other tensors and versions can still be loaded"
        raise CorruptTensorError(msg, hint=hint)


@dataclass(slots=True, kw_only=True)
class _Scales:
    """Scales of consecutive blocks, in memory once they are read."""

    first: int
    """The first block."""
    stop: int
    memory: memoryview


@dataclass(slots=True, kw_only=True)
class _Step:
    """Elements that are made at once."""

    whole: Range
    """What they are a part of."""
    low: int
    """The first element in the tensor."""
    codes: memoryview
    """Of the first source; filled when the step's parts are read."""
    scales: memoryview | None
    """From that of element `low` on; filled likewise."""
    out: memoryview
    parts: list[_Part]
    """What is to be read first; nothing where the source is in memory."""
    held_bytes: int
    """Host memory that it takes."""
    last: bool
    """Whether the range ends with it."""


@dataclass(slots=True, kw_only=True)
class _Making:
    """One call's tensors with recipes; owned by one thread."""

    content: Content
    ends: _Ends
    ready: Mapping[int, memoryview]
    """Tensors that are in memory already, by place."""
    backend: Backend
    options: Options
    note: Callable[[int], None]
    """Called with the bytes of each step that is made."""
    rounding: Rounding | None
    hasher: Hasher = field(default_factory=Hasher)

    def run(self, ranges: Sequence[Range]) -> None:
        """Make all of them, in their order."""
        # Half for the threads that fetch; of the rest a quarter at most for scales, which stay; and
        # while the steps of one group are made, those of the next are read.
        options = replace(self.options, host_bytes=max(1, self.options.host_bytes // 2))
        room = max(1, self.options.host_bytes * 3 // 16)
        with (
            FillingThreads(options.workers, "ckptstore-decode") as pool,
            FillingThreads(1, "ckptstore-ahead") as ahead,
        ):
            due: tuple[list[_Step], Future[None]] | None = None
            steps = itertools.chain.from_iterable(map(self._steps, ranges))
            for group in in_batches(steps, lambda step: step.held_bytes, room):
                parts = [part for step in group for part in step.parts]
                reading = ahead.submit(
                    _read_parts, self.content, parts, backend=self.backend, options=options
                )
                if due is not None:
                    self._make(*due, pool)
                due = group, reading
            if due is not None:
                self._make(*due, pool)

    def _steps(self, one: Range) -> Iterator[_Step]:
        """Yield the steps of one range; what they read is planned, and its memory taken."""
        manifest = self.content.manifest
        record = manifest.tensors[one.index]
        recipe = record.recipe
        assert recipe is not None  # noqa: S101  # for the type checker: that is why it is here
        if not one.nbytes:
            self._check(one, Hasher())
        source = recipe.sources[0]
        item, own = ITEM_BYTES[record.dtype], ITEM_BYTES[manifest.tensors[source].dtype]
        low, stop = one.start // item, (one.start + one.nbytes) // item
        ends = self.ends.of(source) // own
        row = int(np.searchsorted(ends, low, "right"))
        scales: _Scales | None = None
        while low < stop:
            high = min(int(ends[row]), stop)
            parts: list[_Part] = []
            held = 0
            if one.out is None:
                out = memoryview(bytearray((high - low) * item))
                held = len(out)
            else:
                out = one.out[low * item - one.start : high * item - one.start]
            if source in self.ready:
                codes = self.ready[source][low * own : high * own]
            else:
                codes = memoryview(bytearray((high - low) * own))
                parts.append(self._part(one, source, low * own, codes))
                held += len(codes)
            if recipe.block and (scales is None or -(-high // recipe.block) > scales.stop):
                scales = self._scales(recipe.sources[1], recipe.block, low, high, stop)
                start = scales.first * _SCALE_BYTES
                parts.append(self._part(one, recipe.sources[1], start, scales.memory))
                held += len(scales.memory)
            factors = None
            if scales is not None:
                factors = scales.memory[(low // recipe.block - scales.first) * _SCALE_BYTES :]
            yield _Step(
                whole=one,
                low=low,
                codes=codes,
                scales=factors,
                out=out,
                parts=parts,
                held_bytes=held + sum(part.edge_bytes for part in parts),
                last=high == stop,
            )
            low, row = high, row + 1

    def _scales(self, index: int, block: int, low: int, high: int, stop: int) -> _Scales:
        """Return memory for scales from that of element `low` on: as many as there is room for."""
        first = low // block
        needed, wanted = -(-high // block), -(-stop // block)
        last = max(
            needed, min(wanted, first + max(1, self.options.host_bytes // 8 // _SCALE_BYTES))
        )
        if last < wanted:  # end where a piece ends, so that none is read twice
            ends = self.ends.of(index) // _SCALE_BYTES
            place = int(np.searchsorted(ends, last, "right"))
            last = max(needed, int(ends[place - 1]) if place else 0)
        memory = memoryview(bytearray((last - first) * _SCALE_BYTES))
        return _Scales(first=first, stop=last, memory=memory)

    def _part(self, made: Range, index: int, start: int, out: memoryview) -> _Part:
        """Return a part of a source; what is wrong with it is wrong with what is made of it."""
        part = Range(index=index, start=start, nbytes=len(out), out=out)
        return _Part(self.content, self.ends, part, self.content.labels[made.index])

    def _make(self, group: Sequence[_Step], read: Future[None], pool: FillingThreads) -> None:
        """Make some steps once they are read, and check the tensors that end with one."""
        read.result()
        for step, _ in zip(group, pool.map(self._decode, group), strict=True):
            if step.whole.nbytes == self.content.manifest.tensors[step.whole.index].nbytes:
                self.hasher.update(step.out)
                if step.last:
                    self._check(step.whole, self.hasher)
                    self.hasher = Hasher()
            self.note(len(step.out))

    def _decode(self, step: _Step) -> None:
        """Make the elements of a step."""
        record = self.content.manifest.tensors[step.whole.index]
        recipe = record.recipe
        assert recipe is not None  # noqa: S101  # for the type checker: steps are of such
        given = self.content.manifest.tensors[recipe.sources[0]].dtype
        decode_elements(
            recipe.kind, recipe.code, recipe.block, record.dtype, given, step.low, step.codes,
            step.scales, step.out, self.rounding,
        )  # fmt: skip

    def _check(self, one: Range, made: Hasher) -> None:
        """Compare the digest of a tensor that was made whole."""
        if one.nbytes == self.content.manifest.tensors[one.index].nbytes:
            check_made(self.content, one.index, made)
