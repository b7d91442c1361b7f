"""Host memory for staged states: reused, shared with a child process, never beyond a budget."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptstore import limits
from ckptstore.byte_copies import copy_bytes
from ckptstore.errors import LimitError, TornStateError
from ckptstore.hashing import xxh3_64
from ckptstore.objects.sources import Payload, PieceSource

ALIGN_BYTES: Final = 64
"""Each tensor begins at a multiple of this in an arena. Source: a cache line."""
# Source: linux/mman.h (4.14); the module mmap has no name for it.
_MADV_WIPEONFORK: Final = 18
# Arenas are multiples of this. Source: the size of a huge page on x86-64 and arm64.
_ROUND_BYTES: Final = 2 * limits.MIB
_numbers = itertools.count(1)


class Arena:
    """One run of memory that a state is staged into; a fork copies none of it.

    The address range stays taken in a forked child, which may end its mapping at any time: were it
    free there, the child would find its own memory in it, and lose that with the mapping.

    Parameters
    ----------
    size_bytes
        A multiple of the page size.
    shared
        Another process can map it, by :attr:`fd`.
    """

    def __init__(self, size_bytes: int, *, shared: bool) -> None:
        self.number: int = next(_numbers)
        self.size_bytes = size_bytes
        self.fd: int = -1
        try:
            self._map = self._shared(size_bytes) if shared else _private(size_bytes)
        except OSError as error:
            msg = f"{size_bytes} bytes of staging memory cannot be had: {error.strerror}"
            hint = "see ulimit -v, and for the process engine -f"
            raise LimitError(msg, hint=hint) from error
        self._pid = os.getpid()
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if sys.platform == "linux" and not shared:  # shared memory is never copied
            with contextlib.suppress(OSError):  # an old kernel: pages are copied when written
                self._map.madvise(_MADV_WIPEONFORK)
        self.view: memoryview = memoryview(self._map)
        """All of it, writable."""
        self.unpin: Callable[[], None] | None = None
        """Ends the pinning of the memory; None if it is not pinned."""

    def _shared(self, size_bytes: int) -> mmap.mmap:
        self.fd = os.memfd_create("ckptstore-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size_bytes)
            return mmap.mmap(self.fd, size_bytes)
        except OSError:
            os.close(self.fd)
            raise

    def drop(self) -> None:
        """Give the memory back, once nobody looks at it any more; idempotent."""
        if self._pid == os.getpid():  # a forked child has no pinned memory
            if self.unpin is not None:
                self.unpin()
            # Frees the pages even where they are still mapped; later reads find zeros.
            advice = getattr(mmap, "MADV_DONTNEED" if self.fd < 0 else "MADV_REMOVE", None)
            if advice is not None:
                with contextlib.suppress(OSError):  # locked: they go with the mapping
                    self._map.madvise(advice)
        self.unpin = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.view = memoryview(b"")  # the map goes with its last view


def _private(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class ArenaPool:
    """Lends arenas, and never holds more bytes than its budget. Any thread may use it.

    Parameters
    ----------
    budget_bytes
        Of all arenas together, lent and idle.
    arenas_max
        How many are kept.
    shared
        See :class:`Arena`.
    """

    def __init__(self, budget_bytes: int, *, arenas_max: int, shared: bool) -> None:
        self.budget_bytes = budget_bytes
        self._arenas_max = arenas_max
        self._shared = shared
        self._idle: list[Arena] = []
        self._lent: dict[int, Arena] = {}
        self._dropped: list[int] = []
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return self._size()

    def lend(self, size_bytes: int) -> Arena | None:
        """Return an arena of at least this size; None while others hold too much of the budget.

        Raises
        ------
        LimitError
            It is more than the whole budget.
        """
        wanted = max(_ROUND_BYTES, -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
        budget = self.budget_bytes
        if size_bytes > budget:
            msg = f"the state takes {size_bytes} bytes to stage, more than the budget of {budget}"
            raise LimitError(msg, hint="open the store with a larger staging_bytes, or use save")
        wanted = min(wanted, max(size_bytes, budget // mmap.PAGESIZE * mmap.PAGESIZE))
        with self._lock:
            fitting = [arena for arena in self._idle if arena.size_bytes >= size_bytes]
            if fitting:
                arena = min(fitting, key=lambda one: one.size_bytes)
                self._idle.remove(arena)
            else:
                self._make_room(wanted)
                if self._size() + wanted > budget:
                    return None
                arena = Arena(wanted, shared=self._shared)
            self._lent[arena.number] = arena
            return arena

    def give_back(self, arena: Arena) -> None:
        """Take an arena back that was lent; what is in it is forgotten."""
        with self._lock:
            if self._lent.pop(arena.number, None) is not None:
                self._idle.append(arena)

    def dropped(self) -> list[int]:
        """Return the numbers of the arenas that were given up since the last call."""
        with self._lock:
            found, self._dropped = self._dropped, []
            return found

    def close(self) -> None:
        """Give up all idle memory."""
        with self._lock:
            while self._idle:
                self._drop(self._idle[0])

    def _make_room(self, wanted: int) -> None:
        """Give up idle arenas, none of which is large enough, as far as there is need to."""
        self._idle.sort(key=lambda arena: arena.size_bytes)
        while self._idle:
            count = len(self._idle) + len(self._lent)
            if count < self._arenas_max and self._size() + wanted <= self.budget_bytes:
                return
            self._drop(self._idle[0])

    def _drop(self, arena: Arena) -> None:
        self._idle.remove(arena)
        self._dropped.append(arena.number)
        arena.drop()

    def _size(self) -> int:
        return sum(arena.size_bytes for arena in (*self._idle, *self._lent.values()))


Digests = Sequence[Sequence[int]]
"""Per tensor: XXH3-64 of each of its pieces, taken right after it was staged."""


class StagedTensor(NamedTuple):
    """Where one tensor lies in an arena. A tuple: thousands of them are pickled in the call."""

    name: str
    """The path that errors name it by."""
    dtype: str
    nbytes: int
    itemsize: int
    row_bytes: int
    offset: int
    """Of its first byte in the arena."""
    piece_bytes: int
    """Length of its pieces, in bytes."""


@dataclass(eq=False, repr=False, slots=True)
class StagedBytes:
    """The bytes of a staged tensor; each piece is compared with its digest as it is read."""

    _memory: memoryview
    _tensor: StagedTensor
    _digests: Sequence[int] | None
    _check: Callable[[], None]

    @property
    def piece_bytes(self) -> int:
        """Return the length of its pieces."""
        return self._tensor.piece_bytes

    def unguarded(self) -> Payload:
        """Return the same bytes for any range; what is made of them is compared by its maker."""
        return _Unguarded(self._memory, self._check)

    def view(self) -> memoryview | None:
        """Return None: the bytes are copied first and compared then, so that they stay still."""
        return None

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the piece that begins at `start`.

        Raises
        ------
        TornStateError
            The bytes are not what was staged.
        OperationCancelledError
            The save was cancelled.
        """
        self._check()
        copy_bytes(out, self._memory[start : start + len(out)])
        digests = self._digests
        if digests is not None and xxh3_64(out) != digests[start // self._tensor.piece_bytes]:
            msg = f"{self._tensor.name!r} was changed in memory after it had been staged"
            hint = "nothing was saved; save again, and look for what writes to memory it has freed"
            raise TornStateError(msg, hint=hint)


class _Unguarded:
    """The bytes of a staged tensor, as they are."""

    def __init__(self, memory: memoryview, check: Callable[[], None]) -> None:
        self._memory = memory
        self._check = check

    def view(self) -> memoryview | None:
        self._check()
        return self._memory

    def copy_into(self, start: int, out: memoryview) -> None:
        self._check()
        out[:] = self._memory[start : start + len(out)]


def sources_in(
    memory: memoryview,
    tensors: Sequence[StagedTensor],
    digests: Digests | None,
    check: Callable[[], None],
) -> list[PieceSource]:
    """Return the staged tensors of an arena as sources of a save.

    Parameters
    ----------
    digests
        None if nobody lived to take them: then nothing is compared.
    check
        Called before each piece is read; what it raises ends the save.
    """
    sources = []
    for at, tensor in enumerate(tensors):
        part = memory[tensor.offset : tensor.offset + tensor.nbytes]
        source = PieceSource(
            nbytes=tensor.nbytes,
            dtype=tensor.dtype,
            itemsize=tensor.itemsize,
            row_bytes=tensor.row_bytes,
            payload=StagedBytes(part, tensor, None if digests is None else digests[at], check),
        )
        sources.append(source)
    return sources
