"""Workers of a Dask scheduler that runs already, as an executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager
from functools import partial
from typing import Any

from ckptstore import limits
from ckptstore.engine.calls import no_answer
from ckptstore.errors import MissingDependencyError, StorageError


class DaskExecutor(Executor):
    """Runs calls through a client of a scheduler, which itself repeats the tasks of a dead worker.

    Dask's own executor is not used: its futures never end when an answer is lost.
    """

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - its methods have no types
        self._client = client

    def threads(self) -> list[int]:
        """Return how many tasks each worker runs at once.

        Raises
        ------
        WorkerDiedError
            The scheduler is gone.
        """
        try:
            return [int(count) for count in self._client.nthreads().values()]
        except Exception as error:
            raise no_answer(error) from error

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        """Have a worker run a call; the future ends with whatever error Dask ends its own with."""
        theirs = self._client.submit(fn, *args, **kwargs, pure=False)
        ours: Future[Any] = Future()
        ours.add_done_callback(partial(_drop, theirs))
        theirs.add_done_callback(partial(_deliver, ours))
        return ours


def _deliver(ours: Future[Any], theirs: Any) -> None:  # noqa: ANN401 - a future of Dask
    """Pass Dask's answer or failure on, unless nobody waits for it."""
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        try:
            answer = theirs.result()
        except BaseException as error:  # noqa: BLE001 - for the caller that waits
            ours.set_exception(error)
        else:
            ours.set_result(answer)


def _drop(theirs: Any, ours: Future[Any]) -> None:  # noqa: ANN401 - a future of Dask
    """Cancel Dask's future with ours; a scheduler that is gone has dropped it already."""
    if ours.cancelled():
        with contextlib.suppress(OSError, RuntimeError):
            theirs.cancel()


@contextmanager
def connected(address: str) -> Iterator[DaskExecutor]:
    """Connect to a scheduler for the duration of a block.

    Raises
    ------
    MissingDependencyError
        Dask is not installed.
    StorageError
        No scheduler answers, or it has no workers.
    """
    try:
        import distributed
    except ImportError as error:
        msg = f"Dask is not installed ({error.name})"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[dask]'") from error
    try:
        start: Any = distributed.Client  # it has no types
        client = start(
            address, timeout=limits.CONNECT_TIMEOUT_S, set_as_default=False, name="ckptstore"
        )
    except (OSError, ValueError, RuntimeError) as error:
        msg = f"no Dask scheduler answers at {address}: {error}"
        hint = "a scheduler prints its address when it starts: dask scheduler"
        raise StorageError(msg, hint=hint) from error
    try:
        try:
            client.wait_for_workers(1, timeout=limits.ENGINE_WORKERS_WAIT_S)
        except (OSError, RuntimeError) as error:  # a timeout is an OSError
            msg = f"the Dask scheduler at {address} has no workers"
            raise StorageError(msg, hint=f"start some: dask worker {address}") from error
        yield DaskExecutor(client)
    finally:
        with contextlib.suppress(OSError, RuntimeError):  # the scheduler is gone
            client.close(timeout=limits.CHILD_EXIT_S)
