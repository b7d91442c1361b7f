"""Threads that share one piece of work, and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import TypeVar

from ckptstore.backends.transfers import Threads

T = TypeVar("T")


def in_threads(
    count: int, items: Iterator[T], begin: Callable[[int], Callable[[T], None]], *, name: str
) -> None:
    """Have threads work on items; raise the first failure once all have stopped.

    When one fails, or the caller is interrupted, no further item is taken.

    Parameters
    ----------
    items
        None of them None; each is taken by one thread.
    begin
        Called once in each thread, with its number from 0; gives what is called with each item.
    """
    taking, stop = threading.Lock(), threading.Event()

    def loop(turn: int) -> None:
        """Take item after item, and have the other threads stop on a failure."""
        try:
            work = begin(turn)
            while True:
                with taking:
                    item = None if stop.is_set() else next(items, None)
                if item is None:
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    if count == 1:
        loop(0)
        return
    with Threads(count, thread_name_prefix=name) as pool:
        try:
            futures = [pool.submit(loop, turn) for turn in range(count)]
            wait(futures)
        except BaseException:  # Ctrl-C in the owner: the threads stop after their piece
            stop.set()
            raise
    for future in futures:
        future.result()
