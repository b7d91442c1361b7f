"""Tensors of other libraries in a state: JAX's, and those of files that are read late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.tensors.tensor_bytes import TensorPayload

KEY_IMPL: Final = "prng_impl"
KEY_DATA: Final = "key_data"
"""Keys of the dict that a typed PRNG key of JAX is stored as: its implementation and its bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignTensor:
    """A tensor of another library in a state; it is stored as a tensor of torch would be."""

    dtype: str
    """Name of the element type, the same in torch, NumPy and ml_dtypes."""
    shape: tuple[int, ...]
    payload: TensorPayload
    """Its bytes, row by row. No counter tells that they change: a background save copies them
    before its call returns."""


class LateBytes:
    """An array that is read when its first bytes are asked for, and let go with its last.

    A save then holds a few of them at a time, though its state has all.

    Parameters
    ----------
    read
        Returns the array, with the same bytes each time.
    """

    device = torch.device("cpu")

    def __init__(self, read: Callable[[], npt.NDArray[Any]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._data: memoryview | None = None
        self._left = 0

    def view(self) -> None:
        """Return None: the bytes are not in memory."""

    def copy_into(self, start: int, out: memoryview) -> None:
        """Write a piece of the bytes into `out`."""
        with self._lock:
            data = self._data
            if data is None:
                data = np.ascontiguousarray(self._read()).reshape(-1).view(np.uint8).data
                self._data, self._left = data, len(data)
            self._left -= len(out)
            if self._left <= 0:
                self._data = None
        out[:] = data[start : start + len(out)]
