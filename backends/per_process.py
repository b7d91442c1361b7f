"""An object of a client library, made when first needed, once in each process.

Clients hold sockets, threads and event loops, none of them valid after a fork or a pickle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds one object per process: ``factory(*arguments)``, made at the first ``get``.

    Safe from any thread, across a fork, and when pickled (if both are; the object is not pickled).
    The arguments, which may be credentials, are not part of its ``repr``. A forked child keeps the
    inherited object untouched: finalising the parent's client in the child would wait for threads
    that do not exist there.
    """

    def __init__(self, factory: Callable[..., T], *arguments: object) -> None:
        self._factory = factory
        self._arguments = arguments
        self._objects: dict[int, T] = {}
        self._locks: dict[int, threading.Lock] = {}

    def get(self) -> T:
        """Return this process's object."""
        pid = os.getpid()
        found = self._objects.get(pid)
        if found is None:
            # One lock per process: a thread of the parent may have held its lock at the fork.
            with self._locks.setdefault(pid, threading.Lock()):
                found = self._objects.get(pid)
                if found is None:
                    found = self._objects[pid] = self._factory(*self._arguments)
        return found

    def take(self) -> T | None:
        """Return this process's object, if it was made, and forget it; the caller closes it."""
        return self._objects.pop(os.getpid(), None)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._factory, *self._arguments)
