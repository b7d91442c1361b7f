"""Saves in the background: what is saved, when the caller goes on, and who is told of errors."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heldback import HeldBackend, OnlyHereBackend

import ckptstore
from ckptstore import errors
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.events import SaveEvent
from ckptstore.repo import create_on
from ckptstore.saver.pending import PendingSave
from ckptstore.saver.saver import Saver
from ckptstore.store import Store

pytestmark = pytest.mark.short(sample=1)

ENGINES = ("thread", "process")
_PATIENCE_S = 300.0


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Return each engine in turn."""
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path, engine: str) -> Iterator[Store]:
    """Return a store that is saved to by the engine."""
    with ckptstore.open(tmp_path / "store", create=True, engine=engine) as opened:
        yield opened


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[HeldBackend]:
    """Return storage that holds packs back when it is told to."""
    held = HeldBackend(open_backend(tmp_path / "held store", retry=False), tmp_path)
    held.go()
    yield held
    held.go()


def _metrics() -> dict[str, Any]:
    """Return a metric as NumPy computes it, which is no float."""
    return {"loss": np.float32(2.5)}


def _held(backend: HeldBackend, **options: Any) -> Store:  # noqa: ANN401 - as Options takes them
    return Store(create_on(backend, options=Options(workers=2, **options)))


def _state(seed: int = 0, elements: int = 100_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(elements, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.randn(7, generator=generator)},
        "wide": torch.randn(50, 40, generator=generator).t(),
        "order": np.arange(1000),
        "step": seed,
    }


def _same(found: Any, meant: Any) -> bool:  # noqa: ANN401 - states
    return (
        torch.equal(found["model"]["weight"], meant["model"]["weight"])
        and torch.equal(found["model"]["bias"], meant["model"]["bias"])
        and torch.equal(found["wide"], meant["wide"])
        and bool(np.array_equal(found["order"], meant["order"]))
        and found["step"] == meant["step"]
    )


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {name: tensor.clone() for name, tensor in state["model"].items()},
        "wide": state["wide"].clone(),
        "order": state["order"].copy(),
        "step": state["step"],
    }


def _change(state: dict[str, Any]) -> None:
    for tensor in (*state["model"].values(), state["wide"]):
        tensor.add_(1)
    state["order"] += 1
    state["step"] += 1


# --- what is saved ------------------------------------------------------------------------------
def test_each_version_is_the_state_at_its_call(store: Store) -> None:
    """What the training does after the call is in no version; the order is that of the calls."""
    run = store.run("gpt")
    state = _state()
    meant = []
    for step in range(3):
        meant.append(_copy(state))
        pending = run.save_async(state, step=step, metrics=_metrics())
        assert pending.staged
        _change(state)

    last = pending.result()
    versions = run.versions()
    assert [version.step for version in versions] == [0, 1, 2]
    assert [version.parent for version in versions[1:]] == [one.id for one in versions[:2]]
    assert versions[-1].id == last.id == pending.version_id
    for version, each in zip(versions, meant, strict=True):
        assert _same(run.load(version.step), each)
        assert version.metrics == {"loss": 2.5}
    loaded = run.load()
    assert loaded["model"]["weight"] is loaded["model"]["tied"]


def test_a_save_in_the_background_is_the_save_in_the_foreground(store: Store) -> None:
    """The same state has the same content digest either way, and shares everything."""
    run = store.run("gpt")
    state = _state()

    first = run.save(state, step=1)
    second = run.save_async(state, step=2).result()

    assert first.content == second.content
    assert second.receipt["new_bytes"] == 0
    assert second.receipt["shared_bytes"] == second.receipt["logical_bytes"]


def test_staging_in_the_background(store: Store) -> None:
    """The state may be changed after `wait_staged`, and the version is what it was before."""
    run = store.run("gpt")
    state = _state()
    meant = _copy(state)

    pending = run.save_async(state, step=1, stage="background")
    assert pending.wait_staged()
    assert pending.staged
    _change(state)

    pending.result()
    assert _same(run.load(), meant)


