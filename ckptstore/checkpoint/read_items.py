"""Ranges of tensors in pieces: which pieces hold them, and what is done with each. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.derived_decode import Following
from ckptstore.format.manifest import Manifest
from ckptstore.objects.plan import Want

__all__ = ["Ends", "Part", "Range"]


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Ends:
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


class Part:
    """Some consecutive bytes of a tensor in pieces, to be read together with others."""

    def __init__(
        self,
        content: Content,
        ends: Ends,
        part: Range,
        label: str,
        following: Sequence[Following] = (),
    ) -> None:
        manifest = content.manifest
        index, start, nbytes, out = part.index, part.start, part.nbytes, part.out
        self.wants: list[Want] = []
        """What must be read for them; whole pieces, some into memory of their own."""
        self.edge_bytes = 0
        """Memory of pieces of which only a part is wanted."""
        self._edges: list[tuple[memoryview, int]] = []
        self._start, self._out = start, out
        if not nbytes:
            return
        end = start + nbytes
        base, stops = manifest.first[index], ends.of(index)
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
            self.wants.append(Want(row=base + piece, out=memory, label=label, then=then))
            at = stop

    def finish(self) -> None:
        """Bring what was read to where it goes; every want must have been read."""
        for memory, at in self._edges:
            assert self._out is not None  # noqa: S101  # for the type checker: edges go somewhere
            low = max(at, self._start)
            high = min(at + len(memory), self._start + len(self._out))
            self._out[low - self._start : high - self._start] = memory[low - at : high - at]
        self._edges.clear()
