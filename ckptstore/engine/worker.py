"""Worker process: runs tasks for another process, and ends with it. Imports no torch."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from types import FrameType

from ckptstore import limits
from ckptstore.engine.calls import run_packed


class Stopped(BaseException):
    """The parent process is gone, or stopped the worker."""


def main(fd: int, parent: int) -> None:
    """Run task after task until the other end is closed.

    SIGTERM, and the end of the parent, stop the running task like any interrupted operation.

    Parameters
    ----------
    fd
        One end of a pair of sockets.
    parent
        Process id of the other end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent, which decides
    signal.signal(signal.SIGTERM, _stop)
    logging.basicConfig(format=f"ckptstore worker {os.getpid()}: %(message)s")
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    with Connection(fd) as connection:
        try:
            while True:
                connection.send_bytes(run_packed(connection.recv_bytes()))
        except (EOFError, OSError, Stopped):
            return


def _stop(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the cleanup
    raise Stopped


def _watch(parent: int) -> None:
    """End this process when the parent is gone, whatever it is doing."""
    try:
        watched = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return  # the end of the stream has to tell, after the task
    if os.getppid() == parent:
        select.select([watched], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(limits.CHILD_EXIT_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
