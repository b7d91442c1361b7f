"""Python's cyclic collector, paused while many objects are made that all stay.

It runs each time as many more objects exist, and looks at all of them: with 50,000 tensors that is
a third of the processor time of a save or a load, and nothing is found.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector off in the block, or the function, which must not wait for a storage.

    It is off for all threads, and on again when the last block ends, if it was on before the first.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
