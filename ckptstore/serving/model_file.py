"""A file of a version's folder as a stream, for clients that read files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

from ckptstore.objects.joining import Growing
from ckptstore.serving.model_folder import ModelFolder
from ckptstore.serving.serving_limits import WINDOW_BYTES


def opened_file(folder: ModelFolder, name: str, sent: Callable[[int], object]) -> io.BufferedReader:
    """Return a file of a folder as a stream that can seek; each byte is checked before it is read.

    A stream is for one thread.
    """
    return io.BufferedReader(_File(folder, name, sent), WINDOW_BYTES)


class _File(io.RawIOBase):
    """Reads ahead from where it stands; a seek begins anew."""

    def __init__(self, folder: ModelFolder, name: str, sent: Callable[[int], object]) -> None:
        super().__init__()
        self._folder = folder
        self.name = name
        self._size = folder.file(name).nbytes
        self._sent = sent
        self._at = 0
        self._room = Growing()
        self._left = memoryview(b"")
        self._stream: Iterator[memoryview] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if place != self._at:
            self._at, self._left, self._stream = max(0, place), memoryview(b""), None
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        if not self._left:
            if self._stream is None:
                windows = self._folder.stream(self.name).windows(self._at, self._size)
                self._stream = (part for window in windows for part in window(self._room))
            self._left = next(self._stream, memoryview(b""))
        out = memoryview(buffer).cast("B")
        count = min(len(out), len(self._left))
        out[:count] = self._left[:count]
        self._left = self._left[count:]
        self._at += count
        self._sent(count)
        return count
