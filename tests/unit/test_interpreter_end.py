"""Saves, loads and maintenance while the interpreter is ending, or where no thread can be made."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.backends.transfers import Threads, start_thread
from ckptstore.errors import LimitError, SaveBusyError

HEAD = """
import atexit, concurrent.futures, multiprocessing.util, sys, threading, time, weakref
import torch, ckptstore
{first}
def save(step=1):
    run.save(state, step=step)
def quietly(step=1):
    run.save_async(state, step=step)
def everything():
    save()
    assert torch.equal(run.load(1)["w"], state["w"])
    assert torch.equal(store.version("r@1")["w"][5:9], state["w"][5:9])
    assert store.verify().ok
    store.gc(dry_run=True)
    run.save_async(state, step=2, stage="background").result()
    run.tag(1, "end")
    try:
        ckptstore.open(sys.argv[1] + "-new", create=True)
    except ckptstore.CkptStoreError as error:
        assert "interpreter ends" in str(error), error
store = ckptstore.open(sys.argv[1], engine=sys.argv[2], create=True)
run = store.run("r")
state = {{"w": torch.arange(300_000.0)}}
{body}
"""
FORMS = {
    "atexit": "atexit.register(everything)",
    "atexit, not waited for": "atexit.register(quietly)",
    "finalize": "weakref.finalize(store, everything).atexit = True",
    "multiprocessing": "multiprocessing.util.Finalize(None, everything, exitpriority=1)",
    "thread": "threading.Thread(target=lambda: (time.sleep(0.5), everything())).start()",
    "thread, not waited for": (
        "threading.Thread(target=lambda: (time.sleep(0.5), quietly(), quietly(2))).start()"
    ),
    "executor": "concurrent.futures.ThreadPoolExecutor(2).submit(everything)",
    "executor, not waited for": "concurrent.futures.ThreadPoolExecutor(2).submit(quietly)",
    "after a save": "quietly(0); atexit.register(everything)",
}


def _run(tmp_path: Path, engine: str, body: str, first: str = "") -> str:
    script = HEAD.format(first=first, body=body)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s"), engine], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.short("atexit-thread|thread, not waited for-process|executor-thread")
def test_all_work_at_the_end(tmp_path: Path, form: str, engine: str) -> None:
    """What was asked for is there, and nothing was printed."""
    said = _run(tmp_path, engine, FORMS[form])

    assert "Error" not in said
    with ckptstore.open(tmp_path / "s") as store:
        steps = sorted(version.step for version in store.versions())
        assert 1 in steps
        assert (2 in steps) == ("not waited for" not in form or form.startswith("thread"))
        assert store.verify().ok


@pytest.mark.short("process")
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_handler_registered_before_everything(tmp_path: Path, engine: str) -> None:
    """It is called last of all, when the hooks of the saver are over."""
    _run(tmp_path, engine, "", first="atexit.register(lambda: (quietly(), everything()))")
    with ckptstore.open(tmp_path / "s") as store:
        assert next(iter(store.versions())).step == 1


def test_a_failure_at_the_end_is_printed(tmp_path: Path) -> None:
    """A save that was accepted, and cannot be written, does not go without a word."""
    body = (
        "def fail(*_, **__):\n    raise ckptstore.CkptStoreError('the disk is gone')\n"
        "type(store.repo.log).append_any = fail\natexit.register(quietly)"
    )
    assert "the disk is gone" in _run(tmp_path, "thread", body)


WRITTEN_BACK = {
    "in the background": ("quietly()", True),
    "exit handler": ("atexit.register(quietly)", True),
    "thread": ("threading.Thread(target=lambda: (time.sleep(0.5), quietly())).start()", True),
    "worker": (
        "import multiprocessing, os\n"
        "def work():\n"
        "    store = ckptstore.open(sys.argv[1], engine='thread')\n"
        "    store.run('r', write_back='cold').save(state, step=1)\n"
        "worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "worker.start()\nworker.join()\nos._exit(worker.exitcode)",
        True,
    ),
    "earlier exit handler": ("", False),
    "replica gone": ("import shutil\nshutil.rmtree(sys.argv[1] + '-cold')\nsave()", False),
}


@pytest.mark.parametrize("form", WRITTEN_BACK)
@pytest.mark.slow
def test_what_is_not_written_back_at_the_end_is_printed(tmp_path: Path, form: str) -> None:
    """A save comes to the replica before the process ends, or a warning names the command."""
    body, comes = WRITTEN_BACK[form]
    start = "ckptstore.limits.WRITE_BACK_EXIT_S = 300.0\n"  # a busy machine needs more than 10 s
    start += "store.add_replica('cold', sys.argv[1] + '-cold', create=True)\n"
    start += "" if form == "worker" else "store.write_back('cold').wait()\n"
    first = "atexit.register(lambda: quietly())" if form == "earlier exit handler" else ""
    said = _run(tmp_path, "thread", start + body, first)
    with ckptstore.open(tmp_path / "s") as store:
        assert [version.state for version in store.versions()] == [
            "replicated" if comes else "durable"
        ]
    assert ("ckptstore replicate --to replica:cold" in said) == (not comes)


@pytest.fixture
def no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a store; then have the system refuse every new thread."""
    ckptstore.open(tmp_path / "s", create=True).close()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_system_without_threads(tmp_path: Path, engine: str) -> None:
    """Everything is done by the caller, in its order; a background save is over on return."""
    state = {"w": torch.arange(100_000.0)}
    with ckptstore.open(tmp_path / "s", engine=engine) as store:
        run = store.run("r")
        run.save(state, step=1)
        for pending in (
            run.save_async(state, step=2),
            run.save_async(state, step=3, stage="background"),
        ):
            assert pending.done
            assert pending.durable
        assert torch.equal(run.load(2)["w"], state["w"])
        assert store.verify().ok
        store.add_replica("cold", tmp_path / "cold", create=True)
        for call in (lambda: start_thread(bool, "x"), lambda: store.write_back("cold")):
            with pytest.raises(LimitError, match="can't start new thread"):
                call()


def test_a_call_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is in the queue of a pool that could start no thread for it."""
    made: list[int] = []
    with Threads(2) as pool:
        gate = threading.Event()
        first = pool.submit(gate.wait)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError))
            second = pool.submit(made.append, 1)
        gate.set()
        assert first.result()
        assert second.result() is None
    assert made == [1]
    assert pool.submit(made.append, 2).result() is None
    failed = pool.submit(int, "x")
    with pytest.raises(ValueError, match="x"):
        failed.result()


def test_an_import_that_a_signal_interrupts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Getting the run imports all that saves need; a handler that comes before is told so."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        run = store.run("r")
        spec = sys.modules["ckptstore.saver.saver"].__spec__
        monkeypatch.setattr(spec, "_initializing", True, raising=False)
        for save in (run.save, run.save_async):
            with pytest.raises(SaveBusyError, match="not imported"):
                save({"w": torch.ones(1)}, step=1)


def test_signals_at_any_moment_of_the_first_save(tmp_path: Path) -> None:
    """A background save from a handler: durable, whatever the first save is about to do."""
    body = (
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: quietly())\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        "run.save({'w': torch.zeros(3_000_000)}, step=0)"
    )
    for engine in ("thread", "process"):
        assert "Error" not in _run(tmp_path / engine, engine, body)
        with ckptstore.open(tmp_path / engine / "s") as store:
            assert sorted(version.step for version in store.versions()) == [0, 1]
