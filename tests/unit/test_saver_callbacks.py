"""Saves in the background whose callbacks misbehave, and whose messages cannot be sent."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.errors import LimitError, OperationCancelledError, SaverDiedError
from ckptstore.events import Progress, silent
from ckptstore.saver.arena import Arena
from ckptstore.saver.messages import Channel, Close, Compare, Lend, Setup
from ckptstore.saver.pending import PendingSave
from ckptstore.saver.process_engine import ProcessEngine
from ckptstore.saver.save_job import SaveJob
from ckptstore.saver.save_state import BackgroundSave
from ckptstore.saver.saver import ThreadEngine
from ckptstore.saver.staging import Staging

pytestmark = pytest.mark.short(sample=1)

ENGINES = ("thread", "process")
_PATIENCE_S = 300.0


def _state(seed: int = 0, elements: int = 1_000_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((elements,), float(seed))}


# --- callbacks ----------------------------------------------------------------------------------
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_progress_callback_that_raises_is_logged(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The save becomes durable all the same, with either engine, and so does the next one."""

    def progress(_: Progress) -> None:
        msg = "a progress bar that was closed"
        raise RuntimeError(msg)

    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        with caplog.at_level(logging.ERROR, "ckptstore"):
            run.save_async(_state(1), step=1, progress=progress).result(_PATIENCE_S)
        run.save_async(_state(2), step=2).result(_PATIENCE_S)
        assert [version.step for version in run.versions()] == [1, 2]
    assert "the progress callback of the save of gpt@1 failed" in caplog.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_save_is_cancelled_in_its_progress_callback(tmp_path: Path, engine: str) -> None:
    """The answer comes, and is true; the save ends, and the one after it is not held up."""
    known = threading.Event()
    pending: list[PendingSave] = []
    answers: list[bool] = []

    def progress(_: Progress) -> None:
        known.wait()
        if not answers:
            answers.append(pending[0].cancel())

    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        pending.append(run.save_async(_state(1), step=1, progress=progress))
        known.set()
        try:
            pending[0].result(_PATIENCE_S)
            cancelled = False
        except OperationCancelledError:
            cancelled = True
        run.save_async(_state(2), step=2).result(_PATIENCE_S)
        assert [version.step for version in run.versions()] == ([2] if cancelled else [1, 2])
    assert answers == [cancelled]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_a_child_tells_cannot_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong in the thread that reads, a save comes to its end, and another begins."""
    passed_on = ProcessEngine._pass_on
    broken: list[object] = []

    def pass_on(engine: ProcessEngine, message: object) -> None:
        if engine.began and not broken:
            broken.append(message)
            msg = "a fault of the reader"
            raise RuntimeError(msg)
        passed_on(engine, message)

    monkeypatch.setattr(ProcessEngine, "_pass_on", pass_on)
    with ckptstore.open(tmp_path / "s", create=True, engine="process") as store:
        run = store.run("gpt")
        version = run.save_async(_state(1), step=1).result(_PATIENCE_S)
        assert version.step == 1  # the child finished it, and the log knows
        run.save_async(_state(2), step=2).result(_PATIENCE_S)
        assert [version.step for version in run.versions()] == [1, 2]
    assert "cannot be followed any more" in caplog.text


# --- messages that cannot be sent ---------------------------------------------------------------
def _refuse(
    patch: pytest.MonkeyPatch, kind: type[object], number: int, times: int = sys.maxsize
) -> list[object]:
    """Let the sending of a kind of message fail so often; return those that were not sent."""
    send = Channel.send
    refused: list[object] = []

    def sending(channel: Channel, message: object, fd: int = -1) -> None:
        if isinstance(message, kind) and len(refused) < times:
            refused.append(message)
            raise OSError(number, os.strerror(number))
        send(channel, message, fd)

    patch.setattr(Channel, "send", sending)
    return refused


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Lend, SaveJob, Compare])
def test_a_message_that_cannot_be_sent_fails_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[object]
) -> None:
    """No descriptor is left: the save fails with a typed error, and the next one is durable."""
    refused = _refuse(monkeypatch, kind, errno.EMFILE, times=1)
    with ckptstore.open(tmp_path / "s", create=True, engine="process") as store:
        run = store.run("gpt")
        with pytest.raises(LimitError, match="cannot be handed to the process"):
            run.save_async(_state(1), step=1).result(_PATIENCE_S)
        run.save_async(_state(2), step=2).result(_PATIENCE_S)
        assert [version.step for version in run.versions()] == [2]
    assert len(refused) == 1


@pytest.mark.timeout(600)
def test_a_child_that_cannot_be_told_the_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the stream tells it as much: what is under way becomes durable, close returns."""
    _refuse(monkeypatch, Close, errno.ENOMEM)
    with ckptstore.open(tmp_path / "s", create=True, engine="process") as store:
        store.run("gpt").save_async(_state(1), step=1)
    with ckptstore.open(tmp_path / "s") as store:
        assert [version.step for version in store.run("gpt").versions()] == [1]


