"""Write-back: what is saved comes to the replica, and no save ever waits for that."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import replica_ops
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.catalog.state import Op
from ckptstore.errors import InvalidInputError, NotFoundError, NotReplicatedError, StorageError
from ckptstore.events import SaveEvent
from ckptstore.replicas.writeback import WriteBack
from ckptstore.repo import create_on
from ckptstore.testing.faulty import WRITES, Fault, FaultyBackend, When

pytestmark = pytest.mark.short(sample=1)

_PATIENCE_S = 120.0


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a small state."""
    return {"model": {"w": torch.full((200, 200), float(step)), "same": torch.arange(30_000.0)}}


class Tiers:
    """A hot store, and a cold one whose writes can be held or made to fail."""

    def __init__(self, folder: Path) -> None:
        self.opened: list[ckptstore.Store] = []
        self.held = threading.Event()
        self.held.set()
        self.asked = threading.Event()

        def hold(*_: object) -> None:
            self.asked.set()
            assert self.held.wait(_PATIENCE_S)

        self.hold = Fault(calls=WRITES, at=1, times=0, when=When.CALLBACK, callback=hold)
        self.fail = Fault(calls=WRITES, at=0, times=0, error=lambda: StorageError("it is down"))
        inner = MemoryBackend(f"write-back/{folder}")
        self.inner = inner
        create_on(inner).close()
        self.cold = self.open_cold()
        self.folder = folder
        self.hot = self.open_hot()

        def named(now: object) -> object:
            return name_replica(
                now,  # type: ignore[arg-type]
                name="cold",
                url="memory://cold",
                store=self.cold.info.store_id,
            )

        self.hot.repo.log.append_any(named)  # type: ignore[arg-type]

    def open_cold(self) -> ckptstore.Store:
        backend = FaultyBackend(self.inner, self.fail, self.hold)
        return ckptstore.Store(create_on(backend, exist_ok=True))

    def open_hot(self) -> ckptstore.Store:
        """Return the hot store, which knows the cold one."""
        replicas = {"cold": self.cold}
        self.opened.append(ckptstore.open(self.folder / "hot", create=True, replicas=replicas))
        return self.opened[-1]

    def steps(self) -> list[int]:
        """Return the steps whose content is in the cold store."""
        found = ckptstore.Store(create_on(self.inner, exist_ok=True)).versions()
        return sorted(version.step for version in found if version.level == "full")


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiers]:
    """Return two tiers; pauses after failures are short."""
    monkeypatch.setattr(limits, "WRITE_BACK_PAUSE_S", 0.01)
    monkeypatch.setattr(limits, "WRITE_BACK_PAUSE_MAX_S", 0.02)
    made = Tiers(tmp_path)
    yield made
    made.held.set()
    made.fail.at = 0
    for store in made.opened:
        with contextlib.suppress(NotReplicatedError):
            store.close()


