"""Workers of a Dask scheduler: one that runs somewhere, or one made for the while on this machine.

Whoever reaches a scheduler can run code as its workers, so the one made here talks TLS with keys
that live in memory, and listens on this machine only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptstore import limits
from ckptstore.engine.calls import run_packed
from ckptstore.errors import MissingDependencyError, StorageError, WorkerDiedError

if TYPE_CHECKING:
    from distributed import Client


class DaskWorkers:
    """The workers behind a client of a scheduler; owned by one thread."""

    def __init__(self, client: Client | None, where: str) -> None:
        self._client: Any = client  # its methods have no types
        self._where = where

    one_machine = False
    """All its workers are known to be on this machine."""

    def submit(self, data: bytes) -> Future[bytes]:
        """Have a call run by some worker.

        The future fails with ``KilledWorker`` if worker after worker died while running it, with an
        ``OSError`` if the answer was lost on its way, and with ``CancelledError`` if the scheduler
        dropped it.
        Not by the client's own executor, whose futures never end when an answer is lost.
        """
        theirs: Any = self._connected().submit(run_packed, data, pure=False)
        ours: Future[bytes] = Future()

        def deliver(done: Any) -> None:  # noqa: ANN401 - a future of Dask
            """Pass Dask's answer or failure on, unless nobody waits any more."""
            try:
                answer = done.result()
            except BaseException as error:  # noqa: BLE001 - for whoever waits
                with contextlib.suppress(InvalidStateError):
                    ours.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                    ours.set_result(answer)

        def drop(done: Future[bytes]) -> None:
            if done.cancelled() and not theirs.done():
                with contextlib.suppress(OSError, RuntimeError):
                    theirs.cancel()

        ours.add_done_callback(drop)
        theirs.add_done_callback(lambda done: None if ours.cancelled() else deliver(done))
        return ours

    def threads(self) -> list[int]:
        """Return how many tasks each worker runs at once.

        Raises
        ------
        WorkerDiedError
            The scheduler is gone.
        """
        try:
            found = self._connected().nthreads()
        except Exception as error:
            msg = f"the Dask scheduler {self._where} does not answer any more: {error}"
            raise WorkerDiedError(msg, hint=_HINT_AGAIN) from error
        return [int(count) for count in found.values()]

    def _connected(self) -> Any:  # noqa: ANN401 - a client
        return self._client


class LocalWorkers(DaskWorkers):
    """Those of a scheduler of this machine, which is made when the first task comes.

    That takes seconds, and where nothing is to be done there is no task.
    """

    one_machine = True

    def __init__(self, start: Callable[[], Client], workers: int) -> None:
        super().__init__(None, "of this machine")
        self._start = start
        self._workers = workers

    def threads(self) -> list[int]:
        """Return how many tasks each worker runs at once, or will.

        Raises
        ------
        WorkerDiedError
            The scheduler is gone.
        """
        return [1] * self._workers if self._client is None else super().threads()

    def _connected(self) -> Any:  # noqa: ANN401 - a client
        if self._client is None:
            self._client = self._start()
        return self._client


_HINT_AGAIN = "what was done stays done: run it again once there are workers"


@contextmanager
def connected(address: str) -> Iterator[DaskWorkers]:
    """Connect to a scheduler for the length of a block.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    StorageError
        No scheduler answers, or it has no workers.
    """
    distributed = _distributed()
    try:
        client = distributed.Client(
            address, timeout=limits.CONNECT_TIMEOUT_S, set_as_default=False, name="ckptstore"
        )
    except (OSError, ValueError, RuntimeError) as error:
        msg = f"no Dask scheduler answers at {address}: {error}"
        raise StorageError(
            msg, hint="a scheduler prints its address when it starts: dask scheduler"
        ) from (error)
    with _closing(client):
        try:
            client.wait_for_workers(1, timeout=limits.ENGINE_WORKERS_WAIT_S)
        except (OSError, RuntimeError) as error:  # a timeout is an OSError
            msg = f"the Dask scheduler at {address} has no workers"
            raise StorageError(msg, hint=f"start some: dask worker {address}") from error
        yield DaskWorkers(client, address)


@contextmanager
def local_cluster(workers: int) -> Iterator[DaskWorkers]:
    """Have a scheduler and worker processes on this machine for the length of a block.

    They are started by the first task, which fails with StorageError if they cannot be.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    """
    if find_spec("distributed") is None:
        raise _not_installed("distributed")
    with ExitStack() as stack:
        yield LocalWorkers(partial(_start_local, workers, stack), workers)


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
    try:
        client: Client = distributed.Client(
            cluster, timeout=limits.CONNECT_TIMEOUT_S, set_as_default=False
        )
    except (OSError, RuntimeError) as error:
        msg = f"the Dask scheduler of this machine does not answer: {error}"
        raise StorageError(msg, hint="use the engine processes") from error
    stack.enter_context(_closing(client))
    return client


@contextmanager
def _closing(what: Any) -> Iterator[None]:  # noqa: ANN401 - a client or a cluster
    """Close what Dask has opened; that it is gone already is no failure."""
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
