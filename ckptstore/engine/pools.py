"""One way to submit a task for each kind of engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from ckptstore.engine.calls import packed, run_packed, unpacked
from ckptstore.engine.dask_client import DaskWorkers
from ckptstore.engine.processes import Processes
from ckptstore.errors import WorkerDiedError

T = TypeVar("T")
R = TypeVar("R")


class Pool(Protocol):
    """Runs tasks; owned by one thread."""

    @property
    def in_process(self) -> bool:
        """Tasks run in this process: they share its memory, and nothing is pickled."""

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return whether the task that met an error may be submitted again."""

    def workers(self) -> int:
        """Return how many tasks run at once; 0 if no worker is there at the moment."""

    def sharing(self) -> int:
        """Return how many of them run on one machine, as far as is known; 1 or more."""

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have ``function(task)`` run."""

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return what became of a future that is done.

        Raises
        ------
        WorkerDiedError
            Its worker died, or there is none.
        """


class _ExecutorPool:
    """Tasks of an executor with a fixed number of workers."""

    def __init__(self, executor: Executor, workers: int) -> None:
        self._executor = executor
        self._workers = workers

    def workers(self) -> int:
        """Return the number of tasks at once."""
        return self._workers

    def sharing(self) -> int:
        """Return the same: all may be on one machine."""
        return self._workers

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return False: a thread does not die, and an executor is broken for good."""
        return False


class ThreadPool(_ExecutorPool):
    """Threads of this process."""

    in_process = True

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have it run by a thread."""
        return self._executor.submit(function, task)

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise what the function raised."""
        return future.result()


class ProcessPool:
    """Worker processes of this machine."""

    in_process = False

    def __init__(self, running: Processes) -> None:
        self._running = running

    def workers(self) -> int:
        """Return the number of processes."""
        return self._running.workers

    def sharing(self) -> int:
        """Return the number of processes."""
        return self._running.workers

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have it run by a process."""
        return self._running.submit(packed(function, task))

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise what the function raised, or that the worker died."""
        return unpacked(future.result())

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return True: another process takes the place of one that died."""
        return True


class DaskPool:
    """Workers of a Dask scheduler, which runs the tasks of a dead one again by itself."""

    in_process = False

    def __init__(self, workers: DaskWorkers, most: int = 0) -> None:
        self._dask = workers
        self._most = most

    def workers(self) -> int:
        """Return as many as the workers take at the moment, or fewer if that is asked for."""
        found = sum(self._dask.threads())
        return min(found, self._most) if self._most else found

    def sharing(self) -> int:
        """Return the tasks of the largest worker; how workers share machines is unknown."""
        threads = self._dask.threads()
        return sum(threads) if self._dask.one_machine else max(threads, default=1)

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have it run by a worker."""
        return self._dask.submit(packed(function, task))

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise what the function raised, or that the workers died."""
        try:
            data = future.result()
        except CancelledError as error:
            msg = "the scheduler dropped a task: it is gone, or someone else has cancelled it"
            raise WorkerDiedError(msg, hint="what was done stays done: run it again") from error
        except Exception as error:  # of Dask: those of the task travel as results
            if type(error).__name__ == "KilledWorker":
                msg = "worker after worker died while it ran one and the same task"
                raise WorkerDiedError(msg, hint="see the logs of the Dask workers") from error
            raise _unable(error) from error
        return unpacked(data)

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return whether only the answer was lost."""
        return isinstance(error.__cause__, OSError)


class ForeignPool(_ExecutorPool):
    """An executor that the user brought; if a worker of it dies, it is broken for good."""

    in_process = False

    def submit(self, function: Callable[[T], R], task: T) -> Future[Any]:
        """Have it run by a worker."""
        try:
            # Some executors take equal calls for the same: the number tells them apart.
            number = secrets.token_hex(8)
            return self._executor.submit(run_packed, packed(function, task), number)
        except BrokenExecutor as error:
            raise _broken(error) from error

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise what the function raised, or that the executor is broken."""
        try:
            data = future.result()
        except BrokenExecutor as error:
            raise _broken(error) from error
        except CancelledError as error:
            msg = "the executor has cancelled a task"
            raise WorkerDiedError(msg, hint="is it shut down already?") from error
        except Exception as error:  # of the executor: those of the task travel as results
            raise _unable(error) from error
        return unpacked(data)


def _unable(error: Exception) -> WorkerDiedError:
    msg = f"the workers cannot run tasks of ckptstore: {type(error).__name__}: {error}"
    return WorkerDiedError(msg, hint="is the same version installed there, in the same Python?")


def _broken(error: BrokenExecutor) -> WorkerDiedError:
    msg = f"the executor is broken: a worker of it died ({type(error).__name__})"
    return WorkerDiedError(msg, hint="the engines processes and dask start another one")


@contextmanager
def threads(workers: int) -> Iterator[ThreadPool]:
    """Run tasks by threads for the length of a block."""
    executor = ThreadPoolExecutor(workers, thread_name_prefix="ckptstore-task")
    try:
        yield ThreadPool(executor, workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def processes(workers: int) -> Iterator[ProcessPool]:
    """Run tasks by processes for the length of a block; on an error, they are stopped at once."""
    running = Processes(workers)
    try:
        yield ProcessPool(running)
    except BaseException:  # Ctrl-C as well; it goes on to the caller, once no process is left
        running.close(cancel=True)
        raise
    running.close(cancel=False)
