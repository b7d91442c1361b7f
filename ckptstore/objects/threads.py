"""Threads that share one piece of work, and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

__all__ = ["in_threads"]


def in_threads(
    count: int, work: Callable[[int], None], stop: threading.Event, *, name: str
) -> None:
    """Run ``work(0)``, ``work(1)`` ... in a thread each; raise the first failure once all ended.

    Parameters
    ----------
    stop
        Is set when one fails, or the caller is interrupted; `work` looks at it between its pieces.
    """

    def guarded(turn: int) -> None:
        """Work, and have the others stop if it fails."""
        try:
            work(turn)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix=name) as pool:
        try:
            futures = [pool.submit(guarded, turn) for turn in range(count)]
            wait(futures)
        except BaseException:  # Ctrl-C in the owner: the threads stop after their piece
            stop.set()
            raise
    for future in futures:
        future.result()
