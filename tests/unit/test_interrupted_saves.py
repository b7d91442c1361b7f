"""Saves that are interrupted, or fail, while threads of theirs are still at work."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import errors
from ckptstore.backends.base import Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import run_ops
from ckptstore.catalog.early_stopping import EarlyStopping
from ckptstore.catalog.log import Log
from ckptstore.committing import put_once
from ckptstore.config import SYSTEM
from ckptstore.format.keys import commit_key
from ckptstore.saver import save_job
from ckptstore.saver.saver import EngineSupervisor, Saver
from ckptstore.saver.staging import Staging


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_helper_that_fails_leaves_none_behind(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is used again when all threads have ended: the next save is of its own state alone."""
    failed, copy = threading.Event(), Staging._copy_part

    def fails(self: Staging, place: int, start: int, size: int) -> None:
        if not start and not failed.is_set():
            failed.set()
            raise MemoryError
        failed.wait()
        copy(self, place, start, size)

    count = 8 << 20
    with ckptstore.open(tmp_path / "s", create=True, engine=engine, workers=3) as store:
        run = store.run("a")
        monkeypatch.setattr(Staging, "_copy_part", fails)
        with pytest.raises(MemoryError):
            run.save_async({"w": torch.full((count,), 1.0)}, step=1)
        run.save_async({"w": torch.full((count,), 2.0)}, step=2).result()
        assert torch.equal(run.load("latest")["w"], torch.full((count,), 2.0))


def _interrupts(name: str, monkeypatch: pytest.MonkeyPatch, part: type) -> None:
    """Interrupt a method once it is done and memory was lent, if it has a save to show that."""
    method = getattr(part, name)

    def done(*given: object, **named: object) -> object:
        found = method(*given, **named)
        if any(getattr(one, "arena", given) is not None for one in given[1:]):
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(part, name, done)


@pytest.fixture
def _python_handles_ctrl_c() -> Iterator[None]:
    """Have Python's handler of SIGINT, which is not there in what a shell has in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_ctrl_c")
@pytest.mark.parametrize(
    ("part", "name"), [(EngineSupervisor, "lend"), (Staging, "__init__"), (Saver, "_admitted")]
)
def test_memory_comes_back_whenever_a_save_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, name: str
) -> None:
    """Ctrl-C between the loan of memory and its use: the next save does not wait for it."""
    size = 4 << 20
    with ckptstore.open(tmp_path / "s", create=True, engine="thread", staging_bytes=size) as store:
        run = store.run("a")
        with monkeypatch.context() as patch:
            _interrupts(name, patch, part)
            with pytest.raises(KeyboardInterrupt):
                run.save_async({"w": torch.zeros(size // 4)}, step=1)
        store.wait()
        saved = run.save_async({"w": torch.ones(size // 4)}, step=2, if_busy="fail")
        assert saved.result() is not None


def test_a_log_that_fails_ends_no_save(tmp_path: Path) -> None:
    """A handler of the user's log may raise: the save is durable all the same."""

    class Away(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ConnectionError

    log, handler = logging.getLogger("ckptstore.saves"), Away()
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
            for step in (1, 2):
                saved = store.run("a").save_async({"w": torch.ones(4)}, step=step).result()
                assert saved is not None
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def test_a_rollback_waits_for_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that began before it is not newer than it, and is what ``latest`` names."""
    waited, wait, write = threading.Event(), Saver.wait, save_job.write_job

    def waits(self: Saver, run: str | None = None) -> None:
        waited.set()
        wait(self, run)

    def late(*given: object, **named: object) -> object:
        waited.wait()
        return write(*given, **named)  # type: ignore[arg-type]

    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        run = store.run("a", metrics={"loss": "min"})
        run.save({"w": torch.ones(2)}, step=1, metrics={"loss": 1.0})
        monkeypatch.setattr(Saver, "wait", waits)
        monkeypatch.setattr(save_job, "write_job", late)
        pending = run.save_async({"w": torch.zeros(2)}, step=2, metrics={"loss": 9.0})
        run.rollback("best:loss")
        waited.set()
        pending.result()
        assert run.resolve("latest").step == 1
        waited.clear()
        run.save_async({"w": torch.zeros(2)}, step=3)
        assert run.rollback("latest").step == 3
        waited.clear()
        new = store.run("b")
        new.save_async({"w": torch.zeros(2)}, step=1)
        assert new.rollback("latest").step == 1


def test_a_single_writer_knows_its_commit_after_a_lost_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was written, and nobody said so: the next commit follows it."""
    backend = MemoryBackend("one")
    log = Log(backend, single_writer=True)

    def create(name: str) -> None:
        log.append(lambda _: [run_ops.CreateRun(run=name)])

    create("a")
    put = backend.put

    def lost(key: str, data: bytes) -> None:
        put(key, data)
        monkeypatch.setattr(log._reader, "find", partial(_fails, "reading back"))
        raise errors.TransientStorageError("the answer")

    with monkeypatch.context():
        monkeypatch.setattr(backend, "put", lost)
        with pytest.raises(errors.AmbiguousWriteError):
            create("b")
    monkeypatch.undo()
    create("c")
    assert [run.name for run in log.refresh().runs()] == ["a", "b", "c"]


class Lossy(MemoryBackend):
    """Loses the answers to creates, and notes what is made durable."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.durable: list[str] = []
        self.broken = False

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        raise errors.AmbiguousWriteError("no answer")

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, data)
        raise errors.AmbiguousWriteError("no answer")

    def make_durable(self, keys: Iterable[str]) -> None:
        self.durable += keys
        if self.broken:
            raise errors.StorageError("sync")


@pytest.mark.parametrize("alone", [False, True])
def test_what_was_read_back_is_made_durable(alone: bool) -> None:
    """It is visible, and its name may not be on the disk yet; if it cannot be, nobody knows."""
    backend = Lossy(f"lossy-{alone}")
    log = Log(backend, single_writer=alone)
    log.append(lambda _: [run_ops.CreateRun(run="a")])
    assert backend.durable == [commit_key(1)]
    put_once(backend, "record", b"x", SYSTEM, bytes_max=9, conditional=not alone)
    assert backend.durable[1:] == ["record"]
    backend.broken = True
    with pytest.raises(errors.AmbiguousWriteError):
        log.append(lambda _: [run_ops.CreateRun(run="b")])


def _fails(what: str, *_: object, **__: object) -> None:
    raise errors.TransientStorageError(what)


def test_an_infinite_loss_is_worse_than_any_number() -> None:
    """Also where the least gain is a share of the best value."""
    stopper = EarlyStopping("loss", mode="min", patience=3, min_delta=0.1, relative=True)
    for step, loss in enumerate([float("inf"), 3.0, 2.0, 1.0]):
        assert not stopper.update(step, loss)
    assert stopper.best_value == 1.0
