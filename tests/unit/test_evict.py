"""Eviction: no version is let go that the other store does not hold, whatever happens meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.backends.base import Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.errors import StorageError
from ckptstore.jobs import read_job, run_job
from ckptstore.maintenance.replicas.evict import EvictReport, evict
from ckptstore.model import Version
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend

STEPS = (1, 2, 3)


class _Watched(MemoryBackend):
    """Calls something right before or after a commit lands."""

    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object; what is to happen at this moment happens once."""
        if self.before and key.startswith("commits/"):
            call, self.before = self.before, None
            call()
        super().put_if_absent(key, data)
        if self.after and key.startswith("commits/"):
            call, self.after = self.after, None
            call()


@pytest.fixture
def hot(request: pytest.FixtureRequest) -> ckptstore.Store:
    """Return a store of three versions."""
    backend = _Watched(f"evict/{request.node.nodeid}/hot")
    store = ckptstore.Store(create_on(backend, chunk_bytes=1 << 16))
    run = store.run("gpt", metrics={"loss": "min"})
    for step in STEPS:
        run.save(_state(step), step=step, metrics={"loss": 1 / step})
    return store


@pytest.fixture
def cold(request: pytest.FixtureRequest, hot: ckptstore.Store) -> ckptstore.Store:
    """Return its replica."""
    backend = MemoryBackend(f"evict/{request.node.nodeid}/cold")
    store = ckptstore.Store(create_on(backend, chunk_bytes=1 << 16))
    hot.replicate(store)
    return store


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((20_000,), float(step))}, "m": {"v": torch.arange(9.0)}}


def _watched(store: ckptstore.Store) -> _Watched:
    backend = store.repo.backend
    while not isinstance(backend, _Watched):
        backend = backend.inner  # type: ignore[attr-defined]
    return backend


def _evict(hot: ckptstore.Store, cold: ckptstore.Store) -> EvictReport:
    return evict(hot.repo, cold.repo, hot.versions(), missing=_nothing)


def _nothing(versions: Sequence[Version]) -> set[str]:
    assert versions
    return set()


def _levels(store: ckptstore.Store) -> list[str]:
    return [version.level for version in store.versions()]


def _assert_loads(store: ckptstore.Store, step: int) -> None:
    loaded = store.load(f"gpt@{step}")
    assert torch.equal(loaded["model"]["w"], _state(step)["model"]["w"])


def test_what_the_other_store_holds_goes(hot: ckptstore.Store, cold: ckptstore.Store) -> None:
    """All but the head; tagged and pinned ones stay."""
    hot.tag("gpt@2", "good")
    report = _evict(hot, cold)
    assert [one.step for one in report.evicted] == [1]
    assert report.reclaimable_bytes > 0
    assert _levels(hot) == ["record", "full", "full"]
    assert _evict(hot, cold) == EvictReport()


@pytest.mark.parametrize("how", ["delete", "reduce"])
def test_let_go_there_at_the_same_moment(
    hot: ckptstore.Store, cold: ckptstore.Store, how: str
) -> None:
    """Deleted there after the last look and before the commit here: it is here as before."""
    other = ckptstore.Store(cold.repo)

    def let_go() -> None:
        if how == "delete":
            other.remove(["gpt@1"])
        else:
            other.age(["gpt@1"], "record")

    before = hot.versions()
    # Its own catalog, so that the evicting process has not seen the deletion.
    backend = cold.repo.backend
    fresh = ckptstore.Store(create_on(backend, exist_ok=True))
    _watched(hot).before = let_go
    report = evict(hot.repo, fresh.repo, hot.versions(), missing=_nothing)

    assert [one.step for one in report.evicted] == [2]
    assert report.returned == (before[0].id,)
    assert not report.lost
    assert _levels(hot) == ["full", "record", "full"]
    _assert_loads(hot, 1)
    assert hot.versions()[0].roles == before[0].roles
    assert hot.versions()[0].receipt == before[0].receipt
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    _assert_loads(hot, 1)
    assert hot.verify().ok


