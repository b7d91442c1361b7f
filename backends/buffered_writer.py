"""A writer for storage that takes an object in one request: collects it, then sends it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from ckptstore.backends.base import Buffer, ObjectWriter, parts_of


class Body(io.BytesIO):
    """Bytes to send, which an HTTP library may read but not close: they may be sent again."""

    def close(self) -> None:
        """Do nothing; the memory is freed with the last reference."""


class BufferedWriter(ObjectWriter):
    """Holds the whole object in memory and passes it to `send` on commit.

    A commit that raised ``TransientStorageError`` may be called again.
    """

    def __init__(self, send: Callable[[Body], None], *, reserve_bytes: int = 0) -> None:
        self._send = send
        self._body: Body | None = Body()
        self._body.write(bytes(reserve_bytes))

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Append to the memory."""
        if self._body is None:
            raise ValueError("this writer is finished")
        for part in parts_of(data):
            self._body.write(part)

    def commit(self) -> None:
        """Send the object, and release the memory."""
        if self._body is not None:
            self._send(self._body)
            self._body = None

    def abort(self) -> None:
        """Release the memory."""
        self._body = None
