"""Retries failures that the backend calls transient, with exponential back-off and full jitter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Final, TypeVar

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.storage_classes import ColdStorage, ObjectState
from ckptstore.backends.transfers import Recorder
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import SYSTEM, Environment
from ckptstore.errors import TransientStorageError

T = TypeVar("T")
giving_up: ContextVar[Callable[[], bool] | None] = ContextVar("giving_up", default=None)
"""Says whether nobody waits for the calls of this context any more: then none is sent again."""
_AWAY: Final = "the storage is away or busy: check its address and the network, then try again"


class RetryingBackend(WrapperBackend):
    """Retries every call, of a writer only the commit; waits with full jitter in between.

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
        self._own = None if inner.transfers else PerProcess(Recorder)
        self.transfers = inner.transfers or self._own
        self._environment, self._tries = environment, tries
        self._base_s, self._cap_s = base_s, cap_s

    def around(self, call: str, key: str, action: Callable[[], T], size_bytes: int = 0) -> T:
        """Return ``action()``, called again where that can help."""
        if self._own is not None:
            action = partial(_counted, self._own.get(), call, action, size_bytes)
        return action() if call == "writer.write" else self.retry(action)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects; a retry continues after the last one that was yielded."""
        infos: Iterator[ObjectInfo] | None = None

        def following() -> ObjectInfo | None:
            """Return the next object, or None at the end."""
            nonlocal infos
            if infos is None:
                infos = self.inner.list(prefix, after=after)
            try:
                return next(infos, None)
            except TransientStorageError:
                infos = None  # a generator that raised is finished
                raise

        while (info := self.retry(following)) is not None:
            after = info.key
            yield info

    def cold_storage(self) -> ColdStorage | None:
        """Return access to the storage's classes, each call of it retried."""
        cold = self.inner.cold_storage()
        return None if cold is None else _RetryingCold(cold, self)

    def retry(self, function: Callable[[], T]) -> T:
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
                if (given_up := giving_up.get()) is not None and given_up():
                    raise
                bound = min(self._cap_s, self._base_s * 2**failed)
                self._environment.sleep(bound * self._environment.jitter())
        try:
            return function()
        except TransientStorageError as error:
            msg = f"{error.message} (tried {self._tries} times)"
            raise TransientStorageError(msg, hint=error.hint or _AWAY) from error


def _counted(recorder: Recorder, call: str, action: Callable[[], T], size_bytes: int) -> T:
    """Return ``action()``, counted as one request: the storage does not count its own."""
    with recorder.request(call) as sent:
        result = action()
        sent["requests_bytes"] = len(result) if isinstance(result, bytes) else size_bytes
    return result


class _RetryingCold:
    """Retries every call; each may be repeated with the same outcome."""

    def __init__(self, inner: ColdStorage, backend: RetryingBackend) -> None:
        self._inner, self._retry = inner, backend.retry

    def set_class(self, key: str, name: str) -> bool:
        return self._retry(lambda: self._inner.set_class(key, name))

    def request_restore(self, key: str, *, days: int, tier: str) -> bool:
        return self._retry(lambda: self._inner.request_restore(key, days=days, tier=tier))

    def restore_state(self, key: str) -> ObjectState:
        return self._retry(lambda: self._inner.restore_state(key))
