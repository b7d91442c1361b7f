"""Workers of a Dask scheduler: one that runs already, or a temporary one on this machine.

A client of a scheduler can run code as its workers, so the one made here uses TLS with keys in
memory, and listens on this machine only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptstore import limits
from ckptstore.engine.calls import run_packed, unpacked
from ckptstore.engine.pools import Pool, unable
from ckptstore.errors import MissingDependencyError, StorageError, WorkerDiedError

if TYPE_CHECKING:
    from distributed import Client


class DaskPool(Pool):
    """Workers behind a client of a scheduler, which itself repeats the tasks of a dead worker.

    Parameters
    ----------
    start
        Returns the client; called at the first task.
    most
        Most tasks at once; 0 for as many as the workers take.
    local
        Number of workers if `start` starts them, all on this machine; 0 if they run elsewhere.
    """

    def __init__(
        self, start: Callable[[], Client], where: str, *, most: int = 0, local: int = 0
    ) -> None:
        self._start = start
        self._client: Any = None  # its methods have no types
        self._where = where
        self._most = most
        self._local = local

    def workers(self) -> int:
        """Return as many as the workers take at the moment, or `most` if that is fewer."""
        found = sum(self._threads())
        return min(found, self._most) if self._most else found

    def sharing(self) -> int:
        """Return the tasks of the largest worker; how workers share machines is unknown."""
        threads = self._threads()
        return sum(threads) if self._local else max(threads, default=1)

    def _threads(self) -> list[int]:
        """Return how many tasks each worker runs at once, or will.

        Raises
        ------
        WorkerDiedError
            The scheduler is gone.
        """
        if self._local and self._client is None:
            return [1] * self._local
        try:
            found = self._connected().nthreads()
        except Exception as error:
            msg = f"the Dask scheduler {self._where} does not answer any more: {error}"
            hint = "what was done stays done: run it again once there are workers"
            raise WorkerDiedError(msg, hint=hint) from error
        return [int(count) for count in found.values()]

    def _connected(self) -> Any:  # noqa: ANN401 - a client
        if self._client is None:
            self._client = self._start()
        return self._client

    def _send(self, data: bytes) -> Future[bytes]:
        """Have a worker run a call.

        The future fails with ``KilledWorker`` if worker after worker died while running it, with an
        ``OSError`` if the answer was lost on its way, and with ``CancelledError`` if the scheduler
        dropped it.
        The client's own executor is not used: its futures never end when an answer is lost.
        """
        theirs: Any = self._connected().submit(run_packed, data, pure=False)
        ours: Future[bytes] = Future()

        def deliver(done: Any) -> None:  # noqa: ANN401 - a future of Dask
            """Pass Dask's answer or failure on, unless it was cancelled."""
            if ours.cancelled():
                return
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    answer = done.result()
                except BaseException as error:  # noqa: BLE001 - for the caller that waits
                    ours.set_exception(error)
                else:
                    ours.set_result(answer)

        def drop(done: Future[bytes]) -> None:
            if done.cancelled() and not theirs.done():
                with contextlib.suppress(OSError, RuntimeError):
                    theirs.cancel()

        ours.add_done_callback(drop)
        theirs.add_done_callback(deliver)
        return ours

    def result(self, future: Future[Any]) -> Any:  # noqa: ANN401 - whatever the function returned
        """Return the result, or raise the function's error, or that the workers died."""
        try:
            data = future.result()
        except CancelledError as error:
            msg = "the scheduler dropped a task: it is gone, or someone else has cancelled it"
            raise WorkerDiedError(msg, hint="what was done stays done: run it again") from error
        except Exception as error:  # of Dask: those of the task travel as results
            if type(error).__name__ == "KilledWorker":
                msg = "worker after worker died while it ran one and the same task"
                raise WorkerDiedError(msg, hint="see the logs of the Dask workers") from error
            raise unable(error) from error
        return unpacked(data)

    def recovers(self, error: WorkerDiedError) -> bool:
        """Return True if only the answer was lost."""
        return isinstance(error.__cause__, OSError)


@contextmanager
def connected(address: str, most: int) -> Iterator[DaskPool]:
    """Connect to a scheduler for the duration of a block; run at most `most` tasks, 0 for all.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    StorageError
        No scheduler answers, or it has no workers.
    """
    client = _client(
        address,
        f"no Dask scheduler answers at {address}",
        hint="a scheduler prints its address when it starts: dask scheduler",
    )
    with _closing(client):
        try:
            client.wait_for_workers(1, timeout=limits.ENGINE_WORKERS_WAIT_S)
        except (OSError, RuntimeError) as error:  # a timeout is an OSError
            msg = f"the Dask scheduler at {address} has no workers"
            raise StorageError(msg, hint=f"start some: dask worker {address}") from error
        yield DaskPool(lambda: client, address, most=most)


@contextmanager
def local_cluster(workers: int) -> Iterator[DaskPool]:
    """Run a scheduler and worker processes on this machine for the duration of a block.

    They are started by the first task, which fails with StorageError if they cannot be.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    """
    if find_spec("distributed") is None:
        raise _not_installed("distributed")
    with ExitStack() as stack:
        start = partial(_start_local, workers, stack)
        yield DaskPool(start, "of this machine", local=workers)


def _start_local(workers: int, stack: ExitStack) -> Client:
    """Start a scheduler and workers, which the stack ends, and return a client of it.

    Raises
    ------
    StorageError
        They cannot be started.
    """
    distributed = _distributed()
    try:
        cluster = distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # without one it would listen on every interface
            scheduler_kwargs={"dashboard": False},
            memory_limit=None,  # what tasks hold is bounded by the budget of the store
            security=True,
        )
    except (OSError, RuntimeError, ImportError) as error:
        msg = f"Dask cannot start workers on this machine: {error}"
        raise StorageError(msg, hint="use the engine processes") from error
    stack.enter_context(_closing(cluster))
    msg = "the Dask scheduler of this machine does not answer"
    client = _client(cluster, msg, hint="use the engine processes")
    stack.enter_context(_closing(client))
    return client


def _client(scheduler: Any, msg: str, *, hint: str) -> Client:  # noqa: ANN401 - address or cluster
    """Return a client of a scheduler, or raise StorageError with the message and hint."""
    distributed = _distributed()
    try:
        client: Client = distributed.Client(
            scheduler, timeout=limits.CONNECT_TIMEOUT_S, set_as_default=False, name="ckptstore"
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"{msg}: {error}", hint=hint) from error
    return client


@contextmanager
def _closing(what: Any) -> Iterator[None]:  # noqa: ANN401 - a client or a cluster
    """Close a client or cluster; one that is gone already is no failure."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            what.close(timeout=limits.CHILD_EXIT_S)


def _distributed() -> Any:  # noqa: ANN401 - a module
    try:
        import distributed
    except ImportError as error:
        raise _not_installed(error.name) from error
    return distributed


def _not_installed(name: str | None) -> MissingDependencyError:
    msg = f"Dask is not installed ({name})"
    return MissingDependencyError(msg, hint="pip install 'ckptstore[dask]'")
