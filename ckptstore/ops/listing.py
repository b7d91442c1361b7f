"""All packs and manifests of a store, listed in parts where that is quicker.

A listing begins as one, page after page. Most stores end there. Where it goes on for longer than
``GC_LIST_TOGETHER`` objects, what is left is listed by the first two digits of the ids, in tasks of
an engine; or in threads, if so far it was slow: pages of an object store, that is, which one waits
for. A local folder, where listing is work and not waiting, is read by one thread as fast as by any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.config import Environment
from ckptstore.engine.calls import Shared
from ckptstore.ops.spread import Spread

__all__ = ["ListPart", "list_objects", "list_part"]

Listed = tuple[str, int, float]
"""Key, bytes, and time: an ``ObjectInfo`` as it travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPart:
    """A task: the objects below one prefix."""

    storage: Shared[Backend]
    prefix: str
    after: str


def list_part(task: ListPart) -> list[Listed]:
    """Return the objects of a part, in the order of their keys.

    Raises
    ------
    StorageError
        The storage failed.
    """
    found = task.storage.value.list(task.prefix, after=task.after)
    return [(info.key, info.size_bytes, info.modified_at) for info in found]


def list_objects(
    backend: Backend, prefix: str, *, environment: Environment, spread: Spread | None
) -> Iterator[ObjectInfo]:
    """Yield the objects below ``packs/`` or ``manifests/``, in the order of their keys.

    Raises
    ------
    StorageError
        The storage failed.
    """
    began = environment.monotonic()
    count = 0
    last = ""
    for info in backend.list(prefix):
        yield info
        count += 1
        last = info.key
        if count == limits.GC_LIST_TOGETHER:
            break
    else:
        return
    slow = environment.monotonic() - began > count * limits.GC_LIST_SLOW_S
    if spread is None and not slow:
        yield from backend.list(prefix, after=last)
        return
    parts = _parts(prefix, last)
    storage = spread.storage if spread is not None else Shared(backend)
    tasks = (ListPart(storage=storage, prefix=part, after=after) for part, after in parts)
    found = spread.engine.map(list_part, tasks) if spread is not None else _threads(backend, tasks)
    for part in found:
        for key, size, modified_at in part:
            yield ObjectInfo(key=key, size_bytes=size, modified_at=modified_at)


def _parts(prefix: str, last: str) -> Iterator[tuple[str, str]]:
    """Yield the prefixes that may hold keys after `last`, each with the key to begin after.

    Ids begin with two hex digits, which are their folder; nothing else is an object of the store.
    """
    for number in range(256):
        part = f"{prefix}{number:02x}/"
        if last < part:
            yield part, ""
        elif last.startswith(part):
            yield part, last


def _threads(backend: Backend, tasks: Iterable[ListPart]) -> Iterator[list[Listed]]:
    with ThreadPoolExecutor(
        backend.capabilities.concurrency, thread_name_prefix="ckptstore-gc"
    ) as pool:
        yield from pool.map(list_part, tasks)
