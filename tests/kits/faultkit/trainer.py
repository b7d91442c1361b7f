"""A training that saves in the background and is killed: ``python -m faultkit.trainer``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from heldback import HeldBackend

from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.repo import create_on
from ckptstore.store import Store

__all__ = ["main", "state_at"]


def state_at(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step."""
    generator = torch.Generator().manual_seed(step)
    return {f"w{place}": torch.randn(200_000, generator=generator) for place in range(5)}


def main(folder: Path, how: str) -> None:
    """Stage two saves while the storage holds the first back; then end in the way `how`.

    ``wait``: print a line and wait to be killed. ``fork``: with a child of its own that lives on.
    ``exit``: let the storage go on, and end without closing anything. ``early``: be killed when
    the first save is staged, before the child can have begun.
    """
    backend = HeldBackend(open_backend(folder / "store"), folder)
    backend.go()
    engine = sys.argv[3]
    store = Store(create_on(backend, options=Options(engine=engine, in_flight=2)))
    run = store.run("gpt")
    if how == "early":
        for step in (1, 2):
            assert run.save_async(state_at(step), step=step).staged
        os.kill(os.getpid(), signal.SIGKILL)
    run.save_async(state_at(1), step=1).result()
    backend.hold()
    for step in (2, 3):
        state = state_at(step)
        assert run.save_async(state, step=step).staged
        for tensor in state.values():
            tensor.zero_()
    backend.wait_held()
    if how == "exit":
        backend.go()
        return
    if how == "fork" and os.fork() == 0:
        sys.stdout.close()
        os.close(1)
        os.close(2)
        sys.stdin.read()  # as long as the test lives
        os._exit(0)
    print(store._session.saver.dispatcher.pid, flush=True)  # noqa: T201 - for the test
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
