"""Memory for one tensor of a load: filled with its stored bytes, then a tensor on its device."""

from __future__ import annotations

from typing import Final

import torch

from ckptstore.errors import CorruptObjectError, LimitError
from ckptstore.format.blocks import Blocks, gather
from ckptstore.format.dtypes import ITEM_BYTES, bytes_of, strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.tensors.tensor_bytes import (
    as_integers,
    dtype_named,
    memory_of,
    offset_of,
    tensor_over,
)

_CPU: Final = torch.device("cpu")


class Destination:
    """Memory for one tensor. One thread at a time may finish it; several may write into `view`.

    Parameters
    ----------
    record
        Its dtype, shape and order; checked.
    device
        Device of the finished tensor; devices other than the CPU are reached through host memory
        (pinned for CUDA) of the tensor's size.
    into
        A tensor on `device`. On the CPU its memory has exactly the record's layout, which is not in
        blocks: bytes are decoded right into it. On others it gets the values from host memory.

    Raises
    ------
    LimitError
        The memory cannot be allocated.
    """

    def __init__(
        self, record: TensorRecord, device: torch.device = _CPU, into: torch.Tensor | None = None
    ) -> None:
        self._record, self._device, self._into = record, device, into
        self._done: torch.Tensor | None = None
        self.view: memoryview
        """Writable CPU memory for the tensor's bytes, in stored order."""
        if into is not None and into.is_cpu:
            self._storage, start = into.untyped_storage(), offset_of(into)
            self.view = memory_of(self._storage, start * into.element_size(), record.nbytes)
            return
        memory = _host_bytes(record.nbytes, pinned=device.type == "cuda")
        self._storage = memory.untyped_storage()
        self.view = memory_of(self._storage, 0, record.nbytes)

    def finish(self) -> torch.Tensor:
        """Return the tensor, moved to its device. `view` must have been filled.

        May be called again; the first call frees the host memory of other devices.
        """
        if self._done is None:
            into = self._into
            if into is not None and not into.is_cpu:
                as_integers(into).copy_(as_integers(self._tensor(_CPU)))
            self._done = self._tensor(self._device) if into is None else into
            del self.view, self._storage
        return self._done

    def _tensor(self, device: torch.device) -> torch.Tensor:
        record, storage = self._record, self._storage
        if record.blocks is not None:
            storage = _gathered(record, record.blocks, self.view)
        if device.type != "cpu":
            memory = tensor_over(storage, torch.uint8, 0, (record.nbytes,), (1,))
            storage = on_device(memory, device).untyped_storage()
        strides = strides_of(record.shape, record.order)
        return tensor_over(storage, dtype_named(record.dtype), 0, record.shape, strides)


def host_memory(nbytes: int) -> torch.UntypedStorage:
    """Return new memory of the CPU.

    Raises
    ------
    LimitError
        It cannot be allocated.
    """
    return _host_bytes(nbytes).untyped_storage()


def on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return bytes of the CPU on a device; the CPU's own stay where they are.

    Raises
    ------
    LimitError
        The device has no room.
    """
    try:
        return memory.to(device)
    except torch.OutOfMemoryError as error:
        msg = f"no memory on {device} for a tensor of {memory.nbytes} bytes"
        raise LimitError(msg, hint='map_location="cpu" loads into host memory') from error


def _host_bytes(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=_CPU, pin_memory=pinned)
    except RuntimeError as error:
        raise LimitError(f"no memory for a tensor of {nbytes} bytes") from error


def _gathered(record: TensorRecord, blocks: Blocks, stored: memoryview) -> torch.UntypedStorage:
    """Return new memory with a tensor's bytes row by row, gathered from its blocks."""
    storage = host_memory(record.nbytes)
    out = memory_of(storage, 0, record.nbytes)
    gather(blocks, record.shape, ITEM_BYTES[record.dtype], stored, out)
    return storage


def check_record(record: TensorRecord) -> None:
    """Refuse a record whose size or order is not one of its dtype and shape.

    Raises
    ------
    CorruptObjectError
        They do not fit.
    """
    if bytes_of(record.dtype, record.shape) != record.nbytes:
        msg = f"a record of {record.dtype}{list(record.shape)} has {record.nbytes} bytes"
        raise CorruptObjectError(msg)
    if record.order is not None and sorted(record.order) != list(range(len(record.shape))):
        raise CorruptObjectError(f"{record.order!r} is not an order of {len(record.shape)} dims")
