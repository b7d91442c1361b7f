"""Pools: how the engines submit a task and take its result."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptstore import limits
from ckptstore.engine.calls import packed, run_packed, unpacked
from ckptstore.errors import WorkerDiedError

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """Base of all pools: runs pickled tasks in other processes; owned by one thread."""

    in_process = False
    """Tasks run in this process: they share its memory, and nothing is pickled."""

    def workers(self) -> int:
        """Return the number of tasks that run at once; 0 if no worker is there at the moment."""
        raise NotImplementedError

    def sharing(self) -> int:
        """Return how many of them run on one machine, as far as is known; 1 or more."""
        return self.workers()

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have ``function(task)`` run."""
        return self._send(packed(function, task))

    def _send(self, data: bytes) -> Future[bytes]:
        """Have a pickled call run."""
        raise NotImplementedError

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result of a future that is done, or raise the function's error.

        Raises
        ------
        WorkerDiedError
            Its worker died, or there is none.
        """
        return unpacked(future.result())

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return True if the task that met an error may be submitted again."""
        return False


class ExecutorPool(Pool):
    """An executor that the user brought; the death of a worker breaks it for good."""

    def __init__(self, executor: Executor, workers: int) -> None:
        self._executor = executor
        self._workers = workers

    def workers(self) -> int:
        """Return the number of tasks at once."""
        return self._workers

    def _send(self, data: bytes) -> Future[bytes]:
        try:
            # Some executors take equal calls for the same: the number tells them apart.
            return self._executor.submit(run_packed, data, secrets.token_hex(8))
        except BrokenExecutor as error:
            raise _broken(error) from error

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise the function's error, or that the executor is broken."""
        try:
            data = future.result()
        except BrokenExecutor as error:
            raise _broken(error) from error
        except CancelledError as error:
            msg = "the executor has cancelled a task"
            raise WorkerDiedError(msg, hint="is it shut down already?") from error
        except Exception as error:  # of the executor: those of the task travel as results
            raise unable(error) from error
        return unpacked(data)


class ThreadPool(ExecutorPool):
    """Threads of this process."""

    in_process = True

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have it run by a thread."""
        return self._executor.submit(function, task)

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise the function's error."""
        return future.result()


def unable(error: Exception) -> WorkerDiedError:
    """Return the error for workers that cannot run tasks of this package."""
    msg = f"the workers cannot run tasks of ckptstore: {type(error).__name__}: {error}"
    return WorkerDiedError(msg, hint="is the same version installed there, in the same Python?")


def _broken(error: BrokenExecutor) -> WorkerDiedError:
    msg = f"the executor is broken: a worker of it died ({type(error).__name__})"
    return WorkerDiedError(msg, hint="the engines processes and dask start another one")


_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + (
    "from ckptstore.engine.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

_Order = tuple[Future[bytes], bytes]


class _Worker:
    """One process; one thread sends its tasks, any thread may end it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            arguments = [json.dumps(sys.path), str(number), str(os.getpid())]
            try:
                self.process = subprocess.Popen(  # noqa: S603 - this very program
                    [sys.executable, "-c", _CODE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # errors go to stderr, which is shared
                    pass_fds=[number],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._line = Connection(ours.detach())

    def ask(self, data: bytes) -> bytes:
        """Return the answer to a task."""
        self._line.send_bytes(data)
        return self._line.recv_bytes()

    def close(self) -> str:
        """Let it end, wait for that, and return how it ended."""
        self._line.close()
        try:
            status = self.process.wait(limits.CHILD_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


class ProcessPool(Pool):
    """Worker processes of this machine, started at the first tasks; a new one replaces a dead one.

    Each has a connection of its own, so that the death of one loses one task. Any thread may
    submit; ``close`` is for the owner.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def workers(self) -> int:
        """Return the number of processes."""
        return self._workers

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return True: a new process replaces one that died."""
        return True

    def _send(self, data: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        with self._lock:
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._drive, name="ckptstore-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._orders.put((future, data))
        return future

    def close(self, *, cancel: bool) -> None:
        """End all workers; with `cancel`, without waiting for their tasks."""
        if cancel:
            self._signal(signal.SIGTERM)
        for _ in self._threads:
            self._orders.put(None)
        late = threading.Timer(limits.CHILD_EXIT_S, self._signal, [signal.SIGKILL])
        if cancel:
            late.start()
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:  # Ctrl-C once more
            self._signal(signal.SIGKILL)
            raise
        finally:
            late.cancel()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._stopping = True
            for worker in self._running:
                worker.process.send_signal(number)

    def _drive(self) -> None:
        """Pass tasks to a worker of its own, one after the other."""
        worker: _Worker | None = None
        while (order := self._orders.get()) is not None:
            future, data = order
            if self._stopping:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None:
                    worker = self._start()
                answer = worker.ask(data)
            except (EOFError, OSError) as error:
                future.set_exception(self._lost(worker, error))
                worker = None
            else:
                future.set_result(answer)
        if worker is not None:
            worker.close()
            self._forget(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._stopping:
                raise EOFError
            worker = _Worker()
            self._running.add(worker)
            return worker

    def _lost(self, worker: _Worker | None, error: Exception) -> WorkerDiedError:
        if worker is None:
            return WorkerDiedError(f"a worker process cannot be started: {error}")
        how = worker.close()
        self._forget(worker)
        return WorkerDiedError(f"a worker process ended ({how}) before its task was done")

    def _forget(self, worker: _Worker) -> None:
        with self._lock:
            self._running.discard(worker)


@contextmanager
def threads(workers: int) -> Iterator[Pool]:
    """Run tasks by threads for the duration of a block."""
    executor = ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-task")
    try:
        yield ThreadPool(executor, workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def processes(workers: int) -> Iterator[Pool]:
    """Run tasks by processes for the duration of a block; an error stops them at once."""
    running = ProcessPool(workers)
    try:
        yield running
    except BaseException:  # Ctrl-C as well; the caller gets it once no process is left
        running.close(cancel=True)
        raise
    running.close(cancel=False)
