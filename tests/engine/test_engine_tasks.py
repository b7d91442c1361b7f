"""Engines: results, order, bounds, errors, and workers that die; over each kind of engine."""

from __future__ import annotations

import os
import pickle
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import enginetasks as tasks
import pytest
from daskcluster import Cluster

from ckptstore import errors, limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import open_posix
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import Options
from ckptstore.engine.calls import packed, run_packed, unpacked
from ckptstore.engine.engine import Engine, check_spec, open_engine
from ckptstore.errors import (
    CkptStoreError,
    CorruptTensorError,
    InvalidInputError,
    LimitError,
    MissingDependencyError,
    StorageError,
    WorkerDiedError,
)

KINDS = ("threads", "dask", "own threads", "own processes")


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Return an engine of each kind, two tasks at once."""
    spec: Any = request.param
    with ExitStack() as stack:
        if spec == "dask":
            running: Cluster = request.getfixturevalue("cluster")
            running.await_workers()
            spec = running.address
        elif spec == "own threads":
            spec = stack.enter_context(ThreadPoolExecutor(2))
        elif spec == "own processes":
            spec = stack.enter_context(ProcessPoolExecutor(2))
        yield stack.enter_context(open_engine(spec, workers=2))


def test_results_come_whole_and_in_order(engine: Engine) -> None:
    """Each task's result comes once, in the order of the tasks."""
    assert list(engine.map(tasks.square, range(20))) == [n * n for n in range(20)]
    assert list(engine.map(tasks.square, [])) == []
    assert engine.workers == 2
    share = engine.options_of_tasks(Options(host_bytes=1 << 28, workers=8)).host_bytes
    assert share in (1 << 27, 1 << 28)


def test_tasks_are_taken_as_there_is_room(engine: Engine) -> None:
    """Never more than a bounded number is under way or waits to be taken."""
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    came = 0
    for _ in engine.map(tasks.square, numbers()):
        came += 1
        assert len(taken) - came <= 4 * limits.ENGINE_AHEAD * engine.workers
    assert came == 100


def test_a_failure_has_its_own_type_and_ends_the_rest(engine: Engine) -> None:
    """What a task raises is raised where its result is waited for; the engine stays of use."""
    with pytest.raises(CorruptTensorError, match="it failed -- do better"):
        list(engine.map(tasks.fail, ["CorruptTensorError"]))
    with pytest.raises((CkptStoreError, tasks.Strange), match="never seen"):
        list(engine.map(tasks.strange, [0]))
    nothing: Any = [None]
    with pytest.raises(TypeError):
        list(engine.map(tasks.square, nothing))
    assert list(engine.map(tasks.square, [3])) == [9]


def test_a_plan_that_fails_fails_the_whole(engine: Engine) -> None:
    """An error of who makes the tasks comes through as it is."""

    def broken() -> Iterator[int]:
        yield 1
        raise LimitError("no further")

    with pytest.raises(LimitError, match="no further"):
        list(engine.map(tasks.square, broken()))


@pytest.mark.parametrize("kind", errors.__all__)
def test_every_error_survives_the_trip(kind: str) -> None:
    """Class, message, hint and attributes of every error class are the same on the other side."""
    with pytest.raises(getattr(errors, kind)) as caught:
        unpacked(run_packed(packed(tasks.fail, kind)))
    error = caught.value
    assert (type(error).__name__, error.message, error.hint) == (kind, "it failed", "do better")
    assert getattr(error, "keys", frozenset()) == frozenset(
        {"packs/a"} if kind == "CondemnedError" else ()
    )
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - of this test
    assert again.__dict__ == error.__dict__


def test_the_task_of_a_dead_worker_is_run_again(tmp_path: Path, cluster: Cluster) -> None:
    """SIGKILL of workers in the middle: Dask runs their tasks elsewhere, and every result comes."""
    markers = [str(tmp_path / f"marker-{n}") for n in range(3)]
    with open_engine(cluster.address, workers=2) as engine:
        found = list(engine.map(tasks.die_once, markers))
        assert len(found) == 3
        assert list(engine.map(tasks.square, range(5))) == [0, 1, 4, 9, 16]
    assert os.getpid() not in found