def test_empty_and_tiny_states(store: Store) -> None:
    """States without a byte to copy, and with many small tensors."""
    run = store.run("gpt")

    run.save_async({"step": 1}, step=1).result()
    many = {str(place): torch.full((place % 5,), float(place)) for place in range(3000)}
    run.save_async(many, step=2).result()

    assert run.load(1) == {"step": 1}
    loaded = run.load(2)
    assert list(loaded) == list(many)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in many.items())


def test_tied_storages_are_staged_once(store: Store) -> None:
    """Two paths to one memory take its bytes once, of the budget too."""
    weight = torch.randn(1_000_000)
    run = store.run("gpt")

    version = run.save_async({"a": weight, "b": weight, "c": weight[:10]}, step=1).result()

    assert version.receipt["logical_bytes"] == weight.nbytes
    assert store._session.saver.dispatcher.pool.size_bytes < 2 * weight.nbytes


# --- a state that is changed --------------------------------------------------------------------
def _late(store: Store) -> threading.Event:
    """Hold the thread that stages back until the event is set."""
    release = threading.Event()
    store._session.saver._stager.submit(release.wait)
    return release


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["model"]["weight"].add_(1),
        lambda state: state["model"]["weight"][10:20].zero_(),
        lambda state: state["model"]["weight"].data.mul_(2),
        lambda state: state["model"]["weight"].numpy().fill(0),
    ],
    ids=["in place", "a slice", "through data", "through NumPy"],
)
def test_a_change_before_it_is_staged_is_refused_by_name(
    store: Store, change: Callable[[dict[str, Any]], object]
) -> None:
    """A loop that forgets `wait_staged` is told so, with the name of the tensor."""
    run = store.run("gpt")
    state = _state()
    release = _late(store)
    pending = run.save_async(state, step=1, stage="background")

    change(state)
    release.set()

    with pytest.raises(errors.TornStateError, match=r"'model\.weight' was changed while"):
        pending.wait_staged()
    assert pending.state == "failed"
    assert run.versions() == []
    run.save_async(_state(), step=2).result()


def test_what_nobody_counts_changes_of_is_copied_in_the_call(store: Store) -> None:
    """A NumPy array may be changed at once, also while tensors are staged in the background."""
    run = store.run("gpt")
    state = _state()
    release = _late(store)
    pending = run.save_async(state, step=1, stage="background")

    state["order"][:] = -1
    release.set()
    pending.result()

    assert np.array_equal(run.load()["order"], np.arange(1000))


@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_change_between_staging_and_writing_is_refused_by_name(
    backend: HeldBackend, engine_name: str
) -> None:
    """One bit that changes in staged memory fails the save, in a thread and in a process."""
    with _held(backend, engine=engine_name) as store:
        run = store.run("gpt")
        backend.hold()
        state: dict[str, Any] = {"a": torch.randn(2_000_000), "z": {"last": torch.randn(500_000)}}
        pending = run.save_async(state, step=1)
        backend.wait_held()
        (arena,) = store._session.saver.dispatcher.pool._lent.values()
        arena.view[state["a"].nbytes + 1_000_001] ^= 4
        backend.go()

        with pytest.raises(errors.TornStateError, match=r"'z\.last' was changed in memory"):
            pending.result()
        assert run.versions() == []
        run.save_async(state, step=2).result()
        assert torch.equal(run.load()["z"]["last"], state["z"]["last"])


def test_inference_tensors_are_copied_in_the_call(store: Store) -> None:
    """Torch counts no changes of them, so they are not left for later."""
    with torch.inference_mode():
        weight = torch.ones(1000)
    run = store.run("gpt")
    release = _late(store)
    pending = run.save_async({"w": weight}, step=1, stage="background")
    with torch.inference_mode():
        weight.zero_()
    release.set()
    pending.result()

    assert torch.equal(run.load()["w"], torch.ones(1000))


