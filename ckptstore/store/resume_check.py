"""Warns of saves that go back in steps: ``latest`` names them, and the newer step is history.

Nothing is wrong with the store then: a step that was saved before gets a further version. A process
whose first save of a run goes back, and that has loaded nothing of the run, has most likely
forgotten to load. One that has loaded an earlier version has most likely forgotten to roll back.
"""

from __future__ import annotations

import logging
from typing import Final

from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import VersionNotFoundError
from ckptstore.model import Version
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")

_UNRESUMED: Final = (
    "and this process has loaded nothing of the run: was it started again without being resumed? "
    "To go on, load before the first save: state = run.load(). To train again from an earlier "
    "version: run.rollback(...). For another training: a run of another name, or store.fork(...)"
)
_LOWER: Final = (
    "and latest names it from now on. To continue an earlier version, roll back to it first: "
    "run.rollback(...). To return: run.rollback('#{}')"
)

_chosen: dict[str, set[str]] = {}
"""By the id of a store, the runs that this process has loaded from, made, or chosen a head of.

Held by the process and not by a session: a program may open a store to load, close it, and open it
again to save, and it has loaded then; a forked child goes on with what its parent has loaded. Two
threads that add at once both succeed, as adding to a set is one step of the interpreter.
"""


_told: set[str] = set()
"""Ids of versions after which one was saved that goes back; background saves are not seen yet."""

_imports: set[tuple[str, str]] = set()
"""Ids of stores and runs of which the next save is an import."""

_loaded: dict[tuple[str, str], str] = {}
"""By the id of a store and the run, the version that this process has loaded last."""


def chosen(repo: Repo, run: str, *, version: str = "") -> None:
    """Note that this process has loaded from a run, made it, or decided what its head is.

    Parameters
    ----------
    version
        Id of the version that was loaded.
    """
    _chosen.setdefault(repo.superblock.store_id, set()).add(run)
    if version:
        _loaded[repo.superblock.store_id, run] = version


def importing(repo: Repo, run: str) -> None:
    """Note that an import follows, which may bring older steps after newer ones."""
    chosen(repo, run)
    _imports.add((repo.superblock.store_id, run))


def take_loaded(repo: Repo, run: str) -> str:
    """Return the id of the version that this process has loaded last, once; empty if none."""
    return _loaded.pop((repo.superblock.store_id, run), "")


def is_chosen(repo: Repo, run: str) -> bool:
    """Return whether this process has loaded from the run, made it, or decided its head."""
    return run in _chosen.get(repo.superblock.store_id, ())


def saved(repo: Repo, run: str, step: int, version: str) -> None:
    """Look at a save, which need not be committed yet; warn if it goes back.

    An equal step is told of a first save only; a fork may begin to count again.

    Parameters
    ----------
    version
        Its id.
    """
    known, catalog = is_chosen(repo, run), repo.log.catalog
    chosen(repo, run)
    one = repo.superblock.store_id, run
    if one in _imports:
        _imports.discard(one)
        return
    before = _before(catalog, run, version)
    if before is None or step > before.step or before.parent == catalog.run(run).origin != "":
        return
    if known and (step == before.step or before.id in _told):
        return
    _told.add(before.id)
    why = _LOWER.format(before.id[:12]) if known else _UNRESUMED
    _log.warning("run %s: step %d is saved after step %d, %s", run, step, before.step, why)


def _before(catalog: Catalog, run: str, version: str) -> Version | None:
    """Return the version of the run that a save continues; None if there is none."""
    if not catalog.has_run(run):
        return None
    try:
        parent = catalog.version(version).parent
    except VersionNotFoundError:  # it is under way
        return catalog.head(run)
    return catalog.version(parent) if parent else None  # one that was deleted is known too
