"""Streaming a large object into a temporary file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ckptstore.backends.base import Buffer, ObjectWriter
from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import publish

if TYPE_CHECKING:
    from ckptstore.backends.posix import PosixBackend

__all__ = ["PosixWriter"]

_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")


class PosixWriter(ObjectWriter):
    """Writes to a temporary file as the bytes come."""

    def __init__(self, backend: PosixBackend, key: str, *, direct: bool) -> None:
        self._backend = backend
        self._key = key
        self._direct = direct
        self._size = 0
        self._temp = backend.open_temp(key)

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append."""
        parts = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            while left:
                count = os.writev(self._temp.descriptor, left[:_IOV_MAX])
                self._size += count
                while left and count >= left[0].nbytes:
                    count -= left.pop(0).nbytes
                if count:
                    left[0] = left[0][count:]
        except OSError as error:
            raise translate(error, f"write {self._key}") from error

    def commit(self) -> None:
        """Make it durable and visible."""
        try:
            self._temp.finish(self._size)
        except OSError as error:
            self._temp.discard()
            raise translate(error, f"write {self._key}") from error
        publish(self._temp.path, self._backend.path_of(self._key), f"create {self._key}")

    def abort(self) -> None:
        """Remove the temporary file."""
        self._temp.discard()
