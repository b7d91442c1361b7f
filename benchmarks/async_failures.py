"""Failures behind a save in the background, and their reports: every row is provoked live.

Against ``torch.distributed.checkpoint``: its ``save``, and its ``async_save`` with the default
engine, a thread. A silent row passed off missing or mixed data as success, or reported nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.measure import FAILURES, say
from benchmarks.outcomes import Row, row_of_saves, threads_may_die
from benchmarks.peers import empty_like
from benchmarks.states import State, same, seeded_tensors
from ckptstore.backends.base import Backend, Buffer, ObjectWriter
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend, WrapperWriter
from ckptstore.config import Options
from ckptstore.repo import create_on
from ckptstore.store import Store

__all__ = ["BrokenBackend", "failures_of_async_saves"]

_REPO = Path(__file__).resolve().parent.parent
_RUN = "bench"
_ENGINES = ("thread", "process")
_THREADS = 4


def failures_of_async_saves(space: Workspace, *, tries: int) -> list[Row]:
    """Provoke all failures; return the rows.

    Parameters
    ----------
    tries
        Saves a row, since some outcomes depend on which thread is hit.
    """
    rows: list[Row] = []
    for code, name in ((errno.ENOSPC, "ENOSPC"), (errno.EIO, "EIO")):
        rows += _writes_fail(space, code, name, tries)
        say(f"async failures: {name}")
    rows += _nobody_asks(space)
    rows += _changed(space, tries)
    rows += _killed(space)
    say("async failures: changed, killed")
    return rows


def _state(seed: int, *, elements: int = 1 << 16) -> State:
    return seeded_tensors(seed, count=8, elements=elements)


# --- a write fails ------------------------------------------------------------------------------


def _writes_fail(space: Workspace, code: int, name: str, tries: int) -> list[Row]:
    """Make every write of data fail, in each tool at the call that writes."""
    fault = f"{name} where data is written"
    good = ("raised",)
    rows = []
    ways: list[tuple[str, Callable[[State, Path], None]]] = [
        (f"DCP save, {_THREADS} threads", _dcp_save),
        (f"DCP async_save, {_THREADS} threads", _dcp_async),
    ]
    for tool, save in ways:
        outcomes: Counter[str] = Counter()
        for _ in range(tries):
            with _dcp_fails(code):
                outcomes[_dcp_outcome(_state(1), space.fresh(), save)] += 1
        rows.append(row_of_saves(fault, tool, outcomes, good))
    for engine in _ENGINES:
        outcomes = Counter(_store_outcome(space.fresh(), code, engine) for _ in range(tries))
        rows.append(row_of_saves(fault, f"ckptstore save_async, {engine}", outcomes, good))
    return rows


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, thread_count=_THREADS, sync_files=True)


def _dcp_save(state: State, folder: Path) -> None:
    dcp_save(state, storage_writer=_writer(folder), no_dist=True)


def _dcp_async(state: State, folder: Path) -> None:
    future = dcp_async_save(state, storage_writer=_writer(folder), no_dist=True)
    assert not isinstance(future, AsyncSaveResponse)  # noqa: S101 - the default stager's answer
    future.result()


@contextmanager
def _dcp_fails(code: int, *, every: bool = False) -> Iterator[None]:
    """Make DCP's file system fail when a thread that its writer started opens a file of data.

    Parameters
    ----------
    every
        Fail in every thread.
    """
    genuine = FileSystem.create_stream

    def failing(self: FileSystem, path: Any, mode: str) -> Any:  # noqa: ANN401 - DCP's own types
        started = threading.current_thread().name.startswith("Thread-")
        if str(path).endswith(".distcp") and (every or started):
            raise OSError(code, os.strerror(code), str(path))
        return genuine(self, path, mode)

    with patch.object(FileSystem, "create_stream", failing), threads_may_die():
        yield


def _dcp_outcome(state: State, folder: Path, save: Callable[[State, Path], None]) -> str:
    try:
        save(state, folder)
    except FAILURES:
        return "raised"
    return f"returned success, {_dcp_loads(state, folder)}"


def _dcp_loads(state: State, folder: Path) -> str:
    target = empty_like(state)
    try:
        dcp_load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    except FAILURES:
        return "cannot be loaded"
    return "loads" if same(state, target) else "loads wrong"


class BrokenBackend(WrapperBackend):
    """Makes the kernel fail every write of a pack; also in a child process."""

    def __init__(self, inner: Backend, code: int) -> None:
        super().__init__(inner)
        self._code = code

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that fails."""
        return _BrokenWriter(self.inner.open_writer(key), self._code)

    def __reduce__(self) -> tuple[object, ...]:
        return BrokenBackend, (self.inner, self._code)


