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
import queue
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.config import Environment
from ckptstore.errors import CkptStoreError
from ckptstore.events import Progress
from ckptstore.repo import Finding, Repo
from ckptstore.saver.cancellation import Gate
from ckptstore.saver.channel import Channel
from ckptstore.saver.messages import (
    Answer,
    Cancel,
    Close,
    Compare,
    Done,
    Failed,
    Forget,
    Lend,
    Moved,
    Ready,
    Setup,
)
from ckptstore.saver.save_job import Job, background_options, write_job
from ckptstore.saver.staged import Digests

__all__ = ["main"]

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
    end = socket.socket(fileno=fd)
    channel = Channel(end, peer=_watch(parent))
    try:
        received = channel.receive()
        if received is None:
            return
        repo = _repo(received[0])
    except Exception as error:  # noqa: BLE001 - the parent decides what to do about it
        problem = f"{type(error).__name__}: {error}"
        _log.warning("cannot begin: %s", problem)
        _send(channel, Ready(problem=problem))
        return
    _send(channel, Ready())
    repo.log.befriend(parent)
    with repo:
        _Child(repo, channel).serve()


def _send(channel: Channel, message: object) -> bool:
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


def _repo(setup: Setup) -> Repo:
    def known(_: Backend, __: Environment) -> Finding:
        return Finding(put_if_absent=setup.put_if_absent, report={})

    return Repo(setup.backend, setup.superblock, options=setup.options, prober=known)


@dataclass(slots=True, kw_only=True)
class _Task:
    job: Job
    memory: memoryview
    gate: Gate = field(default_factory=Gate)
    digests: Digests | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class _Child:
    """The main thread takes orders, and another one writes."""

    def __init__(self, repo: Repo, channel: Channel) -> None:
        self._repo = repo
        self._options = background_options(repo.options)
        self._channel = channel
        self._alone = False
        """The parent is gone: there is nobody to tell."""
        self._arenas: dict[int, memoryview] = {}
        self._tasks: dict[int, _Task] = {}
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Take orders until there are no more; return when all is written."""
        writer = threading.Thread(target=self._write_all, name="ckptstore-saver")
        writer.start()
        try:
            self._alone = self._take_orders()
        finally:  # also after an order that could not be read: what is staged is written
            for task in list(self._tasks.values()):
                task.ready.set()  # nobody is left to take digests that have not come
            self._queue.put(None)
            writer.join()

    def _take_orders(self) -> bool:
        """Obey until the end; return whether it was the parent's end, too."""
        while (received := self._channel.receive()) is not None:
            order, fd = received
            if isinstance(order, Close):
                return False
            self._obey(order, fd)
        return True

    def _obey(self, order: object, fd: int) -> None:
        match order:
            case Lend():
                self._arenas[order.arena] = memoryview(mmap.mmap(fd, order.size_bytes))
                os.close(fd)
            case Forget():
                self._arenas.pop(order.arena, None)
            case Job():
                task = _Task(job=order, memory=self._arenas[order.arena])
                self._tasks[order.number] = task
                self._queue.put(task)
            case Compare():
                waiting = self._tasks.get(order.number)
                if waiting is not None:
                    waiting.digests = order.digests
                    waiting.ready.set()
            case Cancel():
                task_or_none = self._tasks.get(order.number)
                done = task_or_none is not None and task_or_none.gate.cancel()
                if task_or_none is not None and done:
                    task_or_none.ready.set()  # digests are not waited for any more
                self._tell(Answer(number=order.number, cancelled=done))
            case _:
                msg = f"an order of a kind that is not known: {order!r:.80}"
                raise TypeError(msg)

    def _write_all(self) -> None:
        while (task := self._queue.get()) is not None:
            self._write(task)
            del self._tasks[task.job.number]
            del task  # it holds an arena, and the next one may be long in coming

    def _write(self, task: _Task) -> None:
        number = task.job.number
        told = [0.0]

        def tell(seen: Progress) -> None:
            """Send how far the write is, but not too often."""
            now = self._repo.environment.monotonic()
            if now - told[0] >= limits.PROGRESS_S:
                told[0] = now
                self._tell(Moved(number=number, done=seen.done, total=seen.total))

        task.ready.wait()
        try:
            version, receipt = write_job(
                self._repo,
                task.job,
                task.memory,
                task.digests,
                options=self._options,
                gate=task.gate,
                progress=tell,
            )
        except BaseException as error:  # noqa: BLE001 - whatever it is, it arrives at the parent
            if self._alone:
                request = task.job.request
                _log.error("the save of %s@%s failed: %s", request.run, request.step, error)
            self._tell(Failed(number=number, error=_portable(error)))
        else:
            self._tell(Done(number=number, version=version, receipt=receipt))

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
