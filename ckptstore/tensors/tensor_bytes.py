"""The bytes of tensors: dtypes by name, tensors over bytes, views of memory, sources of a save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ckptstore.errors import StateError, UnsupportedFeatureError
from ckptstore.format.dtypes import ITEM_BYTES, QUANTIZED_PER_BYTE
from ckptstore.format.paths import Path

_CPU: Final = torch.device("cpu")

_BY_NAME: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        name: dtype
        for name in (*ITEM_BYTES, *QUANTIZED_PER_BYTE)
        if isinstance(dtype := getattr(torch, name, None), torch.dtype)
    }
)
_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {dtype: name for name, dtype in _BY_NAME.items()}
)
# Integers of the same size: every device can copy them, unlike packed and bits types.
_INTEGERS: Final[Mapping[int, torch.dtype]] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
_JOINED: Final = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64}
"""Usual dtypes of small tensors; torch joins them bit by bit, unlike bools and packed types."""


def dtype_text(dtype: torch.dtype) -> str | None:
    """Return torch's name of a dtype without ``torch.``; None if the format does not know it."""
    return _NAMES.get(dtype)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises
    ------
    UnsupportedFeatureError
        The installed torch has no such dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        msg = f"torch {torch.__version__} has no dtype {name!r}"
        raise UnsupportedFeatureError(msg, hint="install a newer torch")
    return dtype


def offset_of(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor in its storage, in elements."""
    return int(tensor.storage_offset())


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a new tensor on `storage`, outside of autograd; `offset` and `strides` in elements."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, tuple(shape), tuple(strides))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of integers over the same memory, of the same sizes, outside of autograd.

    16-byte elements become two 8-byte ones in an extra last dimension.
    """
    item = tensor.element_size()
    storage, offset = tensor.untyped_storage(), offset_of(tensor)
    shape, strides = tuple(tensor.shape), tensor.stride()
    if item == 16:
        shape, strides = (*shape, 2), (*(2 * step for step in strides), 1)
        return tensor_over(storage, torch.int64, 2 * offset, shape, strides)
    return tensor_over(storage, _INTEGERS[item], offset, shape, strides)


class _Memory:
    """CPU memory for NumPy. ``Tensor.numpy`` would forbid for ever to resize a user's storage."""

    def __init__(self, owner: object, address: int, **about: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), **about}


def as_elements(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return the elements of a CPU tensor as opaque bytes, over the same memory, strides kept."""
    item = tensor.element_size()
    about = {"shape": (*tensor.shape,), "strides": (*[item * step for step in tensor.stride()],)}
    return np.asarray(_Memory(tensor, tensor.data_ptr(), typestr=f"|V{item}", **about))


def check_there(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Raise StateError unless a storage has so many bytes: it may have been freed."""
    if storage.nbytes() < nbytes:
        msg = f"its memory was freed: {storage.nbytes()} of {nbytes} bytes are left"
        raise StateError(msg, hint="FSDP frees memory between steps: gather the state before")


def memory_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> memoryview:
    """Return a writable view of bytes of CPU memory; it keeps the storage alive.

    Raises
    ------
    StateError
        As :func:`check_there`.
    """
    check_there(storage, start + nbytes)
    if not nbytes:
        return memoryview(bytearray())
    made = _Memory(storage, storage.data_ptr() + start, typestr="|u1", shape=(nbytes,))
    return memoryview(np.asarray(made))  # type: ignore[arg-type]


def extent_of(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first in memory to the last, both included."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


# --- sources of a save ----------------------------------------------------------------------------


class TensorPayload(Protocol):
    """The bytes of one tensor, dense, in stored order. Safe to read from several threads."""

    @property
    def device(self) -> torch.device:
        """Return the device that holds the bytes."""

    def view(self) -> memoryview | None:
        """Return the CPU memory itself, without a copy; None if it does not hold the bytes so."""

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write the bytes from `start` on into `out`, which must not reach past the end."""


class SourceTensor(msgspec.Struct, kw_only=True, eq=False):
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
    nbytes: int = 0
    """Bytes of the dense tensor; a save asks for them ten times."""

    def __post_init__(self) -> None:
        """Count the bytes."""
        self.nbytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]

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
    for device in {tensor.payload.device for tensor in tensors} - {_CPU}:
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
        self.dense = dense
        self.device: torch.device = tensor.device

    def flat(self) -> torch.Tensor:
        """Return the bytes of a dense tensor, ``uint8[nbytes]``, on its device."""
        tensor = self._tensor
        item = tensor.element_size()
        start, size = offset_of(tensor) * item, tensor.numel() * item
        return tensor_over(tensor.untyped_storage(), torch.uint8, start, (size,), (1,))

    def view(self) -> memoryview | None:
        """Return the memory of a dense tensor on the CPU."""
        tensor = self._tensor
        if not self.dense or not tensor.is_cpu:
            return None
        item = tensor.element_size()
        return memory_of(tensor.untyped_storage(), offset_of(tensor) * item, tensor.numel() * item)

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write a piece of the bytes into `out`."""
        if not len(out):
            return
        if self.dense:
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

    @staticmethod
    def copy_together(payloads: Sequence[TensorPayload], out: memoryview) -> bool:
        """Write tensors one after the other into `out`, by one call for all; return whether it did.

        It does so where all are row by row in host memory, and of one usual dtype.
        """
        tensors = [x._tensor for x in payloads if type(x) is TensorBytes and x._is_plain()]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(tensors) < len(payloads) or len(dtypes) > 1 or not dtypes <= _JOINED:
            return False
        with torch.no_grad():
            # A view of a tiny tensor takes longer than its copy.
            parts = [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
            count = sum([part.numel() for part in parts])
            torch.cat(parts, out=torch.frombuffer(out, dtype=dtypes.pop(), count=count))
        return True

    def _is_plain(self) -> bool:
        """Return whether its bytes lie row by row in host memory."""
        return self.dense and self._order is None and self._tensor.is_cpu


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
    head, tail = first * row - start, stop - last * row
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
        _put_array(as_elements(part), out)  # NumPy writes to memory of any alignment
    else:
        _put_array(part.contiguous().cpu().numpy(), out)


def _put_resolved(part: torch.Tensor, out: memoryview) -> None:
    _put_integers(as_integers(part.resolve_conj().resolve_neg().contiguous()), out)