@pytest.mark.slow
def test_a_child_that_cannot_be_told_where_to_save_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save raises a typed error at once, and the process that was begun for it ends."""
    with ckptstore.open(tmp_path / "s", create=True, engine="process") as store:
        with monkeypatch.context() as patched:
            _refuse(patched, Setup, errno.EMFILE)
            with pytest.raises(SaverDiedError, match="cannot be told"):
                store.run("gpt").save_async(_state(1), step=1)
        store.run("gpt").save_async(_state(2), step=2).result(_PATIENCE_S)


# --- several that wait --------------------------------------------------------------------------
@pytest.mark.timeout(600)
def test_several_threads_wait_until_a_state_is_staged(tmp_path: Path) -> None:
    """Each of them is told, in whatever order they come and go, and each can read the receipt."""
    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        store.run("gpt").save_async(_state(1), step=1).result(_PATIENCE_S)
        environment = store.repo.environment
    save = BackgroundSave(
        number=1,
        request=WriteRequest(run="gpt", step=2),
        retain=False,
        version_id="",
        began=environment.monotonic(),
        environment=environment,
        on_progress=silent,
    )
    save.returned()
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(save.wait_staged, _PATIENCE_S)
        short = [threads.submit(save.wait_staged, 0.001) for _ in range(3)]
        assert [one.result(_PATIENCE_S) for one in short] == [False] * 3
        assert save.numbers()["blocked_s"] >= 0
        save.staged()
        assert long.result(_PATIENCE_S)
    assert save.numbers() == save.numbers()  # nobody waits any more


# --- memory that is given up --------------------------------------------------------------------
@pytest.mark.timeout(600)
def test_the_handle_of_a_save_that_ended_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps it keeps neither the arena, nor the state, nor the job."""
    stagings: list[weakref.ref[Staging]] = []
    begin = Staging.begin

    def beginning(staging: Staging) -> None:
        stagings.append(weakref.ref(staging))
        begin(staging)

    monkeypatch.setattr(Staging, "begin", beginning)
    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        pending = store.run("gpt").save_async(_state(1), step=1)
        pending.result(_PATIENCE_S)
        save = pending._save
        assert (save.arena, save.job, save.staging, save.digests) == (None,) * 4
    gc.collect()  # the store is closed: the thread that took the digests has ended
    assert [one() for one in stagings] == [None]
    assert pending.durable


@pytest.mark.parametrize("shared", [True, False])
def test_the_pages_of_an_arena_that_was_given_up_are_freed(shared: bool) -> None:
    """They do not wait for the last one who looks at them, and who finds zeros from then on."""
    arena = Arena(1 << 21, shared=shared)
    view = arena.view
    view[:4] = b"mine"
    arena.drop()
    assert bytes(view[:4]) == bytes(4)


@pytest.mark.timeout(600)
def test_a_thread_that_writes_holds_no_arena_while_it_waits(tmp_path: Path) -> None:
    """An arena that the pool has given up is gone, though no other save has come since."""
    with ckptstore.open(tmp_path / "s", create=True, engine="thread") as store:
        store.run("gpt").save_async(_state(1), step=1).result(_PATIENCE_S)
        engine = store._session.saver.dispatcher.start()
        assert isinstance(engine, ThreadEngine)
        taken = engine._queue
        asked = threading.Event()

        class Watched:
            """Tells when the thread is back at the queue, with nothing in its hands."""

            def get(self) -> object:
                frame = sys._getframe(1)
                if "task" not in frame.f_locals:
                    asked.set()
                return taken.get()

            def put(self, task: object) -> None:
                taken.put(task)  # type: ignore[arg-type]

        engine._queue = Watched()  # type: ignore[assignment]
        store.run("gpt").save_async(_state(2), step=2).result(_PATIENCE_S)
        assert asked.wait(_PATIENCE_S)
