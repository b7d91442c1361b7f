"""From the caller's tensors into an arena: one copy, by all threads; the digests come after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore import limits
from ckptstore.chunking import cut, in_batches, piece_bytes
from ckptstore.errors import CkptStoreError, TornStateError
from ckptstore.format.paths import path_text
from ckptstore.hashing import xxh3_64
from ckptstore.prefault import prefault
from ckptstore.saver.arena import ALIGN_BYTES, Arena, Digests, StagedTensor
from ckptstore.tensors.tensor_bytes import SourceTensor, TensorBytes, settle

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

    def add(self, source: SourceTensor, offset: int) -> None:
        """Take a tensor; it is not looked at before :meth:`start`."""
        assert isinstance(source.payload, TensorBytes)  # noqa: S101 - see on_device
        self._parts.append((source.payload.flat(), offset))

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


def counted(source: SourceTensor) -> bool:
    """Return whether torch counts the changes of a tensor; of NumPy's arrays nobody does."""
    return bool(source.watched) and not any(one.is_inference() for one in source.watched)


class ChangeDetector:
    """Notes what a state is at this moment.

    Parameters
    ----------
    samples
        Look at some bytes too, no more than 64 a tensor: for a state that is not staged at once.
    """

    def __init__(self, sources: Sequence[SourceTensor], *, samples: bool) -> None:
        self._sources = sources
        self._counters = [_counters(source) for source in sources]
        self._samples = [_sample_of(source) if samples else None for source in sources]

    def check(self, memory: memoryview, offsets: Sequence[int]) -> None:
        """Compare with what was staged since.

        Parameters
        ----------
        memory
            Where the state was copied to.
        offsets
            Of each tensor in it.

        Raises
        ------
        TornStateError
            A tensor was changed meanwhile; it is named.
        """
        parts = zip(self._sources, self._counters, self._samples, offsets, strict=True)
        for source, counters, sample, offset in parts:
            same = counters == _counters(source)
            if same and sample is not None:
                same = sample == _sample(memory[offset : offset + source.nbytes])
            if not same:
                name = path_text(source.paths[0])
                msg = f"{name!r} was changed while it was being staged; nothing was saved"
                hint = "call wait_staged() before optimizer.step(), and save from one thread"
                raise TornStateError(msg, hint=hint)


def _counters(source: SourceTensor) -> tuple[int, ...]:
    return tuple(one._version for one in source.watched if not one.is_inference())


def _sample_of(source: SourceTensor) -> bytes | None:
    view = source.payload.view()
    return None if view is None else _sample(view)