# --- when one is under way ----------------------------------------------------------------------
@pytest.fixture
def busy(backend: HeldBackend, engine: str) -> Iterator[tuple[Store, PendingSave, HeldBackend]]:
    """Return a store whose storage holds a first save back."""
    with _held(backend, engine=engine) as store:
        backend.hold()
        pending = store.run("gpt").save_async(_state(1), step=1)
        backend.wait_held()
        yield store, pending, backend
        backend.go()


Busy = tuple[Store, PendingSave, HeldBackend]


def test_skip(busy: Busy) -> None:
    """A save that is skipped says so, blocks nobody, and is no error of the run."""
    store, first, backend = busy
    run = store.run("gpt")

    second = run.save_async(_state(2), step=2, if_busy="skip")

    assert second.skipped
    assert second.done
    assert second.wait_staged()
    with pytest.raises(errors.SaveBusyError, match="gpt@2 was skipped"):
        second.result()
    backend.go()
    first.result()
    run.save_async(_state(3), step=3, if_busy="skip").result()
    assert [version.step for version in run.versions()] == [1, 3]


def test_fail(busy: Busy) -> None:
    """The error names what is under way."""
    store, first, backend = busy
    run = store.run("gpt")

    with pytest.raises(errors.SaveBusyError, match="gpt@1 is still under way"):
        run.save_async(_state(2), step=2, if_busy="fail")

    assert not first.done
    backend.go()
    first.result()
    assert [version.step for version in run.versions()] == [1]


def _at_each_wait(condition: threading.Condition, do: Callable[[], object]) -> list[float]:
    """Act when a thread begins to wait, and has the lock still; return the seconds waited."""
    waited: list[float] = []
    genuine = condition.wait

    def wait(timeout: float | None = None) -> bool:
        do()
        began = time.monotonic()
        found = genuine(timeout)
        waited.append(time.monotonic() - began)
        return found

    condition.wait = wait  # type: ignore[method-assign]
    return waited


def test_wait(busy: Busy) -> None:
    """The second save begins when the first is durable, and the time counts as blocked."""
    store, first, backend = busy
    waited = _at_each_wait(store._session.saver._changed, backend.go)

    second = store.run("gpt").save_async(_state(2), step=2)

    assert first.durable
    assert second.receipt.blocked_s >= waited[0] > 0
    second.result()


def test_two_in_flight(backend: HeldBackend, engine: str) -> None:
    """Two may be under way; the third waits for its turn, and memory is for two."""
    with _held(backend, engine=engine, in_flight=2) as store:
        run = store.run("gpt")
        backend.hold()
        state = _state(1, elements=1_000_000)
        pending = [run.save_async(state, step=step) for step in (1, 2)]
        third = run.save_async(state, step=3, if_busy="skip")
        size = store._session.saver.dispatcher.pool.size_bytes

        backend.go()
        assert third.skipped
        assert [one.result().step for one in pending] == [1, 2]
        run.save_async(state, step=4).result()
        assert store._session.saver.dispatcher.pool.size_bytes == size


def test_the_foreground_waits_for_the_background(busy: Busy) -> None:
    """`save` after `save_async` continues it: versions have the order of the calls."""
    store, first, backend = busy
    waited = _at_each_wait(first._save._changed, backend.go)

    second = store.run("gpt").save(_state(2), step=2)

    assert waited
    assert second.parent == first.result().id


def test_result_with_a_limit(busy: Busy) -> None:
    """Who does not want to wait for ever is told that it is still under way."""
    _, first, backend = busy
    with pytest.raises(errors.SaveBusyError, match=r"still under way after 0\.01 s"):
        first.result(timeout=0.01)
    backend.go()
    assert first.result().step == 1


# --- memory -------------------------------------------------------------------------------------
def test_a_state_beyond_the_budget_is_refused(tmp_path: Path, engine: str) -> None:
    """The budget is hard; nothing is taken and nothing saved."""
    with ckptstore.open(
        tmp_path / "s", create=True, engine=engine, staging_bytes=1_000_000
    ) as store:
        run = store.run("gpt")
        with pytest.raises(errors.LimitError, match="more than the budget of 1000000"):
            run.save_async({"w": torch.zeros(300_000)}, step=1)
        assert store._session.saver.dispatcher.pool.size_bytes == 0
        run.save_async({"w": torch.zeros(100_000)}, step=2).result()
        assert store._session.saver.dispatcher.pool.size_bytes <= 1_000_000


