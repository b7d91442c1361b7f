"""Pools: how the engines submit a task and take its result."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from ckptstore.engine.calls import packed, run_packed, unpacked
from ckptstore.engine.processes import Processes
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


class ProcessPool(Pool):
    """Worker processes of this machine."""

    def __init__(self, running: Processes) -> None:
        self._running = running

    def workers(self) -> int:
        """Return the number of processes."""
        return self._running.workers

    def _send(self, data: bytes) -> Future[bytes]:
        return self._running.submit(data)

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return True: a new process replaces one that died."""
        return True


def unable(error: Exception) -> WorkerDiedError:
    """Return the error for workers that cannot run tasks of this package."""
    msg = f"the workers cannot run tasks of ckptstore: {type(error).__name__}: {error}"
    return WorkerDiedError(msg, hint="is the same version installed there, in the same Python?")


def _broken(error: BrokenExecutor) -> WorkerDiedError:
    msg = f"the executor is broken: a worker of it died ({type(error).__name__})"
    return WorkerDiedError(msg, hint="the engines processes and dask start another one")


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
    running = Processes(workers)
    try:
        yield ProcessPool(running)
    except BaseException:  # Ctrl-C as well; the caller gets it once no process is left
        running.close(cancel=True)
        raise
    running.close(cancel=False)
