"""An engine, and the storage of a store as tasks hold it: what a collection hands its work to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckptstore.backends.base import Backend
from ckptstore.engine.calls import Shared
from ckptstore.engine.engine import THREADS, Engine, EngineSpec, open_engine
from ckptstore.repo import Repo

__all__ = ["Spread", "grouped", "spread_over"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the tasks of one operation run. None in its place: in this process, as ever."""

    engine: Engine
    storage: Shared[Backend]


@contextmanager
def spread_over(
    repo: Repo, executor: EngineSpec | None, workers: int | None
) -> Iterator[Spread | None]:
    """Have the tasks of an operation on a store run somewhere, for the length of a block.

    Parameters
    ----------
    executor
        None, or ``threads`` with no number of workers: nothing is spread.

    Raises
    ------
    CkptStoreError
        As :func:`ckptstore.engine.engine.open_engine`; InvalidInputError too where other processes
        cannot reach the storage.
    """
    if executor is None or (executor == THREADS and workers is None):
        yield None
        return
    with open_engine(executor, workers=workers, environment=repo.environment) as engine:
        yield Spread(engine, engine.share_storage(repo.backend))


def grouped(
    items: Sequence[T], sizes: Sequence[int], *, size: int, count: int
) -> Iterator[list[T]]:
    """Cut a sequence into groups that end once they reach a sum of sizes, or a number of items."""
    group: list[T] = []
    total = 0
    for item, one in zip(items, sizes, strict=True):
        group.append(item)
        total += one
        if total >= size or len(group) == count:
            yield group
            group, total = [], 0
    if group:
        yield group
