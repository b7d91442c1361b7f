"""Tensors of a version as something to write again: read from the store when asked for. No torch.

A tensor that is to be rounded is read several times: to look at it, to measure, to write. Small
ones are kept in memory from the first time on, until they are let go; of large ones a few windows
are kept, since they are read from the beginning to the end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, piece_ends, read_ranges
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.repo import Repo

# Windows of a large tensor that are kept. Source: a writer has one thread or two, and each reads on
# where it was.
_WINDOWS: Final = 3


class StoredBytes:
    """The bytes that a load of one tensor gives back. Safe to read from several threads.

    Parameters
    ----------
    window_bytes
        How much is read at once, and kept: the whole tensor if it is not larger. It ends where a
        piece ends, so that no piece is read twice; so it is a piece at least.
    """

    def __init__(self, repo: Repo, content: Content, index: int, *, window_bytes: int) -> None:
        self._repo, self._content, self._index = repo, content, index
        self._nbytes = content.manifest.tensors[index].nbytes
        self._bounds = self._cut(window_bytes)
        # No lru_cache: a method in it keeps its object until the collector runs, with the windows.
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def _cut(self, window_bytes: int) -> list[int]:
        """Return where the windows begin, in bytes, and where the last one ends."""
        item = ITEM_BYTES[self._content.manifest.tensors[self._index].dtype]
        bounds = [0]
        last = 0
        for end in piece_ends(self._content.manifest, self._index).tolist():
            if end * item - bounds[-1] > window_bytes and last > bounds[-1]:
                bounds.append(last)
            last = end * item
        return [*bounds, last] if last else bounds

    def view(self) -> memoryview | None:
        """Return the bytes of a tensor that is one window; None for others."""
        return self._window(0) if len(self._bounds) == 2 else None

    def copy_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises
        ------
        CorruptTensorError
            A piece that is needed is damaged; names the tensor.
        StorageError
            The storage failed.
        """
        for place, (low, high) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            first, last = max(start, low), min(start + len(out), high)
            if first < last:
                window = self._window(place)
                out[first - start : last - start] = window[first - low : last - low]

    def _window(self, place: int) -> memoryview:
        with self._lock:
            found = self._kept.get(place)
            if found is None:
                while len(self._kept) >= _WINDOWS:  # before the next one takes memory
                    self._kept.popitem(last=False)
                found = self._kept[place] = self._read(place)
            self._kept.move_to_end(place)
            return found

    def _read(self, place: int) -> memoryview:
        low, high = self._bounds[place], self._bounds[place + 1]
        out = memoryview(bytearray(high - low))
        one = Range(index=self._index, start=low, nbytes=high - low, out=out)
        repo = self._repo
        read_ranges(self._content, [one], backend=repo.backend, options=repo.options)
        return out
