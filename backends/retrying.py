"""Retries failures that the backend calls transient, with exponential back-off and full jitter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer, ObjectInfo, ObjectWriter
from ckptstore.backends.cold import ColdStorage, ObjectState
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import TransientStorageError

T = TypeVar("T")


class Retries:
    """Number of tries and the waits in between: full jitter over a doubling bound."""

    def __init__(
        self,
        *,
        environment: Environment,
        tries: int = limits.RETRY_TRIES,
        base_s: float = limits.RETRY_BASE_S,
        cap_s: float = limits.RETRY_CAP_S,
    ) -> None:
        self._environment = environment
        self._tries = tries
        self._base_s = base_s
        self._cap_s = cap_s

    def call(self, function: Callable[[], T]) -> T:
        """Return ``function()``, called again after each TransientStorageError.

        Raises
        ------
        TransientStorageError
            The last try failed too.
        """
        for failed in range(self._tries - 1):
            try:
                return function()
            except TransientStorageError:
                self.wait(failed)
        try:
            return function()
        except TransientStorageError as error:
            msg = f"{error.message} (tried {self._tries} times)"
            raise TransientStorageError(msg, hint=error.hint) from error

    def wait(self, failed: int) -> None:
        """Wait after the try number `failed`, counted from 0."""
        bound = min(self._cap_s, self._base_s * 2**failed)
        self._environment.sleep(bound * self._environment.jitter())


class RetryingBackend(WrapperBackend):
    """Retries every call.

    A ``put_if_absent`` that failed transiently may have succeeded all the same; the second try
    then finds the object of the first and raises ``ObjectExistsError``, as the contract says: the
    caller reads back to find out whose it is. ``AmbiguousWriteError`` is not retried.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        environment: Environment = SYSTEM,
        tries: int = limits.RETRY_TRIES,
        base_s: float = limits.RETRY_BASE_S,
        cap_s: float = limits.RETRY_CAP_S,
    ) -> None:
        super().__init__(inner)
        self._retries = Retries(environment=environment, tries=tries, base_s=base_s, cap_s=cap_s)

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object."""
        self._retries.call(lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object; see the class."""
        self._retries.call(lambda: self.inner.put_if_absent(key, data))

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer whose commit is retried."""
        writer = self._retries.call(lambda: self.inner.open_writer(key))
        return _RetryingWriter(writer, self._retries)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        return self._retries.call(lambda: self.inner.get(key, bytes_max=bytes_max))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`; a retry begins with the first of them again."""
        self._retries.call(lambda: self.inner.read_into(key, offset, buffers))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects; a retry continues after the last one that was yielded."""
        pages = _Listing(self.inner, prefix, after)
        while True:
            info = self._retries.call(pages.next)
            if info is None:
                return
            yield info

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of one object."""
        return self._retries.call(lambda: self.inner.stat(key))

    def delete(self, key: str) -> None:
        """Remove one object."""
        self._retries.call(lambda: self.inner.delete(key))

    def cold_storage(self) -> ColdStorage | None:
        """Return access to the storage's classes, each call of it retried."""
        cold = self.inner.cold_storage()
        return None if cold is None else _RetryingCold(cold, self._retries)


class _Listing:
    """A listing that continues after a failure."""

    def __init__(self, inner: Backend, prefix: str, after: str) -> None:
        self._inner = inner
        self._prefix = prefix
        self._after = after
        self._infos: Iterator[ObjectInfo] | None = None

    def next(self) -> ObjectInfo | None:
        """Return the next object, or None at the end."""
        if self._infos is None:
            self._infos = self._inner.list(self._prefix, after=self._after)
        try:
            info = next(self._infos, None)
        except TransientStorageError:
            self._infos = None  # a generator that raised is finished
            raise
        if info is not None:
            self._after = info.key
        return info


class _RetryingWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, retries: Retries) -> None:
        super().__init__(inner)
        self._retries = retries

    def commit(self) -> None:
        self._retries.call(self.inner.commit)


class _RetryingCold:
    """Retries every call; each may be repeated with the same outcome."""

    def __init__(self, inner: ColdStorage, retries: Retries) -> None:
        self._inner = inner
        self._retries = retries

    @property
    def classes(self) -> tuple[str, ...]:
        return self._inner.classes

    def class_of(self, key: str) -> str:
        return self._retries.call(lambda: self._inner.class_of(key))

    def set_class(self, key: str, name: str) -> bool:
        return self._retries.call(lambda: self._inner.set_class(key, name))

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        return self._retries.call(lambda: self._inner.request_restore(key, days=days, tier=tier))

    def restore_state(self, key: str) -> ObjectState:
        return self._retries.call(lambda: self._inner.restore_state(key))
