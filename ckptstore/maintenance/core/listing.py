"""All packs and manifests of a store, listed in parts where that is quicker.

A listing begins as one, page after page. Most stores end there. Where it goes on for longer than
``GC_LIST_TOGETHER`` objects, what is left is listed by the first two digits of the ids, in tasks of
an engine; or in threads, if so far it was slow: pages of an object store, that is, which one waits
for. A local folder, where listing is work and not waiting, is read by one thread as fast as by any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.config import Environment
from ckptstore.maintenance.core.task_pool import Tasks

# Folders that one task lists; each by itself where more tasks than this run at once.
_WIDTH: Final = 4
_MANY: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Some objects."""

    count: int = 0
    size_bytes: int = 0


def list_objects(tasks: Tasks, prefix: str, *, environment: Environment) -> Iterator[ObjectInfo]:
    """Yield the objects below ``packs/`` or ``manifests/``, in the order of their keys.

    Raises
    ------
    StorageError
        The storage failed.
    """
    backend, engine = tasks.storage.value, tasks.engine
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
    if engine is None and not slow:
        yield from backend.list(prefix, after=last)
        return
    # A task costs milliseconds; a listing of 16 million objects has results of 20 MB then.
    width = 1 if engine is not None and engine.workers > _MANY else _WIDTH
    for part in tasks.map(_list_folder, list(_folders(prefix, last)), count=width):
        yield from part


def _list_folder(backend: Backend, folder: tuple[str, str]) -> list[ObjectInfo]:
    """Return the objects below a prefix, after a key."""
    prefix, after = folder
    return list(backend.list(prefix, after=after))


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
