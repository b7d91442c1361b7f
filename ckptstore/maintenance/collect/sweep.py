"""The second phase of a collection: delete what was condemned long enough ago, and say so.

What is to be deleted stands in the log, so any client may begin a sweep and any other finish it.
Deleting twice is harmless: names are never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.engine.calls import Shared
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import commit_key
from ckptstore.maintenance.core.parallel_map import at_once
from ckptstore.maintenance.core.task_pool import Spread
from ckptstore.repo import Repo

__all__ = ["DeletePart", "delete_part", "due", "sweep", "wait_s"]


def due(repo: Repo, catalog: Catalog, *, grace_s: float, now_s: float) -> list[str]:
    """Return the condemned objects whose grace is over, by the storage's clock.

    Parameters
    ----------
    now_s
        The storage's clock now; condemned at: the time of the commit that condemned, as stored.

    Raises
    ------
    StorageError
        The storage failed.
    """
    pending = catalog.condemned
    over = {
        number
        for number in set(pending.values())
        if grace_s <= 0 or now_s - repo.backend.stat(commit_key(number)).modified_at >= grace_s
    }
    return sorted(key for key, number in pending.items() if number in over)


def wait_s(repo: Repo, catalog: Catalog, *, grace_s: float, now_s: float) -> float:
    """Return the seconds until the grace of all condemned objects is over; 0 if there are none.

    Raises
    ------
    StorageError
        The storage failed.
    """
    if not catalog.condemned:
        return 0.0
    newest = repo.backend.stat(commit_key(max(catalog.condemned.values()))).modified_at
    return min(grace_s, max(0.0, grace_s - (now_s - newest)))


def sweep(
    repo: Repo,
    keys: Sequence[str],
    *,
    progress: ProgressCallback,
    spread: Spread | None = None,
) -> None:
    """Delete condemned objects, then commit that they are; those of others' sweeps too.

    Raises
    ------
    StorageError
        Something could not be deleted: it stays condemned, for the next sweep.
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.append`.
    """
    for start in range(0, len(keys), limits.KEYS_PER_OP_MAX):
        part = keys[start : start + limits.KEYS_PER_OP_MAX]

        def step(count: int, start: int = start) -> None:
            done = start + count
            progress(Progress(stage="sweep", done=done, total=len(keys), unit="objects"))

        if spread is not None and len(part) > limits.GC_TASK_DELETES:
            _spread_deletes(spread, part, step)
        else:
            _delete(repo.backend, part, step)

        def build(now: Catalog, part: Sequence[str] = part) -> Sequence[Op]:
            return content_ops.swept(now, part)

        repo.log.append_any(build)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePart:
    """A task: condemned objects whose grace is over."""

    storage: Shared[Backend]
    keys: tuple[str, ...]


def delete_part(task: DeletePart) -> None:
    """Delete objects; those that are gone already are none the less.

    Raises
    ------
    StorageError
        Something could not be deleted.
    """
    _delete(task.storage.value, task.keys, lambda _: None)


def _spread_deletes(spread: Spread, keys: Sequence[str], step: Callable[[int], None]) -> None:
    size = limits.GC_TASK_DELETES
    tasks = (
        DeletePart(storage=spread.storage, keys=tuple(keys[start : start + size]))
        for start in range(0, len(keys), size)
    )
    count = 0
    for task, _ in spread.engine.map_unordered(delete_part, tasks):
        count += len(task.keys)
        step(count)


def _delete(backend: Backend, keys: Sequence[str], step: Callable[[int], None]) -> None:
    for count, _ in enumerate(at_once(backend, backend.delete, keys), 1):
        step(count)