def test_a_second_save_waits_for_the_budget(backend: HeldBackend, engine: str) -> None:
    """Two may be in flight, but there is memory for one: the second is skipped, or waits.

    When it goes on the first is durable; who waits for its result waits for the observers too.
    """
    options = {"in_flight": 2, "staging_bytes": 6_000_000}
    admitted = threading.Event()
    heard: list[int] = []

    def observe(event: SaveEvent) -> None:
        if (event.kind, event.step) == ("durable", 1):
            assert admitted.wait(_PATIENCE_S)
            heard.append(event.step)

    with _held(backend, engine=engine, **options) as store:
        run = store.run("gpt")
        store.observe(observe)
        backend.hold()
        state = {"w": torch.randn(1_000_000)}
        first = run.save_async(state, step=1)
        assert run.save_async(state, step=2, if_busy="skip").skipped
        _at_each_wait(store._session.saver._changed, backend.go)
        third = run.save_async(state, step=3)
        durable, early = first.durable, first._save.wait(timeout=0)
        admitted.set()
        assert (durable, early) == (True, False)
        first.result()
        assert heard == [1]
        third.result()
        assert store._session.saver.dispatcher.pool.size_bytes <= 6_000_000


def test_memory_is_used_again(store: Store) -> None:
    """The second save of a state takes no further memory; a larger state gives the old up."""
    run = store.run("gpt")
    sizes = []
    for step, elements in enumerate((1_000_000, 1_000_000, 3_000_000, 1_000_000)):
        run.save_async({"w": torch.randn(elements)}, step=step).result()
        sizes.append(store._session.saver.dispatcher.pool.size_bytes)

    assert sizes[0] == sizes[1] < 4 * 1_000_000 * 4 / 3
    assert sizes[2] == sizes[3] < 4 * 3_000_000 * 4 / 3


def test_memory_can_be_taken_in_advance(store: Store) -> None:
    """After `reserve` the first save takes no memory more."""
    state = {"w": torch.randn(1_000_000), "b": torch.randn(10)}
    store.reserve(4_000_040 + 2 * 64)
    size = store._session.saver.dispatcher.pool.size_bytes
    assert size >= 4_000_040
    store.run("gpt").save_async(state, step=1).result()
    assert store._session.saver.dispatcher.pool.size_bytes == size
    with pytest.raises(errors.LimitError):
        store.reserve(1 << 60)


# --- ends ---------------------------------------------------------------------------------------
def test_cancel(busy: Busy) -> None:
    """A save that is cancelled before its commit leaves no version, and is no error."""
    store, first, backend = busy
    cancelled: list[bool] = []
    thread = threading.Thread(target=lambda: cancelled.append(first.cancel()))
    thread.start()
    # The writer hears of it before its next piece, or at the latest before the commit.
    while not _is_cancelled(store, first):
        threading.Event().wait(0.001)
    backend.go()
    thread.join()

    assert cancelled == [True]
    with pytest.raises(errors.OperationCancelledError):
        first.result()
    assert first.state == "cancelled"
    assert store.run("gpt").versions() == []
    second = store.run("gpt").save_async(_state(2), step=2)
    second.result()
    assert not second.cancel()


def _is_cancelled(store: Store, pending: PendingSave) -> bool:
    """Return whether the engine has noted that a save is cancelled."""
    engine: Any = store._session.saver.dispatcher.start()
    number = pending._save.number
    if engine.name == "thread":
        return bool(engine._tasks[number].token._cancelled)
    return bool(engine._jobs[number].answered.is_set())


def test_cancel_before_it_is_staged(store: Store) -> None:
    """A save that no engine has yet is cancelled too."""
    release = _late(store)
    pending = store.run("gpt").save_async(_state(), step=1, stage="background")

    assert pending.cancel()
    release.set()

    with pytest.raises(errors.OperationCancelledError):
        pending.result()
    assert store.run("gpt").versions() == []


