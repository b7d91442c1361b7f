"""A backend that can be stopped: from then on it refuses every call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ckptstore.backends.base import Backend, Buffer, ObjectInfo, ObjectWriter
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter
from ckptstore.errors import OperationCancelledError


class StoppableBackend(WrapperBackend):
    """Passes calls on until it is stopped; then each raises OperationCancelledError.

    Calls under way are not interrupted; later ones are refused. Any thread may stop it.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Refuse every call from now on, except deleting, aborting and closing."""
        self._stopped.set()

    def check(self) -> None:
        """Raise OperationCancelledError if the backend was stopped."""
        if self._stopped.is_set():
            msg = f"the operation on {self.url} was stopped"
            raise OperationCancelledError(msg)

    def put(self, key: str, data: Buffer) -> None:
        """Pass on."""
        self.check()
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Pass on."""
        self.check()
        self.inner.put_if_absent(key, data)

    def open_writer(self, key: str) -> ObjectWriter:
        """Pass on."""
        self.check()
        return _StoppableWriter(self.inner.open_writer(key), self)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Pass on."""
        self.check()
        return self.inner.get(key, bytes_max=bytes_max)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Pass on."""
        self.check()
        self.inner.read_into(key, offset, buffers)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        self.check()
        return self.inner.list(prefix, after=after)

    def stat(self, key: str) -> ObjectInfo:
        """Pass on."""
        self.check()
        return self.inner.stat(key)


class _StoppableWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, backend: StoppableBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        self._backend.check()
        self.inner.write(data)

    def commit(self) -> None:
        self._backend.check()
        self.inner.commit()
