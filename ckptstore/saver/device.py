"""From CUDA memory into an arena, on a stream of its own, without holding up the training."""

from __future__ import annotations

from typing import Final

import torch

from ckptstore.errors import CkptStoreError
from ckptstore.saver.arena import Arena
from ckptstore.tensors.tensor_bytes import SourceTensor, TensorBytes

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for all devices. Source: the CUDA runtime's driver_types.h."""
_streams: dict[torch.device, torch.cuda.Stream] = {}


def on_device(source: SourceTensor) -> bool:
    """Return whether a tensor can be copied by a stream of its device as it is."""
    payload = source.payload
    return isinstance(payload, TensorBytes) and payload.device.type == "cuda" and payload.dense


class DeviceCopies:
    """The copies of one state from CUDA devices into an arena, which is pinned for them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._parts: list[tuple[torch.Tensor, int]] = []
        self._events: list[torch.cuda.Event] = []
        self.places: list[int] = []
        """Places of the tensors in their state."""

    def add(self, place: int, source: SourceTensor, offset: int) -> None:
        """Take a tensor; it is not looked at before :meth:`start`."""
        assert isinstance(source.payload, TensorBytes)  # noqa: S101 - see on_device
        self._parts.append((source.payload.flat(), offset))
        self.places.append(place)

    def start(self) -> None:
        """Queue all copies behind what the calling thread has queued; returns at once."""
        if not self._parts:
            return
        _pin(self._arena)
        for device in {tensor.device for tensor, _ in self._parts}:
            stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for tensor, offset in self._parts:
                    if tensor.device == device and len(tensor):
                        memory = self._arena.view[offset : offset + len(tensor)]
                        target = torch.frombuffer(memory, dtype=torch.uint8)
                        target.copy_(tensor, non_blocking=True)
                self._events.append(stream.record_event())

    def wait(self) -> None:
        """Return when everything has been copied. The tensors are held until then."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        self._parts.clear()


def _pin(arena: Arena) -> None:
    """Pin an arena, once: only then does a copy from a device go on by itself."""
    if arena.unpin is not None:
        return
    address = torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, arena.size_bytes, _PORTABLE)
    if int(status):
        msg = f"{arena.size_bytes} bytes of staging memory cannot be pinned: CUDA error {status}"
        raise CkptStoreError(msg, hint="raise the limit of locked memory: ulimit -l")

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    arena.unpin = unpin
