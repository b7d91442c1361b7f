"""Writes staged saves in a process of its own, which finishes them even if this one is killed."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field

from ckptstore import errors, limits
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.transfers import start_thread
from ckptstore.format.keys import commit_key
from ckptstore.repo import Repo
from ckptstore.saver import messages
from ckptstore.saver.arena import Arena, Digests
from ckptstore.saver.save_job import Hear, SaveJob

_log = logging.getLogger("ckptstore")
# What a send raises when the child is gone, or this end is closed since it is.
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + (
    "from ckptstore.saver.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


def why_not(repo: Repo) -> str:
    """Return why another process cannot save to this store; empty if it can."""
    if not (hasattr(os, "memfd_create") and sys.executable):
        return "this platform has no shared memory by descriptor"
    if repo.backend.capabilities.private:
        return "its objects are in the memory of this process"
    if repo.put_if_absent() is not PutIfAbsent.ATOMIC:
        return "it has a single writer, which is this process"
    try:
        pickle.dumps(_setup(repo))
    except Exception as error:  # noqa: BLE001 - anything may be wrong with a foreign backend
        return f"its backend cannot be sent to another process ({error})"
    return ""


def _setup(repo: Repo) -> messages.Setup:
    return messages.Setup(
        backend=repo.backend,
        superblock=repo.superblock,
        put_if_absent=repo.put_if_absent(),
        options=repo.options,
    )


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A job that the child has."""

    version: str
    """Id that it makes."""
    answered: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    problem: errors.LimitError | None = None
    """Why this process has cancelled it."""


