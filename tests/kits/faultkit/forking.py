"""Forks of a process that saves in the background: ``python -m faultkit.forking FOLDER ENGINE``.

A child of the process allocates memory, gives the parent's saver up, and looks at its memory. With
``close`` as a third word it closes the store; else it saves by itself.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

import numpy as np
import torch

import ckptstore

__all__ = ["in_a_fork", "main"]

_PATIENCE_S = 120.0
_ELEMENTS = 4_000_000


def in_a_fork(work: Callable[[], None]) -> int | None:
    """Do something in a forked child; return its exit status, None if it never came to an end.

    One that hangs prints where. (A timer of faulthandler would hang in a fork, too.)
    """

    def watched() -> None:
        faulthandler.register(signal.SIGUSR1, file=2)
        work()

    child = multiprocessing.get_context("fork").Process(target=watched)
    child.start()
    child.join(_PATIENCE_S)
    status = child.exitcode
    if status is None and child.pid is not None:
        os.kill(child.pid, signal.SIGUSR1)
        child.join(5)
    child.kill()
    child.join()
    return status


def main(folder: str, engine: str, *, close: bool) -> None:
    """Save, fork, and save again."""
    with ckptstore.open(folder, create=True, engine=engine) as store:
        run = store.run("gpt")
        run.save_async({"w": torch.zeros(_ELEMENTS)}, step=1).result(_PATIENCE_S)

        def work() -> None:
            own = [np.ones(_ELEMENTS) for _ in range(4)]  # torch's threads do not live on in a fork
            if close:
                store.close()
            else:
                run.save_async({"w": np.ones(10)}, step=2).result(_PATIENCE_S)
            gc.collect()  # the parent's saver is garbage here
            others = [np.full(_ELEMENTS - 1000 * step, 7.0) for step in range(4)]
            assert all(bool((one == 1).all()) for one in own)
            assert all(bool((one == 7).all()) for one in others)
            store.close()

        assert in_a_fork(work) == 0
        run.save_async({"w": torch.full((1000,), 3.0)}, step=3).result(_PATIENCE_S)
        assert run.versions()[-1].step == 3


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], close="close" in sys.argv[3:])
