"""The bytes of tensors: dtypes by name, tensors over given bytes, and views of their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.errors import UnsupportedFeatureError
from ckptstore.format.dtypes import ITEM_BYTES, QUANTIZED_PER_BYTE

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
        raise UnsupportedFeatureError(
            f"torch {torch.__version__} has no dtype {name!r}", hint="install a newer torch"
        )
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


def as_elements(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return the elements of a CPU tensor as opaque bytes, over the same memory, strides kept."""
    integers: npt.NDArray[Any] = as_integers(tensor).numpy()
    if tensor.element_size() == 16:
        return integers.view(np.dtype("V16"))[..., 0]
    return integers.view(np.dtype(f"V{tensor.element_size()}"))


def memory_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> memoryview:
    """Return a writable view of bytes of CPU memory; it keeps the storage alive."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview(tensor_over(storage, torch.uint8, start, (nbytes,), (1,)).numpy())  # type: ignore[arg-type]
