"""All packs and manifests of a store, listed in parts where that is quicker.

A listing begins as one, page after page. Most stores end there. Where it goes on for longer than
``GC_LIST_TOGETHER`` objects, what is left is listed by the first two digits of the ids, in tasks of
an engine; or in threads, if so far it was slow: pages of an object store, that is, which one waits
for. A local folder, where listing is work and not waiting, is read by one thread as fast as by any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.config import Environment
from ckptstore.engine.calls import Shared
from ckptstore.maintenance.core.task_pool import Spread, grouped

__all__ = ["ListPart", "Tally", "list_objects", "list_part"]

# Folders that one task lists; each by itself where more tasks than this run at once.
_WIDTH: Final = 4
_MANY: Final = 16

Listed = tuple[str, int, float, str]
"""Key, bytes, time, and storage class: an ``ObjectInfo`` as it travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Some objects."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPart:
    """A task: the objects below some prefixes."""

    storage: Shared[Backend]
    folders: tuple[tuple[str, str], ...]
    """Each a prefix, and the key to begin after."""


def list_part(task: ListPart) -> list[Listed]:
    """Return the objects of a part, in the order of their keys.

    Raises
    ------
    StorageError
        The storage failed.
    """
    return [
        (info.key, info.size_bytes, info.modified_at, info.storage_class)
        for prefix, after in task.folders
        for info in task.storage.value.list(prefix, after=after)
    ]


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
    folders = list(_folders(prefix, last))
    if spread is None:
        found = _threads(backend, folders)
    else:
        # A task costs milliseconds; a listing of 16 million objects has results of 20 MB then.
        width = 1 if spread.engine.workers > _MANY else _WIDTH
        groups = grouped(folders, [1] * len(folders), size=width, count=width)
        tasks = (ListPart(storage=spread.storage, folders=tuple(group)) for group in groups)
        found = spread.engine.map(list_part, tasks)
    for part in found:
        for key, size, modified_at, name in part:
            yield ObjectInfo(key=key, size_bytes=size, modified_at=modified_at, storage_class=name)


def _folders(prefix: str, last: str) -> Iterator[tuple[str, str]]:
    """Yield the prefixes that may hold keys after `last`, each with the key to begin after.

    Ids begin with two hex digits, which are their folder; nothing else is an object of the store.
    """
    for number in range(256):
        part = f"{prefix}{number:02x}/"
        if last < part:
            yield part, ""
        elif last.startswith(part):
            yield part, last


def _threads(backend: Backend, folders: Sequence[tuple[str, str]]) -> Iterator[list[Listed]]:
    storage = Shared(backend)
    tasks = [ListPart(storage=storage, folders=(folder,)) for folder in folders]
    with ThreadPoolExecutor(
        backend.capabilities.concurrency, thread_name_prefix="ckptstore-gc"
    ) as pool:
        yield from pool.map(list_part, tasks)
