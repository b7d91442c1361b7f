"""Pickles of tasks and of their results, on their way between processes.

They travel between processes of one user, through an executor or a scheduler that the user has
named and trusts with everything, and are never stored. Tasks are pickled here rather than
by the executor: an error then names a value that cannot travel, and a function is always found by
its name in the installed package, never sent as code.
"""

from __future__ import annotations

import importlib
import pickle
import threading
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, cast

from ckptstore import errors, limits

T = TypeVar("T")
R = TypeVar("R")

_HINT: Final = "use the engine threads, or give storage options that are plain values"


class Shared(Generic[T]):
    """A value that many tasks hold, such as a backend: made once in each process that runs them.

    Made by :meth:`ckptstore.engine.engine.Engine.share_storage`. Any thread may use it.
    """

    def __init__(self, value: T, data: bytes = b"") -> None:
        self.value = value
        self._data = data

    def __reduce__(self) -> tuple[object, ...]:
        self._data = self._data or pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL)
        return _shared, (self._data,)


_lock = threading.Lock()


def _shared(data: bytes) -> Shared[Any]:
    """Return the one object of this process that was made from a pickle."""
    with _lock:
        return _made(data)


@lru_cache(limits.ENGINE_SHARED_MAX)
def _made(data: bytes) -> Shared[Any]:
    return Shared(pickle.loads(data), data)  # noqa: S301 - see the module


def pickled(value: object, what: str) -> bytes:
    """Return the pickle of a value; `what` is its name in errors.

    Raises
    ------
    InvalidInputError
        It cannot be sent to another process.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        msg = f"{what} cannot be sent to another process: {_brief(error)}"
        raise errors.InvalidInputError(msg, hint=_HINT) from error


def packed(function: Callable[[T], R], task: T) -> bytes:
    """Return the pickle of a call.

    Raises
    ------
    InvalidInputError
        The function or the task cannot be sent to another process.
    LimitError
        It is larger than a task may be.
    """
    body = pickled((function, task), "a task")
    if len(body) > limits.ENGINE_TASK_BYTES_MAX:
        msg = f"a task takes {len(body)} bytes, more than {limits.ENGINE_TASK_BYTES_MAX}"
        raise errors.LimitError(msg, hint="use the engine threads")
    return pickle.dumps((_version(), body), pickle.HIGHEST_PROTOCOL)


def run_packed(data: bytes, number: str = "") -> bytes:
    """Run a call in this process; return its result or its error, for :func:`unpacked`.

    Raises only what ends the process.

    Parameters
    ----------
    number
        Makes calls different, for executors that run equal calls once.
    """
    del number
    try:
        version, body = pickle.loads(data)  # noqa: S301 - see the module
        if version != _version():
            msg = f"the workers have ckptstore {_version()}, not {version}"
            raise errors.StorageError(msg, hint="install the same version there")
        function, task = _taken(body)
        return pickle.dumps((True, function(task)), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
        return _packed_error(error)


def _taken(body: bytes) -> tuple[Callable[[Any], Any], Any]:
    """Return function and task; raise StorageError if a module that they need is missing here."""
    try:
        function, task = pickle.loads(body)  # noqa: S301 - see the module
    except Exception as error:
        hint = "install what the storage needs there, too: the same extras of ckptstore"
        raise errors.StorageError(
            f"a worker cannot take its task: {_brief(error)}", hint=hint
        ) from error
    return function, task


def unpacked(data: bytes) -> Any:  # noqa: ANN401 - whatever the function returned
    """Return the result of a call, or raise its error."""
    fine, value = pickle.loads(data)  # noqa: S301 - see the module
    if fine:
        return value
    raise cast("BaseException", value)


def _packed_error(error: Exception) -> bytes:
    """Return the pickle of an error; of one that cannot be pickled, that of its text."""
    if not isinstance(error, errors.CkptStoreError):
        error.add_note("in a worker:\n" + "".join(traceback.format_exception(error)))
    try:
        data = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        if type(pickle.loads(data)[1]) is type(error):  # noqa: S301 - our own bytes
            return data
    except Exception:  # noqa: BLE001, S110 - anything may be wrong with a foreign class: see below
        pass
    told = errors.CkptStoreError(f"a task failed: {_brief(error)}")
    return pickle.dumps((False, told), pickle.HIGHEST_PROTOCOL)


def no_answer(error: Exception) -> errors.WorkerDiedError:
    """Return the error for a failure of an executor or scheduler, rather than of a task."""
    msg = f"the workers do not answer: {_brief(error)}"
    hint = "what was done stays done: see their logs, whether they have the same Python and "
    return errors.WorkerDiedError(msg, hint=f"{hint}ckptstore, and run it again")


def _version() -> str:
    """Return the version of the package; at run time, since it is above this module."""
    return str(importlib.import_module("ckptstore").__version__)


def _brief(error: Exception) -> str:
    """Return the kind of an error and the beginning of the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