class _BrokenWriter(WrapperWriter):
    def __init__(self, inner: ObjectWriter, code: int) -> None:
        super().__init__(inner)
        self._code = code

    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        with patch("os.writev", side_effect=OSError(self._code, os.strerror(self._code))):
            self.inner.write(data)


def _broken(folder: Path, code: int, engine: str) -> Store:
    backend = BrokenBackend(open_backend(folder / "store"), code)
    return Store(create_on(backend, options=Options(engine=engine)))


def _store_outcome(folder: Path, code: int, engine: str) -> str:
    with _broken(folder, code, engine) as store:
        pending = store.run(_RUN).save_async(_state(1), step=1)
        try:
            pending.result()
        except ckptstore.CkptStoreError:
            return "raised, but a version appeared" if store.versions() else "raised"
        return "returned success"


# --- nobody asks --------------------------------------------------------------------------------


def _nobody_asks(space: Workspace) -> list[Row]:
    """Make a save fail whose future is dropped, as in a loop that saves and goes on."""
    fault = "ENOSPC, and the training never asks the pending save"
    folder = space.fresh()
    with _dcp_fails(errno.ENOSPC, every=True), _logged() as records:
        future = dcp_async_save(_state(1), storage_writer=FileSystemWriter(folder), no_dist=True)
        assert not isinstance(future, AsyncSaveResponse)  # noqa: S101 - the default stager's answer
        wait([future])
        del future
    if (folder / ".metadata").exists():
        msg = "the save of DCP did not fail"
        raise RuntimeError(msg)
    told = ["it is logged"] if records else []
    if _raises(lambda: _dcp_async(_state(2), space.fresh())):
        told.append("the next save raises")
    rows = [_heard(fault, "DCP async_save", told)]
    for engine in _ENGINES:
        with _logged() as records:
            store = _broken(space.fresh(), errno.ENOSPC, engine)
            store.run(_RUN).save_async(_state(1), step=1)
            raises = _raises(lambda: store.run(_RUN).save_async(_state(2), step=2))  # noqa: B023
            store.close()
        told = (["it is logged"] if records else []) + (["the next save raises"] if raises else [])
        store = _broken(space.fresh(), errno.ENOSPC, engine)
        store.run(_RUN).save_async(_state(1), step=1)
        if _raises(store.close):
            told.append("without one, close raises")
        rows.append(_heard(fault, f"ckptstore save_async, {engine}", told))
    return rows