def test_close_waits(tmp_path: Path, engine: str) -> None:
    """Leaving the block is enough: the version is durable then, and no process is left."""
    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        pending = store.run("gpt").save_async(_state(), step=1)
        pid = store._session.saver.dispatcher.pid

    assert pending.durable
    if pid:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(errors.InvalidInputError, match="is closed"):
        store.run("gpt").save_async(_state(), step=2)


def test_observers_hear_of_every_save(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Staged, then durable; also of saves in the foreground; and each is a record of the log."""
    heard: list[SaveEvent] = []
    end = store.observe(heard.append)
    run = store.run("gpt")
    with caplog.at_level(logging.INFO, "ckptstore.saves"):
        version = run.save_async(_state(), step=1).result()
        run.save(_state(), step=2)
    end()
    run.save(_state(), step=3)

    kinds = [(one.kind, one.step) for one in heard]
    assert kinds == [("staged", 1), ("durable", 1), ("durable", 2)]
    assert heard[1].version == version.id
    assert heard[1].receipt["committing_s"] >= version.receipt["committing_s"]
    documents = [record.__dict__["event"] for record in caplog.records]
    assert documents == [one.document() for one in heard]


def test_receipts_are_kept(store: Store) -> None:
    """Seconds and bytes of every stage are in the catalog, and with the pending save."""
    run = store.run("gpt")
    pending = run.save_async(_state(), step=1)
    version = pending.result()

    seconds = ("blocked", "staging", "hashing", "encoding", "writing", "committing")
    kept = store.resolve("gpt").receipt
    assert dict(version.receipt) == dict(kept)
    assert all(kept[f"{name}_s"] > 0 for name in seconds)
    assert kept["new_bytes"] + kept["shared_bytes"] == kept["logical_bytes"]
    receipt = pending.receipt
    assert receipt.state == "durable"
    assert receipt.committing_s >= kept["committing_s"]
    assert receipt.logical_bytes == kept["logical_bytes"]
    assert pending.progress.done == pending.progress.total == kept["logical_bytes"]


def test_retention_afterwards(store: Store) -> None:
    """With `retain` the policy of the run is carried out where the save is written."""
    run = store.run("gpt")
    with pytest.raises(errors.InvalidInputError, match="no retention policy"):
        run.save_async(_state(), step=0, retain=True)
    run.set_policy({"full": "last 1"})
    for step in (1, 2, 3):
        run.save_async(_state(step), step=step, retain=True).result()

    assert [version.step for version in run.versions()] == [3]


def test_wrong_calls_are_refused_at_once(store: Store) -> None:
    """What `save` would refuse is refused by the call, and nothing is left under way."""
    run = store.run("gpt")
    with pytest.raises(errors.StateError, match="'f'"):
        run.save_async({"f": lambda: 0}, step=1)
    with pytest.raises(errors.InvalidInputError, match="a step is"):
        run.save_async({}, step=-1)
    with pytest.raises(errors.InvalidInputError, match="metric 'loss'"):
        run.save_async({}, step=1, metrics={"loss": "x"})  # type: ignore[dict-item]
    with pytest.raises(
        errors.InvalidInputError, match="if_busy is one of wait, skip, fail, not 'later'"
    ):
        run.save_async({}, step=1, if_busy="later")  # type: ignore[arg-type]
    assert run.versions() == []
    run.save_async({}, step=1).result()


def test_saves_of_two_threads(store: Store) -> None:
    """Two runs saved from two threads do not disturb each other."""
    runs = [store.run(name) for name in ("a", "b")]

    def work(number: int) -> None:
        for step in range(4):
            runs[number].save_async(_state(10 * number + step), step=step)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.wait()

    for number, run in enumerate(runs):
        assert [version.step for version in run.versions()] == [0, 1, 2, 3]
        assert _same(run.load(2), _state(10 * number + 2))


def test_threads_that_come_at_once_save_by_one_saver(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is first, all wait for, order and close the same: none is made and forgotten."""
    meeting = threading.Barrier(3)
    genuine = Saver.__init__

    def together(self: Saver, *words: Any) -> None:  # noqa: ANN401 - as Saver takes them
        meeting.wait()
        genuine(self, *words)

    monkeypatch.setattr(Saver, "__init__", together)
    with ThreadPoolExecutor(3) as threads:
        savers = list(threads.map(lambda _: store._session.saver, range(3)))
    assert savers == [store._session.saver] * 3


def test_an_error_while_staging_in_the_background(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in the thread that stages arrives at who waits, and gives the memory back."""

    def broken(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("ckptstore.saver.staging.Staging.settle", broken)
    run = store.run("gpt")
    pending = run.save_async(_state(), step=1, stage="background")
    with pytest.raises(MemoryError):
        pending.wait_staged()
    monkeypatch.undo()
    with pytest.raises(MemoryError):
        pending.result()
    size = store._session.saver.dispatcher.pool.size_bytes
    run.save_async(_state(), step=2).result()
    assert store._session.saver.dispatcher.pool.size_bytes == size
    monkeypatch.setattr("ckptstore.saver.staging.Staging.settle", broken)
    with pytest.raises(MemoryError):
        run.save_async(_state(), step=3)
    monkeypatch.undo()
    run.save_async(_state(), step=4).result()
    assert [version.step for version in run.versions()] == [2, 4]


# --- engines ------------------------------------------------------------------------------------
def test_auto_is_a_process_where_one_can_reach_the_storage(tmp_path: Path) -> None:
    """Files can be reached by a child; this process's memory cannot, and says so."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        assert store._session.saver.dispatcher.kind == "process"
    with ckptstore.open("memory://saver-auto", create=True) as store:
        store.run("gpt").save_async(_state(), step=1).result()
        assert store._session.saver.dispatcher.kind == "thread"
    with (
        ckptstore.open("memory://saver-auto", engine="process") as store,
        pytest.raises(errors.InvalidInputError, match="in the memory of this process"),
    ):
        store.run("gpt").save_async(_state(), step=2)


def test_a_child_that_cannot_begin_is_replaced_by_a_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend that the child cannot import: nothing is lost with auto, and told otherwise."""
    backend = OnlyHereBackend(open_backend(tmp_path / "s"))
    with Store(create_on(backend)) as store:
        run = store.run("gpt")
        run.save_async(_state(), step=1).result()
        assert store._session.saver.dispatcher.kind == "thread"
        assert "a thread saves from now on" in caplog.text
        run.save_async(_state(), step=2).result()
    backend = OnlyHereBackend(open_backend(tmp_path / "t"))
    with Store(create_on(backend, options=Options(engine="process"))) as store:
        pending = store.run("gpt").save_async(_state(), step=1)
        with pytest.raises(errors.SaverDiedError, match="could not begin: AttributeError"):
            pending.result()


def test_a_child_that_is_killed(backend: HeldBackend) -> None:
    """What it had not committed fails, and the next save has a child of its own."""
    with _held(backend, engine="process") as store:
        run = store.run("gpt")
        backend.hold()
        pending = run.save_async(_state(), step=1)
        backend.wait_held()
        killed = store._session.saver.dispatcher.pid
        os.kill(killed, signal.SIGKILL)

        with pytest.raises(errors.SaverDiedError, match="SIGKILL"):
            pending.result()
        assert not pending.cancel() or pending.state == "failed"
        backend.go()
        run.save_async(_state(), step=2).result()
        assert store._session.saver.dispatcher.pid != killed
        assert [version.step for version in run.versions()] == [2]


def test_a_child_ignores_what_stops_a_job(backend: HeldBackend) -> None:
    """SIGINT, SIGTERM and SIGHUP do not stop it: it has staged states to write."""
    with _held(backend, engine="process") as store:
        backend.hold()
        pending = store.run("gpt").save_async(_state(), step=1)
        backend.wait_held()
        pid = store._session.saver.dispatcher.pid
        assert os.getsid(pid) == pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        backend.go()
        assert pending.result().step == 1