class ProcessEngine:
    """A child process that writes job after job; see :class:`ckptstore.saver.save_job.SaveEngine`.

    Raises
    ------
    InvalidInputError
        Another process cannot save to this store.
    SaverDiedError
        The child cannot be started.
    """

    name = "process"

    def __init__(self, repo: Repo, hear: Hear) -> None:
        reason = why_not(repo)
        if reason:
            msg = f"{repo.url} cannot be saved to by another process: {reason}"
            raise errors.InvalidInputError(msg, hint="use engine='thread'")
        self._repo = repo
        self._hear = hear
        self._lent: set[int] = set()
        self._jobs: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.gone = ""
        """Why there is no child any more."""
        self.began = False
        """The child has understood where to save to."""
        self._problem = ""
        start_thread(bool, "ckptstore-try")  # before there is a child, whose word is to be read
        self._process, self._channel = _start()
        repo.log.others.befriend(self._process.pid)
        self._reader = start_thread(self._read, "ckptstore-saver")
        try:
            self._send(_setup(repo))
        except OSError as error:
            self._channel.close()
            msg = f"a process that saves cannot be told where to: {error.strerror}"
            raise errors.SaverDiedError(msg, hint="see ulimit -n") from error

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def submit(self, job: SaveJob, arena: Arena) -> None:
        """Take a job over: from now on it is written, whatever becomes of this process."""
        with self._lock:
            if self.gone:
                raise errors.SaverDiedError(self.gone)
            self._jobs[job.number] = _Waiting(version=job.version)
        try:
            with self._sending:  # the arena arrives before the job that lies in it
                if arena.number not in self._lent:
                    lent = messages.Lend(arena=arena.number, size_bytes=arena.size_bytes)
                    self._send(lent, arena.fd)
                    self._lent.add(arena.number)
                self._send(job)
        except OSError as error:
            with self._lock:
                waiting = self._jobs.pop(job.number, None)
            if waiting is not None:  # else the thread that reads has told
                waiting.answered.set()
                self._hear(self, messages.Failed(number=job.number, error=_unsent(error)))

    def compare(self, number: int, digests: Digests) -> None:
        """Give a job its digests; one whose digests cannot be sent fails."""
        try:
            self._send(messages.Compare(number=number, digests=digests))
        except OSError as error:
            with self._lock:
                waiting = self._jobs.get(number)
            if waiting is not None:
                waiting.problem = _unsent(error)
                self._send(messages.Cancel(number=number))  # it would wait for them for ever

    def cancel(self, number: int) -> bool:
        """Cancel a job; waits for the child's word.

        The thread that reads is in here if a callback of the user's cancels: then it is the one
        that has to read that word, and passes on what comes before, but for progress.
        """
        with self._lock:
            waiting = self._jobs.get(number)
        if waiting is None:
            return False
        self._send(messages.Cancel(number=number))
        if threading.current_thread() is self._reader:
            while not waiting.answered.is_set() and (received := self._channel.receive()):
                if not isinstance(received[0], messages.Wrote):
                    self._pass_on(received[0])
        else:
            waiting.answered.wait()
        return waiting.cancelled

    def forget(self, arena: int) -> None:
        """Let the child give an arena up."""
        with self._sending:
            if arena in self._lent:
                self._lent.discard(arena)
                self._send(messages.Forget(arena=arena))

    def close(self) -> None:
        """Finish what was submitted, and end the child."""
        try:
            self._send(messages.Close())
        except OSError:
            self._channel.close()  # the end of the stream tells as much
        self._reader.join()
        try:
            self._process.wait(limits.CHILD_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it has nothing left to write
            self._process.wait()

    def _send(self, message: object, fd: int = -1) -> None:
        """Send; that the child is gone is found out, and told, by the thread that reads.

        Raises
        ------
        OSError
            The child is there, and the message cannot be sent: no descriptor or no memory is left.
        """
        try:
            self._channel.send(message, fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def _read(self) -> None:
        try:
            while received := self._channel.receive():
                self._pass_on(received[0])
        except Exception:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            _log.exception("what the process that saves tells cannot be followed any more")
        finally:
            self._channel.close()  # to a child that lives, this process is gone: it ends
            status = self._process.wait()
            with self._lock:
                self.gone = _cause(status, self._problem)
                left = dict(self._jobs)
                self._jobs.clear()
            for number, waiting in left.items():
                self._lost(number, waiting)

    def _pass_on(self, message: object) -> None:
        if isinstance(message, messages.Ready):
            self._problem = message.problem
            self.began = not message.problem
        elif isinstance(message, messages.Wrote):
            self._hear(self, message)
        elif isinstance(message, messages.Answer):
            with self._lock:
                asked = self._jobs.get(message.number)
            if asked is not None:
                asked.cancelled = message.cancelled
                asked.answered.set()
        elif isinstance(message, messages.Done | messages.Failed):
            with self._lock:
                waiting = self._jobs.pop(message.number)
            waiting.answered.set()
            if isinstance(message, messages.Failed) and isinstance(
                message.error, errors.OperationCancelledError
            ):
                message = message._replace(error=waiting.problem or message.error)
            self._hear(self, message)

    def _lost(self, number: int, waiting: _Waiting) -> None:
        """Tell what became of a job whose writer is gone: the log knows."""
        waiting.answered.set()
        error: errors.SaverDiedError
        try:
            found = self._repo.refresh().find(waiting.version)
            if found is not None:  # perhaps not durable: the writer may have died just before
                self._repo.backend.make_durable([commit_key(found.commit)])
        except errors.CkptStoreError as unread:
            msg = f"{self.gone}; whether {waiting.version} appeared is not known: {unread.message}"
            error = errors.SaverDiedError(msg, hint="look at the versions of the run")
        else:
            if found is not None:
                done = messages.Done(number=number, version=found, receipt={**found.receipt})
                self._hear(self, done)
                return
            error = errors.SaverDiedError(self.gone, hint="save again")
        self._hear(self, messages.Failed(number=number, error=error))


def _start() -> tuple[subprocess.Popen[bytes], messages.Channel]:
    """Start a child; return it with the channel to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        arguments = [json.dumps(sys.path), str(number), str(os.getpid())]
        try:
            process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-c", _CODE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what goes wrong is on stderr, which is shared
                pass_fds=[number],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            msg = f"a process that saves cannot be started: {error}"
            raise errors.SaverDiedError(msg, hint="use engine='thread'") from error
    return process, messages.Channel(ours)


def _unsent(error: OSError) -> errors.LimitError:
    msg = f"a save cannot be handed to the process that saves: {error.strerror}"
    hint = "see ulimit -n, and the memory that is free; then save again"
    return errors.LimitError(msg, hint=hint)


def _cause(status: int, problem: str) -> str:
    if problem:
        return f"the process that saves could not begin: {problem}"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"the process that saves ended ({how}) before it was done"
