"""The second phase of a collection: delete what was condemned long enough ago, and say so.

What is to be deleted stands in the log, so any client may begin a sweep and any other finish it.
Deleting twice is harmless: names are never used again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import commit_key
from ckptstore.maintenance.core.task_pool import Tasks
from ckptstore.repo import Repo


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
    tasks: Tasks,
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

        deleted = tasks.map(_delete, part, count=limits.GC_TASK_DELETES)
        for done, _ in enumerate(deleted, start + 1):
            progress(Progress(stage="sweep", done=done, total=len(keys), unit="objects"))

        def build(now: Catalog, part: Sequence[str] = part) -> Sequence[Op]:
            return content_ops.swept(now, part)

        repo.log.append_any(build)


def _delete(backend: Backend, key: str) -> None:
    backend.delete(key)