def _heard(fault: str, tool: str, told: Sequence[str]) -> Row:
    observed = "; ".join(told) or "nothing is logged, and the next save raises nothing"
    return Row(fault=fault, tool=tool, observed=observed, silent=not told)


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except FAILURES:
        return True
    return False


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """Collect all log records of level warning or higher."""
    records: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keeping(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger().removeHandler(handler)


# --- a state that is changed --------------------------------------------------------------------


def _changed(space: Workspace, tries: int) -> list[Row]:
    """Change the state right after the call, while it is still being copied."""
    fault = "state changed in place while it is staged in the background"
    good = ("raised, naming the tensor",)
    outcomes = Counter(_dcp_changed(space.fresh()) for _ in range(tries))
    rows = [row_of_saves(fault, "DCP async_save, use_async_staging", outcomes, good)]
    for engine in _ENGINES:
        outcomes = Counter(_store_changed(space.fresh(), engine) for _ in range(tries))
        rows.append(row_of_saves(fault, f"ckptstore save_async, {engine}", outcomes, good))
    return rows


_LARGE = 1 << 22


def _dcp_changed(folder: Path) -> str:
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    state = {"model": {f"w{place}": torch.zeros(_LARGE) for place in range(8)}}
    try:
        response = dcp_async_save(
            state, storage_writer=_writer(folder), no_dist=True, async_stager=stager
        )
        for tensor in state["model"].values():
            tensor.add_(1)
        assert isinstance(response, AsyncSaveResponse)  # noqa: S101 - what this stager gives
        response.upload_completion.result()
    except FAILURES:
        return "raised"
    finally:
        stager.close()
    loaded = empty_like(state)
    dcp_load(loaded, storage_reader=FileSystemReader(folder), no_dist=True)
    ends = [(float(t.min()), float(t.max())) for t in loaded["model"].values()]
    if len(set(ends)) == 1 and ends[0][0] == ends[0][1]:
        return "returned success, one moment"
    return "returned success, mixes tensors of before and after"


def _store_changed(folder: Path, engine: str) -> str:
    with ckptstore.open(folder, create=True, engine=engine) as store:
        state = {"model": {f"w{place}": torch.zeros(_LARGE) for place in range(8)}}
        pending = store.run(_RUN).save_async(state, step=1, stage="background")
        for tensor in state["model"].values():
            tensor.add_(1)
        try:
            pending.result()
        except ckptstore.CkptStoreError as error:
            named = "'model.w" in str(error) and not store.versions()
            return "raised, naming the tensor" if named else "raised"
        return "returned success"


# --- a trainer that is killed -------------------------------------------------------------------


def _killed(space: Workspace) -> list[Row]:
    """Kill the trainer right after the call has returned, while data is being written."""
    rows = []
    for tool in ("DCP async_save", *(f"ckptstore save_async, {engine}" for engine in _ENGINES)):
        folder = space.fresh()
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.async_failures", tool, str(folder)],
            cwd=_REPO,
            check=False,
            capture_output=True,
        )
        if child.returncode != -signal.SIGKILL:
            msg = f"{tool} was not killed: {child.stderr.decode()[-2000:]}"
            raise RuntimeError(msg)
        rows.append(
            Row(
                fault="SIGKILL of the trainer right after the save was staged",
                tool=tool,
                observed=_left(tool, folder),
                silent=False,
            )
        )
    return rows


def _left(tool: str, folder: Path) -> str:
    """Return a description of the folder once nobody writes any more."""
    state = _state(7, elements=1 << 21)
    if tool.startswith("DCP"):
        return {"loads": "the save is there, whole"}.get(
            _dcp_loads(state, folder), "the save is lost"
        )
    pid = (folder / "saver").read_text()
    pause = threading.Event()
    while int(pid) and _is_alive(pid):
        pause.wait(0.05)
    with ckptstore.open(folder / "store", read_only=True) as store:
        if not store.versions():
            return "the save is lost"
        return (
            "the save is there, whole"
            if same(state, store.load(f"{_RUN}@latest"))
            else "the save is there, and wrong"
        )


def _is_alive(pid: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"  # ended, but nobody has waited for it


def _child(tool: str, folder: Path) -> None:
    state = _state(7, elements=1 << 21)
    if tool.startswith("DCP"):
        dcp_async_save(state, storage_writer=_writer(folder), no_dist=True)
    else:
        store = ckptstore.open(folder / "store", create=True, engine=tool.rpartition(" ")[2])
        pending = store.run(_RUN).save_async(state, step=1)
        assert pending.staged  # noqa: S101 - what the row says
        (folder / "saver").write_text(str(store._session.saver.dispatcher.pid))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
