"""Measures the difference between tensors of two versions, a window at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, piece_ends, read_ranges
from ckptstore.chunking import in_batches
from ckptstore.errors import InvalidInputError
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import Manifest
from ckptstore.format.skeleton import Leaf
from ckptstore.repo import Repo
from ckptstore.states.lazy import LazyTensor
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.narrowing import castable
from ckptstore.tensors.tensor_bytes import dtype_named

# Elements that are compared at once. Source: a window takes some 60 bytes an element (both sides as
# stored and as float64, the difference, masks): 64 MB, whatever the tensors.
_WINDOW_ELEMENTS = 1 << 20

_STORED_WHOLE = frozenset({"tensor", "parameter", "buffer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Difference of two tensors of one shape, computed in float64.

    Elements with a NaN or an infinite value on either side do not count in the errors; those
    that differ are counted in `nonfinite`.
    """

    relative_l2: float
    """Norm of the difference over the norm of the first; infinite where only that one is zero."""
    max_abs: float
    """Largest absolute difference of two elements."""
    elements: int
    """Compared; a complex one counts as two numbers."""
    unequal: int
    """Elements that differ at all, NaN from NaN not."""
    nonfinite: int
    """Elements that differ and have a NaN or an infinite value on either side."""


class Pair(NamedTuple):
    """Two leaves to compare, of one shape."""

    first: Leaf
    second: Leaf


