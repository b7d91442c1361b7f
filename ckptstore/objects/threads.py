"""Threads that share one piece of work, and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias, TypeVar

from ckptstore.backends.retrying import giving_up
from ckptstore.backends.transfers import Threads, interrupts_held
from ckptstore.errors import TransientStorageError

T = TypeVar("T")
_Begin: TypeAlias = Callable[[int], Callable[[T], None]]


def in_threads(
    count: int, items: Iterator[T], begin: _Begin[T], *, name: str, fills: bool = False
) -> None:
    """Have threads work on items; raise the first failure once all have stopped.

    When one fails, or the caller is interrupted, no further item is taken.

    Parameters
    ----------
    items
        None of them None; each is taken by one thread.
    begin
        Called once in each thread, with its number from 0; gives what is called with each item.
    fills
        Whether they write into memory of the caller: Ctrl-C, too, is raised when all have stopped.
    """
    taking = threading.Lock()
    # By threads. No event beside it: a handler of a signal may take no lock.
    failures: dict[int, BaseException] = {}

    def loop(turn: int) -> None:
        """Take item after item, and have the other threads stop on a failure."""
        try:
            work = begin(turn)
            while True:
                with taking:
                    item = None if failures else next(items, None)
                if item is None:
                    return
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised by the owner
            failures[turn] = error

    if count == 1:
        loop(0)
    else:
        stop = partial(failures.setdefault, count, KeyboardInterrupt())
        with (
            interrupts_held(stop) if fills else nullcontext(),
            Threads(count, thread_name_prefix=name) as pool,
        ):
            before = giving_up.set(lambda: bool(failures))
            try:
                wait([pool.submit(loop, turn) for turn in range(count)])
            except BaseException:  # Ctrl-C in the owner: the threads stop after their piece
                stop()
                raise
            finally:
                giving_up.reset(before)
    if failures:
        raise _taken(failures)


def _taken(failures: dict[int, BaseException]) -> BaseException:
    """Return the failure that no other thread caused by stopping, the same one each time.

    An error refers to the frames that it passed, and keeps all memory if these refer to it.
    """
    found = [failures.pop(turn) for turn in sorted(failures)]
    return next((e for e in found if not isinstance(e, TransientStorageError)), found[0])