def _sample(view: memoryview) -> bytes:
    """Return some bytes at the beginning, the end and between."""
    last = max(0, len(view) - limits.WITNESS_BYTES)
    steps = limits.WITNESS_PLACES - 1
    places = [last * step // steps for step in range(limits.WITNESS_PLACES)]
    return b"".join([view[place : place + limits.WITNESS_BYTES] for place in places])


# A thread takes about so many bytes at once. Source: many small tensors must not cost a lock
# each; a thousandth of what a thread copies in a second.
_BATCH_BYTES: Final = 4 * limits.MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Where each tensor of a state lies in an arena."""

    tensors: tuple[StagedTensor, ...]
    size_bytes: int
    """Of the whole."""


def lay_out(sources: Sequence[SourceTensor], chunk_bytes: int) -> ArenaLayout:
    """Place tensors one after the other; small ones are one piece, as a save cuts them."""
    tensors: list[StagedTensor] = []
    end = 0
    for source in sources:
        size = source.nbytes
        if size >= limits.SMALL_TENSOR_BYTES:
            piece = piece_bytes(source.row_bytes, source.itemsize, chunk_bytes)
        else:
            piece = max(1, size)
        tensor = StagedTensor(
            name=path_text(source.paths[0]),
            dtype=source.dtype,
            nbytes=size,
            itemsize=source.itemsize,
            row_bytes=source.row_bytes,
            offset=end,
            piece_bytes=piece,
        )
        tensors.append(tensor)
        end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return ArenaLayout(tensors=tuple(tensors), size_bytes=end)


class Staging:
    """One state on its way into an arena. It lets go of the caller's tensors when it is there.

    The calls, in this order: the constructor and :meth:`begin` by the caller of the save;
    :meth:`copy` and :meth:`settle`, in any one thread; then :meth:`digests`, once.

    Parameters
    ----------
    later
        :meth:`copy` is called after the caller went on with the training.
    """

    def __init__(
        self, sources: Sequence[SourceTensor], layout: ArenaLayout, arena: Arena, *, later: bool
    ) -> None:
        self._sources, self._later, self._memory = sources, later, arena.view
        self.tensors: tuple[StagedTensor, ...] = layout.tensors
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(arena.view, np.uint8)
        self._changes: ChangeDetector | None = ChangeDetector(sources, samples=later)
        self._device = DeviceCopies(arena)
        self._left: list[int] = []

    def begin(self) -> None:
        """Queue the copies from devices, and copy what could change without being noticed."""
        now: list[int] = []
        for place, source in enumerate(self._sources):
            if on_device(source):
                self._device.add(source, self.tensors[place].offset)
            elif self._later and not counted(source):
                now.append(place)
            else:
                self._left.append(place)
        settle(source for source in self._sources if not on_device(source))
        self.copy(places=now)
        self._device.start()

    def copy(
        self,
        helpers: Executor | None = None,
        helpers_count: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        places: Sequence[int] | None = None,
    ) -> None:
        """Copy the rest, or the tensors at `places`; small ones together.

        Parameters
        ----------
        helpers
            Where `helpers_count` further threads come from, if any.
        meanwhile
            Called while these copy; then this thread copies too.
        """
        pieces = (
            (place, *part)
            for place in (self._left if places is None else places)
            for part in cut(self.tensors[place].nbytes, _BATCH_BYTES)
        )
        parts = in_batches(pieces, itemgetter(2), _BATCH_BYTES)
        taking = threading.Lock()

        def step() -> bool:
            """Copy a batch; return whether there was one."""
            with taking:
                batch = next(parts, None)
            for place, start, size in batch or ():
                self._copy_part(place, start, size)
            return batch is not None

        def work() -> None:
            while step():
                pass

        futures = [helpers.submit(work) for _ in range(helpers_count)] if helpers else []
        try:
            step()  # leaves the interpreter to the helpers: they begin too
            meanwhile()
            work()
        finally:
            wait(futures)  # all of them: the arena may be given back then
        for future in futures:
            future.result()

    def drain(self) -> None:
        """Wait for the copies from devices, after a failure."""
        with suppress(RuntimeError):  # a device that fails copies no more
            self._device.wait()

    def settle(self) -> None:
        """Wait for the copies from devices; then the caller may change the state.

        Raises
        ------
        TornStateError
            It was changed already; the tensor is named.
        """
        self._device.wait()
        assert self._changes is not None  # noqa: S101 - called once
        self._changes.check(self._memory, [one.offset for one in self.tensors])
        self._changes, self._sources = None, ()

    def digests(self) -> Digests:
        """Return the digests of what is in the arena now."""
        found = []
        for one in self.tensors:
            data = self._memory[one.offset : one.offset + one.nbytes]
            pieces = cut(one.nbytes, one.piece_bytes)
            found.append([xxh3_64(data[at : at + size]) for at, size in pieces])
        return found

    def _copy_part(self, place: int, start: int, size: int) -> None:
        at = self.tensors[place].offset + start
        target = self._bytes[at : at + size]
        prefault(target.data)
        source = self._sources[place]
        view = source.payload.view()
        if view is None:
            source.payload.copy_into(start, target.data)
        else:
            np.copyto(target, np.frombuffer(view[start : start + size], np.uint8))