def test_a_task_that_kills_is_given_up(cluster: Cluster) -> None:
    """A task whose worker dies each time ends with a typed error; the engine goes on."""
    with open_engine(cluster.address, workers=2) as engine:
        with pytest.raises(WorkerDiedError, match=r"KilledWorker: .* -- what was done stays done"):
            list(engine.map(tasks.die, [0]))
        assert list(engine.map(tasks.square, [2])) == [4]


def test_an_executor_that_breaks_is_told_of() -> None:
    """A pool that a dead worker breaks ends it with a typed error and what to do, each time."""
    with ProcessPoolExecutor(1) as pool, open_engine(pool) as engine:
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match=r"BrokenProcessPool: .*run it again"):
                list(engine.map(tasks.die, range(3)))


@pytest.mark.slow
def test_a_scheduler_that_is_gone_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No one waits for ever: the scheduler dies while a task runs, and a typed error comes."""
    monkeypatch.setattr(limits, "ENGINE_LOOK_S", 0.2)
    with Cluster(workers=1) as mine, open_engine(mine.address) as engine:

        def plan() -> Iterator[str]:
            yield str(tmp_path)
            while not any(tmp_path.glob("*.pid")):
                time.sleep(0.01)
            mine.kill_scheduler()

        with pytest.raises(WorkerDiedError):
            list(engine.map(tasks.hold, plan()))


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a missing scheduler nor one without workers is waited for without end."""
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT_S", 0.5)
    with (
        pytest.raises(StorageError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
        open_engine("dask://127.0.0.1:9"),
    ):
        pass
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(limits, "ENGINE_WORKERS_WAIT_S", 0.5)
    with (
        Cluster(workers=0) as empty,
        pytest.raises(StorageError, match="has no workers -- start some: dask worker"),
        open_engine(empty.address),
    ):
        pass


def test_without_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(MissingDependencyError, match=r"pip install 'ckptstore\[dask\]'"),
        open_engine("dask://localhost:8786"),
    ):
        pass


def test_what_is_no_engine_is_refused() -> None:
    """Texts that name none, other things, and no workers at all; the hint says what to do."""
    for right in ("threads", "dask://h:8786", "tcp://h:8786", "tls://10.0.0.1:8786"):
        assert check_spec(right) == right
    wrong: Any
    for wrong in ("", "processes", "dask:local", "dask://host", "dask://u:p@h:1", 7, object()):
        with pytest.raises(InvalidInputError, match="unknown engine") as told, open_engine(wrong):
            pass
        for advice in ("dask scheduler, dask worker tcp://HOST:PORT", "ProcessPoolExecutor"):
            assert advice in (told.value.hint or "")
    for count in (0, -1):
        with pytest.raises(InvalidInputError, match="workers"), open_engine(workers=count):
            pass


class Hooked(WrapperBackend):
    """A backend whose options hold a function."""

    def __init__(self) -> None:
        super().__init__(open_posix("/nowhere"))
        self.secret = "hunter2"  # noqa: S105 - it must not be shown
        self.hook = lambda: self.secret


def test_what_cannot_travel_is_named_and_not_shown() -> None:
    """Options that cannot be pickled, storage in memory, tasks too large: said at once, in words.

    No value of an option is in the message.
    """
    with ProcessPoolExecutor(1) as pool, open_engine(pool) as engine:
        with pytest.raises(
            InvalidInputError, match=r"storage .*/nowhere, with its options"
        ) as told:
            engine.share_storage(Hooked())
        assert "hunter2" not in str(told.value)
        with pytest.raises(InvalidInputError, match="in the memory of this process"):
            engine.share_storage(MemoryBackend("here"))
        with pytest.raises(InvalidInputError, match="a task cannot be sent"):
            list(engine.map(callable, [lambda: 1]))
        with pytest.raises(InvalidInputError, match="a task cannot be sent"):
            list(engine.map(lambda n: n, [1]))
        with pytest.raises(LimitError, match="a task takes"):
            list(engine.map(len, [bytes(limits.ENGINE_TASK_BYTES_MAX)]))
        assert not engine.in_process
    with open_engine(workers=1) as engine:
        assert isinstance(engine.share_storage(Hooked()).value, Hooked)
        assert engine.in_process


