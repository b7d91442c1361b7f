"""Preemption: signals become a step at which all ranks save and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore.errors import InvalidInputError, SaveBusyError, StorageError
from ckptstore.integrations.preemption import Preemption
from ckptstore.store import Store


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """No test leaves a handler behind."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_nothing_stops_without_a_signal() -> None:
    """A training that nobody ends goes on, and has all the time there is."""
    with Preemption() as preemption:
        assert not any(preemption.should_stop(step) for step in range(100))
        assert not preemption.requested
        assert preemption.remaining_s == float("inf")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_at_the_next_step(number: signal.Signals) -> None:
    """The step that was asked about is the one to save; later ones are past it too."""
    with Preemption([signal.SIGTERM, signal.SIGUSR1]) as preemption:
        assert not preemption.should_stop(6)
        _send(number)

        assert preemption.requested
        assert preemption.should_stop(7)
        assert preemption.stop_at == 7
        assert preemption.exit_code == 128 + number
        assert not preemption.should_stop(6)


def test_time_runs_from_the_signal() -> None:
    """The deadline is counted from the signal, not from when the loop asks."""
    environment = SimulatedEnvironment()
    with Preemption(deadline_s=30, environment=environment) as preemption:
        _send(signal.SIGTERM)
        environment.sleep(12)
        assert preemption.remaining_s == pytest.approx(18)
        environment.sleep(50)
        assert preemption.remaining_s == 0