def test_what_could_not_be_noted_is_noted_later(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has come, and the hot store cannot say so at first: it is not given up."""
    real, asked = replica_ops.replicated, []

    def down(*args: Any) -> list[Op]:  # noqa: ANN401 - as it is
        asked.append(args)
        if len(asked) == 2:
            raise StorageError("it is down")
        return real(*args)

    monkeypatch.setattr(replica_ops, "replicated", down)
    saved = tiers.hot.run("gpt", write_back="cold").save(state_of(1), step=1)
    assert tiers.hot.wait_replicated(saved, _PATIENCE_S).state == "replicated"
    assert len(asked) > 2


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_saves_of_every_kind_come_to_the_replica(tmp_path: Path, engine: str) -> None:
    """In the foreground and the background; receipts go from durable to replicated."""
    events: list[SaveEvent] = []
    with ckptstore.open(tmp_path / "hot", create=True, engine=engine) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True)
        hot.observe(events.append)
        run = hot.run("gpt", write_back="cold")
        assert run.save(state_of(1), step=1).state == "durable"
        pending = [run.save_async(state_of(step), step=step) for step in (2, 3)]
        run.save(state_of(4), step=4)
        found = hot.wait_replicated(pending[1].result(_PATIENCE_S), _PATIENCE_S)
        assert found.state == "replicated"
        other = hot.run("other").save(state_of(5), step=5)
    assert [event.kind for event in events].count("replicated") == 4
    assert {event.replica for event in events if event.kind == "replicated"} == {"cold"}
    with ckptstore.open(tmp_path / "hot") as again, ckptstore.open(tmp_path / "cold") as cold:
        states = {version.step: version.state for version in again.versions()}
        assert states == {
            1: "replicated", 2: "replicated", 3: "replicated", 4: "replicated", 5: "durable",
        }  # fmt: skip
        assert not cold.repo.catalog.has_version(other.id)
        for step in (1, 2, 3, 4):
            found_state = cold.load(f"gpt@{step}")
            assert torch.equal(found_state["model"]["w"], state_of(step)["model"]["w"])


@pytest.mark.slow
def test_a_replica_that_hangs_holds_up_no_save(tiers: Tiers) -> None:
    """Saves are done while the first upload stands still; then the newest comes first."""
    tiers.held.clear()
    run = tiers.hot.run("gpt", write_back="cold")
    run.save(state_of(0), step=0)
    assert tiers.asked.wait(_PATIENCE_S)
    for step in range(1, 20):
        run.save(state_of(step), step=step)
    one = tiers.hot.write_back("cold", runs=["gpt"])
    assert one.pending == 20
    order: list[int] = []
    tiers.hot.observe(lambda event: order.append(event.step) if event.replica else None)
    tiers.held.set()
    one.wait(timeout_s=_PATIENCE_S)
    tiers.hot.close()
    assert tiers.steps() == list(range(20))
    assert order[:2] == [0, 19]


def test_a_replica_that_is_down_is_tried_again(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves go on, the log says so at once, waiting is loud, and in the end all is there."""
    tiers.fail.at = 1
    run = tiers.hot.run("gpt", write_back="cold")
    first = run.save(state_of(1), step=1)
    with pytest.raises(NotReplicatedError, match="it is down"):
        tiers.hot.wait_replicated(first)
    with pytest.raises(NotReplicatedError, match="it is down"):
        tiers.hot.wait_replicated(first, 0.05)
    assert "versions are not in replica 'cold' yet: it is down" in caplog.text
    run.save(state_of(2), step=2)
    one = tiers.hot.write_back("cold", runs=["gpt"])
    assert one.error is not None
    tiers.fail.at = 0
    assert tiers.hot.wait_replicated(first, _PATIENCE_S).state == "replicated"
    tiers.hot.close()
    assert tiers.steps() == [1, 2]


def test_closing_is_loud_and_does_not_wait_for_ever(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a replica that is down one last attempt; of one that hangs until the time is over."""
    tiers.fail.at = 1
    tiers.hot.run("gpt", write_back="cold").save(state_of(1), step=1)
    with pytest.raises(NotReplicatedError, match=r"1 versions are durable here .*it is down"):
        tiers.hot.close()
    tiers.fail.at = 0
    tiers.held.clear()
    tiers.asked.clear()
    hot = tiers.open_hot()
    one = hot.write_back("cold", close_timeout_s=0.1)
    hot.run("gpt").save(state_of(2), step=2)
    assert tiers.asked.wait(_PATIENCE_S)
    genuine = one.stop

    def stop() -> None:
        genuine()  # the time is over
        tiers.held.set()

    monkeypatch.setattr(one, "stop", stop)
    with pytest.raises(NotReplicatedError, match="not in replica 'cold' yet"):
        hot.close()


def test_the_next_process_catches_up(tiers: Tiers) -> None:
    """What a process left behind comes when the next one writes back, and only what is missing."""
    tiers.fail.at = 1
    run = tiers.hot.run("gpt", write_back="cold")
    for step in (1, 2, 3):
        run.save(state_of(step), step=step)
    with pytest.raises(NotReplicatedError):
        tiers.hot.close()
    tiers.fail.at = 0
    hot = tiers.open_hot()
    oldest, newest = hot.resolve("gpt@1"), hot.resolve("gpt@3")
    hot.write_back("cold")
    hot.wait_replicated(newest, _PATIENCE_S)
    hot.wait_replicated(oldest, _PATIENCE_S)
    assert tiers.steps() == [1, 2, 3]
    before = tiers.hold.seen
    hot.close()
    again = tiers.open_hot()
    one = again.write_back("cold")
    one.wait(timeout_s=_PATIENCE_S)
    again.close()
    assert tiers.hold.seen == before  # not a single write


def test_ctrl_c_ends_at_once(tiers: Tiers) -> None:
    """A block that is interrupted does not wait for the replica; the error is the interrupt."""
    tiers.held.clear()
    hot = tiers.hot.__enter__()
    hot.run("gpt", write_back="cold").save(state_of(1), step=1)
    assert tiers.asked.wait(_PATIENCE_S)
    tiers.held.set()
    hot.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not any(one.name.startswith("ckptstore-write-back") for one in threading.enumerate())


def test_what_cannot_come_is_said(tiers: Tiers, tmp_path: Path) -> None:
    """A version that is damaged here does not keep others back; waiting for it says why."""
    tiers.held.clear()
    run = tiers.hot.run("gpt", write_back="cold")
    run.save(state_of(0), step=0)
    assert tiers.asked.wait(_PATIENCE_S)
    bad = run.save({"model": {"w": torch.randn(100, 100)}}, step=1)
    good = run.save(state_of(2), step=2)
    key = tiers.hot.repo.catalog.version(bad.id).manifest_key
    (tmp_path / "hot" / key).unlink()
    tiers.hot.repo.manifests._kept.clear()
    tiers.held.set()
    assert tiers.hot.wait_replicated(good, _PATIENCE_S).state == "replicated"
    with pytest.raises(NotReplicatedError, match="is gone"):
        tiers.hot.wait_replicated(bad, _PATIENCE_S)
    with pytest.raises(NotReplicatedError, match="1 versions do not come"):
        tiers.hot.close()


@pytest.mark.parametrize("how", ["replaced", "emptied"])
def test_another_store_in_the_place_of_an_open_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing counts as replicated that would go into a store that is not the replica any more.

    Nor is anything committed there, which would make that store's log unreadable.
    """
    monkeypatch.setattr(limits, "WRITE_BACK_PAUSE_S", 0.01)
    hot = ckptstore.open(tmp_path / "hot", create=True)
    hot.add_replica("cold", tmp_path / "cold", create=True)
    run = hot.run("gpt", write_back="cold")
    run.save(state_of(1), step=1)
    hot.wait_replicated("gpt@1", _PATIENCE_S)
    shutil.rmtree(tmp_path / "cold")
    if how == "replaced":
        ckptstore.open(tmp_path / "cold", create=True).close()
    run.save(state_of(2), step=2)
    with pytest.raises(NotReplicatedError, match="gone"):
        hot.wait_replicated("gpt@2")
    with pytest.raises(NotReplicatedError):
        hot.close()
    if how == "replaced":
        with ckptstore.open(tmp_path / "cold") as other:
            assert not other.versions()
    else:
        assert not list(tmp_path.glob("cold/commits/**/*.json"))


def test_a_replica_that_was_restored_from_a_backup_is_caught_up_with(tmp_path: Path) -> None:
    """What it is noted to have, and does not know, comes again; what it has deleted does not."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True)
        run = hot.run("gpt", write_back="cold")
        for step in (1, 2, 3, 4):
            run.save(state_of(step), step=step)
            hot.wait_replicated(f"gpt@{step}", _PATIENCE_S)
            if step == 2:
                with ckptstore.open(tmp_path / "cold") as cold:
                    cold.remove(["gpt@1"])
                shutil.copytree(tmp_path / "cold", tmp_path / "backup")
    shutil.rmtree(tmp_path / "cold")
    (tmp_path / "backup").rename(tmp_path / "cold")
    came: set[int] = set()
    whole = threading.Event()

    def hear(event: SaveEvent) -> None:
        came.add(event.step)
        if came >= {3, 4}:
            whole.set()

    with ckptstore.open(tmp_path / "hot") as hot:
        hot.observe(hear)
        hot.write_back("cold")
        assert whole.wait(_PATIENCE_S)
    assert came == {3, 4}
    with ckptstore.open(tmp_path / "cold") as cold:
        assert {version.step for version in cold.versions()} == {2, 3, 4}


def test_versions_that_are_deleted_meanwhile_are_not_waited_for(tiers: Tiers) -> None:
    """Retention may be faster than a replica; closing then has nothing to say."""
    tiers.held.clear()
    run = tiers.hot.run("gpt", write_back="cold")
    run.save(state_of(0), step=0)
    assert tiers.asked.wait(_PATIENCE_S)
    for step in (1, 2, 3):
        run.save(state_of(step), step=step)
    tiers.hot.remove(["gpt@1", "gpt@2"])
    tiers.held.set()
    tiers.hot.close()
    assert tiers.steps() == [0, 3]


def test_what_is_refused(tiers: Tiers) -> None:
    """A name that no replica has, limits below zero, waiting for what is not written back."""
    with pytest.raises(NotFoundError, match="no replica is called 'tape'"):
        tiers.hot.run("gpt", write_back="tape")
    with pytest.raises(InvalidInputError, match="not below 0"):
        tiers.hot.write_back("cold", bytes_per_s=-1.0)
    version = tiers.hot.run("gpt").save(state_of(1), step=1)
    with pytest.raises(InvalidInputError, match="nothing is written back"):
        tiers.hot.wait_replicated(version)
    tiers.hot.write_back("cold", runs=["other"])
    with pytest.raises(NotReplicatedError, match="not in replica 'cold' yet"):
        tiers.hot.wait_replicated(version)
    tiers.hot.close()


def test_it_works_at_low_priority_beside_the_store(tiers: Tiers) -> None:
    """Its thread is nicer than the training's, and no lock of the store's log is held by it."""
    if sys.platform != "linux":
        pytest.skip("niceness of a thread is Linux's")
    tiers.held.clear()
    run = tiers.hot.run("gpt", write_back="cold")
    run.save(state_of(1), step=1)
    assert tiers.asked.wait(_PATIENCE_S)
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("ckptstore-write-back")]
    assert thread.native_id is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = os.getpriority(os.PRIO_PROCESS, thread.native_id)
    assert niceness == min(19, own + limits.BACKGROUND_NICE)
    one = tiers.hot.write_back("cold", runs=["gpt"])
    assert one._here.log is not tiers.hot.repo.log
    tiers.held.set()
    tiers.hot.close()


def test_a_forked_child_has_none_of_it(tiers: Tiers) -> None:
    """What a child of a fork hears of is not its parent's to bring."""
    tiers.hot.run("gpt", write_back="cold")
    one = tiers.hot.write_back("cold", runs=["gpt"])
    one.wait(timeout_s=_PATIENCE_S)
    one._pid += 1  # as a child sees it
    one.hear(tiers.hot.repo.save_event("durable", "gpt", 1, "0" * 32))
    assert one.pending == 0
    with pytest.raises(NotReplicatedError, match="forked"):
        one.wait()
    one._pid -= 1
    tiers.hot.close()


def test_stopping_is_no_failure(tiers: Tiers) -> None:
    """A write-back that is told to stop ends with a word in the log, not with an error."""
    tiers.held.clear()
    tiers.hot.run("gpt", write_back="cold").save(state_of(1), step=1)
    assert tiers.asked.wait(_PATIENCE_S)
    one: WriteBack = tiers.hot.write_back("cold")
    one.stop()
    tiers.held.set()
    thread = one._thread
    assert thread is not None
    thread.join(_PATIENCE_S)
    assert not thread.is_alive()
    assert one.error is None
    with pytest.raises(NotReplicatedError):
        tiers.hot.close()