@pytest.mark.parametrize("when", ["before", "at the same moment"])
def test_a_damaged_copy_counts_for_nothing(
    hot: ckptstore.Store, cold: ckptstore.Store, when: str
) -> None:
    """A version that the other store has quarantined stays here, though its objects are there."""
    copy = cold.resolve("gpt@1")

    def quarantine() -> None:
        lost = {copy.id: copy.manifest_digest}
        cold.repo.log.append(lambda now: content_ops.quarantine(now, lost))

    if when == "before":
        quarantine()
    else:
        _watched(hot).before = quarantine
    report = _evict(hot, cold)
    assert [one.step for one in report.evicted] == [2]
    assert report.returned == (() if when == "before" else (copy.id,))
    assert _levels(hot) == ["full", "record", "full"]
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    _assert_loads(hot, 1)


def test_collected_here_at_the_same_moment(hot: ckptstore.Store, cold: ckptstore.Store) -> None:
    """A collection without grace that is faster yet: the report names what is to be undeleted."""
    other = ckptstore.Store(create_on(cold.repo.backend, exist_ok=True))
    collector = ckptstore.Store(create_on(hot.repo.backend, exist_ok=True))

    def let_go() -> None:
        other.remove(["gpt@1"])
        collector.gc(grace_s=0.0, orphan_age_s=0.0)

    _watched(hot).after = let_go
    report = _evict(hot, cold)

    (lost,) = report.lost
    assert lost.step == 1
    assert "undelete it there" in lost.message
    other.undelete([f"#{lost.version}"])
    _assert_loads(other, 1)


def test_what_is_not_all_there_stays(hot: ckptstore.Store, cold: ckptstore.Store) -> None:
    """Versions whose objects are missing there are not let go."""
    gone = hot.versions()[0].id
    report = evict(hot.repo, cold.repo, hot.versions(), missing=lambda versions: [gone])
    assert report.missed == (gone,)
    assert _levels(hot) == ["full", "record", "full"]


@pytest.mark.parametrize("check", [True, False])
def test_a_dry_run_counts_what_would_come_first(tmp_path: Path, check: bool) -> None:
    """What the same job would copy and read back, it would also evict; unchecked, nothing."""
    numbers = itertools.count(1)
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        for step in (next(numbers), next(numbers), next(numbers)):
            store.run("gpt").save(_state(step), step=step)
    file = tmp_path / "job.toml"
    file.write_text(
        f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{tmp_path}/cold"\n'
        f'[copy]\ncheck = {str(check).lower()}\n[retain]\nevict = "last 1"\n'
    )
    foreseen, done = (
        next(
            step.result
            for step in run_job(read_job(file), dry_run=dry).steps
            if step.name == "evict"
        )
        for dry in (True, False)
    )
    assert foreseen == done
    assert foreseen["evicted"] == (2 if check else 0)


def test_no_answer_to_the_second_look(hot: ckptstore.Store, cold: ckptstore.Store) -> None:
    """Where the other store cannot be looked at again, everything is here as before."""
    down = Fault(calls=frozenset({"list"}), at=0, times=0)
    backend = FaultyBackend(cold.repo.backend, down)
    there = ckptstore.Store(create_on(backend, exist_ok=True))
    _watched(hot).after = lambda: setattr(down, "at", down.seen + 1)
    with pytest.raises(StorageError, match="injected"):
        evict(hot.repo, there.repo, hot.versions(), missing=_nothing)

    assert _levels(hot) == ["full", "full", "full"]
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    for step in STEPS:
        _assert_loads(hot, step)


def test_what_was_damaged_comes_back_as_damaged(
    hot: ckptstore.Store, cold: ckptstore.Store
) -> None:
    """Whose parts are lost here, and who comes back all the same, is shared with by nobody."""
    damaged = hot.versions()[0]
    lost = {damaged.id: damaged.manifest_digest}
    hot.repo.log.append(lambda now: content_ops.quarantine(now, lost))
    other = ckptstore.Store(create_on(cold.repo.backend, exist_ok=True))
    _watched(hot).before = lambda: other.remove(["gpt@1"])
    report = _evict(hot, cold)

    assert report.returned == (damaged.id,)
    assert hot.versions()[0].damaged
    assert not hot.versions()[1].damaged
