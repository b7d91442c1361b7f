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
    taking, failed = threading.Lock(), threading.Event()
    interrupted: list[bool] = []  # no event: a handler of a signal may take no lock

    def loop(turn: int) -> None:
        """Take item after item, and have the other threads stop on a failure."""
        try:
            work = begin(turn)
            while True:
                with taking:
                    item = None if failed.is_set() or interrupted else next(items, None)
                if item is None:
                    return
                work(item)
        except BaseException:
            failed.set()
            raise

    if count == 1:
        loop(0)
        return
    with (
        interrupts_held(partial(interrupted.append, True)) if fills else nullcontext(),
        Threads(count, thread_name_prefix=name) as pool,
    ):
        before = giving_up.set(lambda: failed.is_set() or bool(interrupted))
        try:
            futures = [pool.submit(loop, turn) for turn in range(count)]
            wait(futures)
        except BaseException:  # Ctrl-C in the owner: the threads stop after their piece
            failed.set()
            raise
        finally:
            giving_up.reset(before)
    for future in futures:
        future.result()
