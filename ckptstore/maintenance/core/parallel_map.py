"""Small requests to a storage, as many at once as it likes, with their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeVar

from ckptstore.backends.base import Backend

S = TypeVar("S")
T = TypeVar("T")

_AHEAD: Final = 16
"""Items a thread that are under way, or done and not yet taken: bounds what waits for who takes
the results. Source: enough that one slow request does not leave the other threads idle."""


def at_once(
    backend: Backend, work: Callable[[S], T], items: Sequence[S], *, most: int | None = None
) -> Iterator[T]:
    """Yield ``work(item)`` for each item, in their order; `work` is called from several threads.

    What `work` raises comes in its turn; then, and when the caller stops taking, nothing more is
    begun, and what is under way is waited for.

    Parameters
    ----------
    backend
        The storage that `work` asks; its ``concurrency`` says how many threads there are.
    most
        Items that are under way, or done and not yet taken; None for 16 a thread.
    """
    workers = min(backend.capabilities.concurrency, len(items), most or len(items))
    if workers < 2:
        yield from map(work, items)
        return
    ahead = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-requests") as pool:
        coming = deque(pool.submit(work, item) for item in islice(ahead, most or workers * _AHEAD))
        try:
            while coming:
                result = coming.popleft().result()
                coming.extend(pool.submit(work, item) for item in islice(ahead, 1))
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