@dataclass(slots=True)
class _Sums:
    """Sums over the windows of one pair."""

    square_difference: float = 0.0
    square_first: float = 0.0
    max_abs: float = 0.0
    elements: int = 0
    unequal: int = 0
    nonfinite: int = 0

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add one window of both tensors."""
        one, two = _float64(first), _float64(second)
        unequal = (one != two) & ~(one.isnan() & two.isnan())
        finite = one.isfinite() & two.isfinite()
        difference = torch.where(finite, one - two, 0.0)
        self.square_difference += float(difference.square().sum())
        self.square_first += float(torch.where(finite, one, 0.0).square().sum())
        if difference.numel():
            self.max_abs = max(self.max_abs, float(difference.abs().max()))
        self.elements += one.numel()
        self.unequal += int(unequal.sum())
        self.nonfinite += int((unequal & ~finite).sum())

    def result(self) -> TensorError:
        """Return the errors of the whole pair."""
        difference, norm = math.sqrt(self.square_difference), math.sqrt(self.square_first)
        relative = difference / norm if norm else math.inf if difference else 0.0
        return TensorError(
            relative_l2=relative,
            max_abs=self.max_abs,
            elements=self.elements,
            unequal=self.unequal,
            nonfinite=self.nonfinite,
        )


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of real float64; complex elements give two each."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj()).flatten()
    return tensor.detach().to(torch.float64).flatten()


class _Window(NamedTuple):
    """A range of elements of one pair."""

    place: int
    start: int
    stop: int


def compare(
    repo: Repo,
    contents: tuple[Content, Content],
    pairs: Iterable[Pair],
    *,
    progress: ProgressCallback = silent,
) -> list[TensorError | None]:
    """Return the error of each pair; None if the leaves have no values to subtract.

    Reads each tensor once, some 64 MB of it at a time; but views, NumPy arrays, quantized tensors
    and those stored in different orders or blocks are held whole.

    Raises
    ------
    InvalidInputError
        The leaves of a pair differ in shape.
    CorruptTensorError
        A piece is damaged.
    StorageError
        The storage failed.
    """
    chosen = list(pairs)
    sums = {place: _Sums() for place, pair in enumerate(chosen) if _streams(pair, contents)}
    total = sum(contents[0].manifest.tensors[chosen[p].first.index].nbytes for p in sums)
    done = 0
    windows = _windows(chosen, sums, contents[0].manifest)
    for group in in_batches(windows, lambda one: one.stop - one.start, _WINDOW_ELEMENTS):
        for window, one, two in _read(repo, chosen, group, contents):
            sums[window.place].add(one, two)
            done += one.numel() * one.element_size()
        progress(Progress(stage="compare", done=done, total=total))
    return [
        sums[place].result() if place in sums else _whole(repo, pair, contents)
        for place, pair in enumerate(chosen)
    ]


def _streams(pair: Pair, contents: tuple[Content, Content]) -> bool:
    """Return whether a pair is read in windows: two stored tensors of one order, with numbers."""
    if not {pair.first.kind, pair.second.kind} <= _STORED_WHOLE:
        return False
    one, two = (c.manifest.tensors[leaf.index] for c, leaf in zip(contents, pair, strict=True))
    if one.shape != two.shape:
        raise InvalidInputError(f"the shapes {one.shape} and {two.shape} cannot be compared")
    complex_both = one.dtype.startswith("complex") == two.dtype.startswith("complex")
    same_order = (one.order, one.blocks) == (two.order, two.blocks)
    return complex_both and same_order and _is_numeric(one.dtype) and _is_numeric(two.dtype)


def _real(dtype: str) -> torch.dtype:
    """Return a dtype by name; for complex elements that of their two parts."""
    parts = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
    return dtype_named(parts.get(dtype, dtype))


def _is_numeric(dtype: str) -> bool:
    """Return whether elements of a dtype, whole bytes each, can become float64."""
    return castable(_real(dtype), torch.float64)


def _windows(pairs: list[Pair], streamed: Iterable[int], manifest: Manifest) -> Iterator[_Window]:
    """Yield the parts of tensors that are compared at once; they end where a piece ends."""
    for place in streamed:
        index = pairs[place].first.index
        record = manifest.tensors[index]
        count = record.nbytes // ITEM_BYTES[record.dtype]
        step = _WINDOW_ELEMENTS
        ends = piece_ends(manifest, index)
        if len(ends) > 1:
            step = max(1, step // int(ends[0])) * int(ends[0])
        for start in range(0, count, step):
            yield _Window(place, start, min(start + step, count))


def _read(
    repo: Repo, pairs: list[Pair], group: list[_Window], contents: tuple[Content, Content]
) -> Iterator[tuple[_Window, torch.Tensor, torch.Tensor]]:
    sides: list[list[torch.Tensor]] = []
    for side, content in enumerate(contents):
        ranges: list[Range] = []
        tensors: list[torch.Tensor] = []
        for window in group:
            index = pairs[window.place][side].index
            dtype = content.manifest.tensors[index].dtype
            item = ITEM_BYTES[dtype]
            memory = bytearray((window.stop - window.start) * item)
            out = memoryview(memory)
            ranges.append(Range(index=index, start=window.start * item, nbytes=len(out), out=out))
            tensors.append(torch.frombuffer(memory, dtype=torch.uint8).view(_real(dtype)))
        read_ranges(
            content, ranges, backend=repo.backend, options=repo.options, rounding=to_bfloat16
        )
        sides.append(tensors)
    yield from zip(group, *sides, strict=True)


def _whole(repo: Repo, pair: Pair, contents: tuple[Content, Content]) -> TensorError | None:
    """Compare leaves that are rebuilt first; return None if they are no tensors of numbers."""
    if {pair.first.kind, pair.second.kind} & {"bytes", "generator"}:
        return None
    values = []
    for content, leaf in zip(contents, pair, strict=True):
        value = LazyTensor(repo, content, leaf).load()
        try:
            ready = isinstance(value, torch.Tensor)
            values.append(value if ready else torch.as_tensor(value, device="cpu"))
        except (TypeError, ValueError):  # an array of text, for example
            return None
    if values[0].shape != values[1].shape:
        msg = f"the shapes {tuple(values[0].shape)} and {tuple(values[1].shape)} differ"
        raise InvalidInputError(msg)
    sums = _Sums()
    try:
        sums.add(values[0], values[1])
    except (RuntimeError, NotImplementedError):  # a dtype without arithmetic
        return None
    return sums.result()