@pytest.mark.parametrize(
    ("own_s", "other_ms", "left_s"),
    [
        (10.0, 0, 20.0), (None, 10_000, 20.0), (10.0, 2_250, 20.0), (2.25, 10_500, 19.5),
        (0.5, 0, 29.5),
    ],
)  # fmt: skip
def test_the_tightest_deadline_of_all_ranks_holds(
    monkeypatch: pytest.MonkeyPatch, own_s: float | None, other_ms: int, left_s: float
) -> None:
    """Ranks that heard of the end at different times, or never, have the same time left."""
    environment, sent = SimulatedEnvironment(), list[int]()

    def with_other_ranks(said: torch.Tensor, **_: object) -> None:
        sent.extend(said.tolist())
        said.copy_(said.maximum(torch.tensor([signal.SIGTERM, 9, other_ms])))

    monkeypatch.setattr("ckptstore.integrations.ranks.together", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", with_other_ranks)
    monkeypatch.setattr(Preemption, "_meeting_place", lambda _: torch.device("cpu"))
    with Preemption(deadline_s=30, environment=environment) as preemption:
        environment.sleep(1000)
        if own_s is not None:
            _send(signal.SIGTERM)
            environment.sleep(own_s)
        assert not preemption.should_stop(7)
        assert sent == [signal.SIGTERM if own_s else 0, 7, int(1000 * (own_s or 0))]
        assert preemption.stop_at == 9
        assert preemption.remaining_s == pytest.approx(left_s)


@pytest.mark.parametrize("chain", [True, False])
def test_a_handler_that_was_there_is_called_if_wished_and_comes_back(*, chain: bool) -> None:
    """Who listened to the signal before still hears it, or is kept out, and then hears it alone."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with Preemption([signal.SIGUSR1], chain=chain) as preemption:
            _send(signal.SIGUSR1)
            assert preemption.requested
            assert heard == [signal.SIGUSR1] * chain
        _send(signal.SIGUSR1)
        assert len(heard) == 1 + chain
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("ctrl_c")
def test_the_second_interrupt_interrupts() -> None:
    """Ctrl-C asks politely once; a second one is a KeyboardInterrupt as ever."""
    with Preemption([signal.SIGINT]) as preemption:
        _send(signal.SIGINT)
        assert preemption.requested
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)


def test_a_handler_of_others_can_be_replaced_again() -> None:
    """A framework that puts its own handler in place can be overruled for a while."""
    with Preemption([signal.SIGUSR1]) as preemption:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        _send(signal.SIGUSR1)
        assert not preemption.requested
        preemption.take_back()
        _send(signal.SIGUSR1)
        assert preemption.requested


def test_only_the_main_thread_can_listen() -> None:
    """Elsewhere Python refuses handlers; the error says so before the training begins."""
    told: list[BaseException] = []

    def enter() -> None:
        try:
            with Preemption():
                pass
        except InvalidInputError as error:
            told.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(told[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": 0}, {"check_every": 0}, {"signals": signal.SIGUSR1}, {"signals": "SIGTERM"},
        {"signals": [signal.SIGKILL]}, {"signals": [signal.SIGSTOP]}, {"signals": ["SIGTERM"]},
        {"signals": [0]},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    """No time, a signal in no list, a name, one that only the system handles: told at once."""
    problem = "signals" if "signals" in wrong else "above zero"
    with pytest.raises(InvalidInputError, match=problem) as told:
        Preemption(**wrong)
    assert told.value.hint or "signals" not in wrong


def test_one_that_was_not_entered_is_told(store: Store) -> None:
    """Outside of the block no signal would be heard: the loop's first question is an error."""
    preemption = Preemption()
    with pytest.raises(InvalidInputError) as told:
        preemption.should_stop(1)
    assert told.value.hint == "enter it first: with Preemption(...) as preemption"
    with pytest.raises(InvalidInputError) as told:
        preemption.secure(store.run("gpt"), {"w": torch.ones(1)}, step=1)
    assert "enter it first" in (told.value.hint or "")
    assert store.run("gpt").versions() == []

    with preemption:
        assert not preemption.should_stop(1)
    with pytest.raises(InvalidInputError):
        preemption.should_stop(2)
    assert preemption.secure(store.run("gpt"), {"w": torch.ones(1)}, step=1).step == 1


def test_the_exit_code_is_zero_until_the_end_is_announced() -> None:
    """A training that ends by itself is done, also for a script that always exits with the code."""
    with Preemption() as preemption:
        assert preemption.exit_code == 0
        preemption.request()
        assert preemption.exit_code == 143


def test_the_state_of_now_is_saved(store: Store) -> None:
    """After a signal the loop saves what it has; a later start finds it."""
    run = store.run("gpt")
    with Preemption() as preemption:
        preemption.request()
        assert preemption.should_stop(41)
        version = preemption.secure(run, {"w": torch.ones(3)}, step=41, metrics={"loss": 0.5})

    assert (version.step, version.metrics) == (41, {"loss": 0.5})
    assert torch.equal(run.load("latest")["w"], torch.ones(3))


def test_what_is_staged_becomes_durable(store: Store) -> None:
    """Where nothing can be collected any more, the newest staged state is made durable."""
    run = store.run("gpt")
    pending = run.save_async({"w": torch.arange(4)}, step=30)
    with Preemption() as preemption:
        preemption.request()
        version = preemption.secure(run, pending=pending)

    assert version.step == 30
    assert torch.equal(run.load("latest")["w"], torch.arange(4))


def test_one_step_is_not_saved_twice(store: Store) -> None:
    """A loop that has just begun to save this very step does not do so again."""
    run = store.run("gpt")
    state = {"w": torch.arange(4)}
    pending = run.save_async(state, step=30)
    with Preemption() as preemption:
        version = preemption.secure(run, state, step=30, pending=pending)

    assert [each.id for each in run.versions()] == [version.id]


def test_the_older_save_is_there_if_the_newer_fails(store: Store) -> None:
    """A state that cannot be saved does not cost the one that was under way."""
    run = store.run("gpt")
    pending = run.save_async({"w": torch.arange(4)}, step=30)
    with Preemption() as preemption:
        version = preemption.secure(run, {"w": object()}, step=31, pending=pending)

    assert version.step == 30


def test_nothing_to_secure_is_an_error(store: Store) -> None:
    """A call that could not save anything is a mistake, and is told before it matters."""
    with Preemption() as preemption, pytest.raises(InvalidInputError, match="nothing to secure"):
        preemption.secure(store.run("gpt"))


class _Stuck:
    """A pending save that never ends."""

    done = False

    def result(self, timeout: float | None = None) -> object:
        assert timeout == 5
        raise SaveBusyError("still under way")


class _Broken:
    """A pending save that failed."""

    done = True

    def result(self, timeout: float | None = None) -> object:
        raise StorageError(f"the disk is gone, {timeout}")


def test_a_deadline_that_passes_is_told(store: Store) -> None:
    """A save that is not done in time is an error, and no second one waits behind it."""
    run = store.run("gpt")
    with Preemption(deadline_s=5, environment=SimulatedEnvironment()) as preemption:
        preemption.request()
        with pytest.raises(SaveBusyError, match="still under way"):
            preemption.secure(run, {"w": torch.ones(1)}, step=2, pending=_Stuck())  # type: ignore[arg-type]
    assert run.versions() == []


def test_a_save_that_failed_does_not_hinder_the_next(store: Store) -> None:
    """What failed in the background is passed over if the state of now can be saved."""
    with Preemption() as preemption:
        pending: Any = _Broken()
        version = preemption.secure(store.run("gpt"), {"w": torch.ones(1)}, step=2, pending=pending)
    assert version.step == 2


# --- several ranks, in processes of their own -----------------------------------------------------
@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Run five trainings on three ranks; return what each rank said, by training."""
    folder = tmp_path_factory.mktemp("ranks")
    ckptstore.open(folder / "ckpts", create=True).close()
    program = Path(__file__).with_name("stopping_ranks.py")
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(folder), str(rank), "3"])
        for rank in range(3)
    ]
    try:
        while not (folder / "outside-1").exists():  # rank 1 is in the training that we end
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        ranks[1].send_signal(signal.SIGTERM)
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [143, 143, 143]
    said = [json.loads((folder / f"said-{rank}").read_text()) for rank in range(3)]
    with ckptstore.open(folder / "ckpts") as opened:
        saved = {run.name: opened.load(f"{run.name}@latest")["step"] for run in opened.runs()}
    return {name: [[each[name] for each in said], [saved[name]]] for name in said[0]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("training", "stop_at"), [("in step", 5), ("apart", 6), ("asked seldom", 8), ("on devices", 5)]
)
def test_all_ranks_stop_at_one_step(
    told: dict[str, list[list[int]]], training: str, stop_at: int
) -> None:
    """SIGTERM to one rank alone stops all at one step, also where some are ahead of others."""
    said, saved = told[training.replace(" ", "-")]

    assert said == [stop_at] * 3
    assert saved == [stop_at]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_signal_from_outside_stops_all_ranks(told: dict[str, list[list[int]]]) -> None:
    """At whatever moment it comes: all ranks stop at one step, and a restart finds that one."""
    said, saved = told["outside"]

    assert len(set(said)) == 1
    assert saved == said[:1]
