"""The process that saves for another one, and outlives it. Imports no torch.

It gets arenas and jobs over a socket, writes them one after the other, and tells how it went. It
is in a session of its own and ignores what a terminal or a scheduler sends to stop a job: when the
process that it works for is gone, it finishes what was staged, and exits.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import socket
import sys

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import Environment
from ckptstore.errors import CkptStoreError
from ckptstore.repo import Finding, Repo
from ckptstore.saver import messages
from ckptstore.saver.save_job import JobWriter, SaveJob

_log = logging.getLogger("ckptstore")


def main(fd: int, parent: int) -> None:
    """Work until the parent is gone or says that it is enough, and everything is written.

    Parameters
    ----------
    fd
        One end of a pair of sockets.
    parent
        Process id of the other end.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(limits.BACKGROUND_NICE)
    logging.basicConfig(format=f"ckptstore saver {os.getpid()}: %(message)s")
    channel = messages.Channel(socket.socket(fileno=fd), peer=_watch(parent))
    try:
        received = channel.receive()
        if received is None:
            return
        repo = _repo(received[0])
    except Exception as error:  # noqa: BLE001 - the parent decides what to do about it
        problem = f"{type(error).__name__}: {error}"
        _log.warning("cannot begin: %s", problem)
        _send(channel, messages.Ready(problem=problem))
        return
    _send(channel, messages.Ready())
    repo.log.others.befriend(parent)
    with repo:
        _ChildSaver(repo, channel).serve()


def _send(channel: messages.Channel, message: object) -> bool:
    """Send to the parent; return whether it is still there."""
    try:
        channel.send(message)
    except OSError:
        return False
    return True


def _watch(parent: int) -> int:
    """Return a descriptor that is readable once the parent is gone; -1 where there is none."""
    try:
        watched = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return -1  # the end of the stream has to tell
    if os.getppid() != parent:  # it went before: the number may be another's by now
        os.close(watched)
        return -1
    return watched


def _repo(setup: messages.Setup) -> Repo:
    def known(_: Backend, __: Environment) -> Finding:
        return Finding(put_if_absent=setup.put_if_absent, report={})

    return Repo(setup.backend, setup.superblock, options=setup.options, prober=known)


class _ChildSaver:
    """The main thread takes orders, and another one writes."""

    def __init__(self, repo: Repo, channel: messages.Channel) -> None:
        self._environment = repo.environment
        self._channel = channel
        self._alone = False
        """The parent is gone: there is nobody to tell."""
        self._told_at = 0.0
        """When the parent was told last how far a job is."""
        self._arenas: dict[int, memoryview] = {}
        self._writer = JobWriter(repo, self._report)

    def serve(self) -> None:
        """Take orders until there are no more; return when all is written."""
        try:
            self._alone = self._take_orders()
        finally:  # also after an order that could not be read: what is staged is written
            self._writer.close(alone=True)

    def _take_orders(self) -> bool:
        """Obey until the end; return whether it was the parent's end, too."""
        while (received := self._channel.receive()) is not None:
            order, fd = received
            if isinstance(order, messages.Close):
                return False
            self._obey(order, fd)
        return True

    def _obey(self, order: object, fd: int) -> None:
        match order:
            case messages.Lend():
                self._arenas[order.arena] = memoryview(mmap.mmap(fd, order.size_bytes))
                os.close(fd)
            case messages.Forget():
                self._arenas.pop(order.arena, None)
            case SaveJob():
                self._writer.take(order, self._arenas[order.arena])
            case messages.Compare():
                self._writer.compare(order.number, order.digests)
            case messages.Cancel():
                done = self._writer.cancel(order.number)
                self._tell(messages.Answer(number=order.number, cancelled=done))
            case _:
                raise TypeError(f"an order of a kind that is not known: {order!r:.80}")

    def _report(self, job: SaveJob, report: messages.Report) -> None:
        """Tell what becomes of a job; how far it is, not too often."""
        now = self._environment.monotonic()
        if isinstance(report, messages.Wrote):
            if now - self._told_at < limits.PROGRESS_S:
                return
            self._told_at = now
        elif isinstance(report, messages.Failed):
            if self._alone:
                run, step = job.request.run, job.request.step
                _log.error("the save of %s@%s failed: %s", run, step, report.error)
            report = messages.Failed(number=job.number, error=_portable(report.error))
        self._tell(report)

    def _tell(self, message: object) -> None:
        if not _send(self._channel, message):
            self._alone = True


def _portable(error: BaseException) -> BaseException:
    """Return an error as it survives a pickle; one that does not is told by its text."""
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - anything may be wrong with a foreign class
        again = None
    if type(again) is type(error):
        return error
    return CkptStoreError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
