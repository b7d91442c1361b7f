"""A training that is begun again without being resumed is told so, once, and saved all the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.store import Run, Store, resume_check

SAYS = "was it started again without being resumed?"


def _state(step: int) -> dict[str, object]:
    return {"w": torch.full((100,), float(step)), "step": step}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with gpt@10 to gpt@30, of which this process knows nothing."""
    with ckptstore.open(tmp_path / "ckpts", create=True) as store:
        for step in (10, 20, 30):
            store.run("gpt").save(_state(step), step=step)
    monkeypatch.setattr(resume_check, "_chosen", {})
    return tmp_path / "ckpts"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """Open it as a training does that is started again."""
    with ckptstore.open(folder, engine="thread") as opened:
        yield opened


Save = Callable[[Run, int], object]
SAVES: dict[str, Save] = {
    "save": lambda run, step: run.save(_state(step), step=step),
    "save_async": lambda run, step: run.save_async(_state(step), step=step).result(),
}


@pytest.mark.parametrize(
    ("how", "engine"), [("save", "auto"), ("save_async", "thread"), ("save_async", "process")]
)
def test_a_first_save_that_goes_back_is_told_once(
    folder: Path, how: str, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the run and both steps, and says what to do; every save is there."""
    with ckptstore.open(folder, engine=engine) as store:
        run = store.run("gpt")
        for step in (10, 20, 30):
            SAVES[how](run, step)
        steps = [version.step for version in run.versions()]

    told = [record.getMessage() for record in caplog.records if record.name == "ckptstore"]
    assert len(told) == 1
    assert told[0].startswith("run gpt: step 10 is saved after step 30, and this process")
    for word in (SAYS, "run.load()", "run.rollback(", "store.fork("):
        assert word in told[0]
    assert steps == [10, 20, 30, 10, 20, 30]


CHOICES: dict[str, Callable[[Store], object]] = {
    "loaded": lambda store: store.load("gpt@10"),
    "loaded by the run": lambda store: store.run("gpt").load("latest"),
    "loaded lazily": lambda store: store.version("gpt"),
    "the newest sound one": lambda store: store.load("gpt@latest-valid"),
    "loaded into a model": lambda store: store.load_into("gpt", {"w": torch.zeros(100)}),
    "rolled back": lambda store: store.run("gpt").rollback(20),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("how", SAVES)
def test_who_has_loaded_is_told_nothing(
    store: Store, how: str, choice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Going back in steps is somebody's decision then, also on a store that is opened again."""
    CHOICES[choice](store)
    with ckptstore.open(store.url, engine=store.repo.options.engine) as again:
        SAVES[how](again.run("gpt"), 5)

    assert SAYS not in caplog.text


@pytest.mark.parametrize("how", SAVES)
def test_who_goes_on_is_told_nothing(
    store: Store, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A later step, a run that is new, and a fork that begins to count anew are nothing odd."""
    SAVES[how](store.run("gpt"), 31)
    SAVES[how](store.run("gpt"), 3)
    SAVES[how](store.run("new"), 0)
    SAVES[how](store.fork("gpt@30", "tuned"), 0)

    assert SAYS not in caplog.text


@pytest.mark.parametrize(
    ("how", "engine"), [("save", "auto"), ("save_async", "thread"), ("save_async", "process")]
)
def test_a_lower_step_names_the_newer_one(
    folder: Path, how: str, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each newer version, without a rollback, also after a load; equal steps are not."""
    with ckptstore.open(folder, engine=engine) as store:
        run = store.run("gpt")
        newest = run["latest"]
        run.load(10)
        for step in (30, 11, 12):
            SAVES[how](run, step)
        told = [record.getMessage() for record in caplog.records if record.name == "ckptstore"]
        assert [text.split(",")[0] for text in told] == ["run gpt: step 11 is saved after step 30"]
        assert run["latest"].step == 12
        run.rollback("#" + told[0].partition("#")[2].partition("'")[0])  # as the message says
        assert run["latest"].step == newest.step
        run.rollback(20)
        SAVES[how](run, 21)
        fork = store.fork("gpt@30", "tuned")
        SAVES[how](fork, 0)
        SAVES[how](fork, 1)
    assert caplog.text.count("is saved after") == 1


def test_what_another_run_or_store_holds_does_not_count(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To have loaded a pretrained model from elsewhere is not to have resumed this run."""
    with ckptstore.open(tmp_path / "other", create=True) as other, ckptstore.open(folder) as store:
        other.run("gpt").save(_state(1), step=1)
        other.load("gpt")
        store.run("base").save(_state(1), step=1)
        store.load("base")
        store.run("gpt").save(_state(30), step=30)

    assert SAYS in caplog.text


def test_a_skipped_save_is_no_first_one(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The first save that takes place is looked at, not one that was asked for."""
    release = threading.Event()
    store._session.saver._stager.submit(release.wait)
    pending = store.run("other").save_async(_state(1), step=1, stage="background")
    skipped = store.run("gpt").save_async(_state(1), step=1, if_busy="skip")
    release.set()
    pending.result()
    assert skipped.skipped
    assert SAYS not in caplog.text

    store.run("gpt").save(_state(1), step=1)
    assert SAYS in caplog.text


PROGRAM = """
import logging, sys, torch, ckptstore
logging.basicConfig(format="%(levelname)s %(message)s")
with ckptstore.open(sys.argv[1], create=True) as store:
    for step in (1, 2):
        store.run("gpt").save_async({"w": torch.ones(10)}, step=step)
"""


@pytest.mark.slow
def test_a_script_that_is_run_twice(tmp_path: Path) -> None:
    """What a user sees who has no line that loads: nothing, then one warning, by one process."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "ckpts")]
    told = [
        subprocess.run(command, capture_output=True, text=True, check=True).stderr for _ in range(2)
    ]

    assert SAYS not in told[0]
    assert told[1].count("WARNING") == told[1].count(SAYS) == 1
