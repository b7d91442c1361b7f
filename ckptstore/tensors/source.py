"""Sources of a save: one tensor's bytes in their stored order, as a whole or piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ckptstore.format.dtypes import ITEM_BYTES, bytes_of
from ckptstore.format.paths import Path
from ckptstore.tensors.tensor_bytes import as_integers, memory_of, offset_of, tensor_over

_CPU = torch.device("cpu")


class TensorPayload(Protocol):
    """The bytes of one tensor, dense, in stored order. Safe to read from several threads."""

    @property
    def device(self) -> torch.device:
        """Return the device that holds the bytes."""

    def view(self) -> memoryview | None:
        """Return the CPU memory itself, without a copy; None if it does not hold the bytes so."""

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write the bytes from `start` on into `out`, which must not reach past the end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceTensor:
    """One tensor to save. It reads the caller's memory, which must not change until it is saved."""

    dtype: str
    """Torch's name of the element type, without ``torch.``."""
    shape: tuple[int, ...]
    """Sizes by dimension."""
    order: tuple[int, ...] | None
    """Dimensions from the outermost in memory to the innermost; None is 0, 1, 2, ..."""
    paths: tuple[Path, ...]
    """The leaves that read it, in the order of the state; never empty."""
    payload: TensorPayload
    """Its bytes."""
    watched: tuple[torch.Tensor, ...] = ()
    """The caller's tensors that it reads; their counters tell whether they were changed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return bytes_of(self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one step of the outermost dimension in memory; at least `itemsize`."""
        if not self.shape:
            return self.itemsize
        outer = self.order[0] if self.order else 0
        return max(self.nbytes // max(self.shape[outer], 1), self.itemsize)


def settle(tensors: Iterable[SourceTensor]) -> None:
    """Wait for the work queued on the devices before this call.

    Results of work that the calling thread queued on its current stream are then in memory,
    so that worker threads, which have streams of their own, read the same as the caller.
    """
    devices = {tensor.payload.device for tensor in tensors} - {_CPU}
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


class TensorBytes:
    """A strided torch tensor on any device.

    Parameters
    ----------
    tensor
        Not quantized; may have gaps, and conjugate or negative bits. Must not overlap itself.
    order
        The order in which its dimensions are stored.
    dense
        Whether its memory, from first to last byte, is exactly the bytes to store.
    """

    def __init__(self, tensor: torch.Tensor, order: Sequence[int] | None, *, dense: bool) -> None:
        self._tensor = tensor
        self._order = order
        self._dense = dense

    @property
    def device(self) -> torch.device:
        """Return the tensor's device."""
        return self._tensor.device

    @property
    def dense(self) -> bool:
        """Return whether its memory is exactly the bytes to store."""
        return self._dense

    def flat(self) -> torch.Tensor:
        """Return the bytes of a dense tensor, ``uint8[nbytes]``, on its device."""
        tensor = self._tensor
        item = tensor.element_size()
        start, size = offset_of(tensor) * item, tensor.numel() * item
        return tensor_over(tensor.untyped_storage(), torch.uint8, start, (size,), (1,))

    def view(self) -> memoryview | None:
        """Return the memory of a dense tensor on the CPU."""
        tensor = self._tensor
        if not self._dense or tensor.device.type != "cpu":
            return None
        item = tensor.element_size()
        return memory_of(tensor.untyped_storage(), offset_of(tensor) * item, tensor.numel() * item)

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write a piece of the bytes into `out`."""
        if not len(out):
            return
        if self._dense:
            piece = self.flat()[start : start + len(out)]
            torch.frombuffer(out, dtype=torch.uint8).copy_(piece)
            return
        tensor = self._tensor.detach()
        ordered = tensor if self._order is None else tensor.permute(tuple(self._order))
        if ordered.is_conj() or ordered.is_neg():
            _copy_rows(ordered, ordered.element_size(), start, out, _put_resolved)
        else:
            integers = as_integers(ordered)
            _copy_rows(integers, integers.element_size(), start, out, _put_integers)


class ArrayBytes:
    """A NumPy array whose elements are plain bytes.

    Parameters
    ----------
    array
        Already transposed to the stored order; any strides.
    """

    device = _CPU

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        # As raw bytes, so that padding is copied and no byte order is interpreted.
        self._array = array.view(np.dtype((np.void, array.itemsize))) if array.itemsize else array

    def view(self) -> memoryview | None:
        """Return the memory of a C-contiguous array."""
        array = self._array
        if not array.flags.c_contiguous:
            return None
        if not array.nbytes:
            return memoryview(b"")
        return array.reshape(-1).view(np.uint8).data

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write a piece of the bytes into `out`."""
        if len(out):
            _copy_rows(self._array, self._array.itemsize, start, out, _put_array)


def _copy_rows(
    source: Any,  # noqa: ANN401 - a torch tensor or a NumPy array: by their common methods
    item: int,
    start: int,
    out: memoryview,
    put: Callable[[Any, memoryview], None],
) -> None:
    """Write bytes of `source` in C order, from `start` on; `put` writes whole sub-arrays.

    Splits off the incomplete row at either end, down to single elements, and puts the whole rows
    between them at once.
    """
    if source.ndim == 0:
        element = memoryview(bytearray(item))
        put(source, element)
        out[:] = element[start : start + len(out)]
        return
    row = item * math.prod(source.shape[1:])
    stop = start + len(out)
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        _copy_rows(source[last, ...], item, start - last * row, out, put)
        return
    head = first * row - start
    tail = stop - last * row
    if head:
        _copy_rows(source[first - 1, ...], item, row - head, out[:head], put)
    if last > first:
        put(source[first:last], out[head : len(out) - tail])
    if tail:
        _copy_rows(source[last, ...], item, 0, out[len(out) - tail :], put)


def _put_array(part: np.ndarray[Any, Any], out: memoryview) -> None:
    np.copyto(np.ndarray(part.shape, part.dtype, buffer=out), part)


def _put_integers(part: torch.Tensor, out: memoryview) -> None:
    if part.device.type == "cpu":
        _put_array(part.numpy(), out)  # NumPy writes to memory of any alignment
    else:
        _put_array(part.contiguous().cpu().numpy(), out)


def _put_resolved(part: torch.Tensor, out: memoryview) -> None:
    plain = part.resolve_conj().resolve_neg().contiguous()
    _put_integers(as_integers(plain), out)