def test_a_backend_is_made_once_in_a_process(tmp_path: Path) -> None:
    """Tasks of one process use one backend, with its connections, and it is the same storage."""
    backend = open_backend(tmp_path)
    with ProcessPoolExecutor(1) as pool, open_engine(pool) as engine:
        shared = engine.share_storage(backend)
        data = [pickle.dumps(shared) for _ in range(2)]
    first, second = (pickle.loads(one) for one in data)  # noqa: S301 - of this test
    assert first is second
    assert first.value.url == backend.url
    assert pickle.loads(pickle.dumps(first)) is first  # noqa: S301


def test_what_is_not_installed_at_a_worker_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a package that a backend needs ends with a typed error and what to do."""
    module = types.ModuleType("only_here")
    module.__dict__["Thing"] = type("Thing", (), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    data = packed(str, module.Thing())
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(StorageError, match="a worker cannot take its task: ModuleNotFoundError"):
        unpacked(run_packed(data))


def test_a_cancelled_task_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody else shuts an executor down: no one waits for what it has dropped."""
    monkeypatch.setattr(limits, "ENGINE_LOOK_S", 0.2)
    for kind in (ProcessPoolExecutor, ThreadPoolExecutor):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        with kind(1) as pool, open_engine(pool, workers=6) as engine:

            def plan(pool: Executor = pool, folder: Path = folder) -> Iterator[str]:
                yield from [str(folder)] * 6
                pool.shutdown(wait=False, cancel_futures=True)
                (folder / "go").touch()  # the first task has waited for that

            with pytest.raises(WorkerDiedError, match="do not answer: CancelledError"):
                list(engine.map(tasks.hold, plan()))
            with pytest.raises(WorkerDiedError, match="after shutdown"):
                list(engine.map(tasks.hold, [str(folder)]))


class _Manned:
    """Executor that has some number of workers at each look."""

    def __init__(self, workers: list[int]) -> None:
        self._workers = iter(workers)

    @property
    def _max_workers(self) -> int:
        return next(self._workers)


_LOOKS = int(limits.ENGINE_WORKERS_WAIT_S / limits.ENGINE_LOOK_S)


@pytest.mark.parametrize(
    ("workers", "given_up"),
    [
        ([1] * 3 * _LOOKS, False),
        ([0] * _LOOKS + [2] + [0] * _LOOKS, False),
        ([0] * (_LOOKS + 1), True),
        ([1] * _LOOKS + [0] * (_LOOKS + 1), True),
    ],
    ids=["alive", "back in time", "never there", "gone"],
)
def test_only_absent_workers_are_given_up(
    monkeypatch: pytest.MonkeyPatch, workers: list[int], given_up: bool
) -> None:
    """A task may take as long as it likes while workers are there; without any it ends in time."""
    pool: Any = _Manned(workers)
    looks, task = iter(workers), Future[int]()

    def look(pending: set[Any], *_: object) -> tuple[set[Any], set[Any]]:
        return (pending, set()) if next(looks, None) is None else (set(), pending)

    monkeypatch.setattr("ckptstore.engine.engine.futures.wait", look)
    with pytest.raises(WorkerDiedError, match="no worker has been") if given_up else nullcontext():
        assert Engine(pool)._wait({task}) == {task}
    assert list(looks) == []


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with another ckptstore run nothing, and say which they have."""
    data = packed(tasks.square, 3)
    monkeypatch.setattr("ckptstore.__version__", "99.0")
    with pytest.raises(StorageError, match=r"the workers have ckptstore 99\.0, not"):
        unpacked(run_packed(data))
