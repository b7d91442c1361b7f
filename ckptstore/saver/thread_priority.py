"""Threads that step back behind the training."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

from ckptstore import limits

_NICE_MAX: Final = 19
"""The niceness above which there is none. Source: setpriority(2)."""


def step_back() -> None:
    """Give the calling thread, and those that it starts, a low priority.

    On Linux; elsewhere this would be the whole process.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, own) + limits.BACKGROUND_NICE
        os.setpriority(os.PRIO_PROCESS, own, min(niceness, _NICE_MAX))
