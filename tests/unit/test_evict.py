"""Eviction, and pins for other stores: what one store evicts, the other holds and keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.base import Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import decode_commit
from ckptstore.catalog.lifecycle_ops import Delete, Pin, Unpin, pin_for
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.catalog.state import Op
from ckptstore.config import Options
from ckptstore.jobs import read_job, run_job
from ckptstore.maintenance.replicas.evict import EvictReport, evict
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend

STEPS = (1, 2, 3)


class _Watched(MemoryBackend):
    """Calls something right before or after a commit lands, once: the next, or of a kind."""

    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    kind: type | None = None

    def put_if_absent(self, key: str, data: Buffer) -> None:
        awaited = key.startswith("commits/") and self._is_awaited(bytes(data))
        if self.before and awaited:
            call, self.before = self.before, None
            call()
        super().put_if_absent(key, data)
        if self.after and awaited:
            call, self.after = self.after, None
            call()

    def _is_awaited(self, data: bytes) -> bool:
        return self.kind is None or any(
            isinstance(op, self.kind) for op in decode_commit(data, where="").ops
        )


@pytest.fixture
def hot(request: pytest.FixtureRequest) -> Store:
    """Return a store of three versions."""
    backend = _Watched(f"evict/{request.node.nodeid}/hot")
    store = Store(create_on(backend, chunk_bytes=1 << 16))
    run = store.run("gpt", metrics={"loss": "min"})
    for step in STEPS:
        run.save(_state(step), step=step, metrics={"loss": 1 / step})
    return store


@pytest.fixture
def cold(request: pytest.FixtureRequest, hot: Store) -> Store:
    """Return its replica."""
    backend = MemoryBackend(f"evict/{request.node.nodeid}/cold")
    store = Store(create_on(backend, chunk_bytes=1 << 16))
    hot.replicate(store)
    return store


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((20_000,), float(step))}, "m": {"v": torch.arange(9.0)}}


def _watched(store: Store) -> _Watched:
    backend = store.repo.backend
    while not isinstance(backend, _Watched):
        backend = backend.inner  # type: ignore[attr-defined]
    return backend


def _evict(hot: Store, cold: Store) -> EvictReport:
    return evict(hot.repo, cold.repo, hot.versions())


def _levels(store: Store) -> list[str]:
    return [version.level for version in store.versions()]


def _assert_loads(store: Store, step: int) -> None:
    loaded = store.load(f"gpt@{step}")
    assert torch.equal(loaded["model"]["w"], _state(step)["model"]["w"])


def test_what_the_other_store_holds_goes(hot: Store, cold: Store) -> None:
    """All but the head; tagged and pinned ones stay."""
    hot.tag("gpt@2", "good")
    report = _evict(hot, cold)
    assert [one.step for one in report.evicted] == [1]
    assert report.reclaimable_bytes > 0
    assert _levels(hot) == ["record", "full", "full"]
    assert _evict(hot, cold) == EvictReport()


@pytest.mark.parametrize("how", ["delete", "reduce"])
def test_let_go_there_at_the_same_moment(hot: Store, cold: Store, how: str) -> None:
    """Deleted there after the last look and before the commit here: it is here as before."""
    other = Store(cold.repo)

    def let_go() -> None:
        if how == "delete":
            other.remove(["gpt@1"])
        else:
            other.age(["gpt@1"], "record")

    before = hot.versions()
    # Its own catalog, so that the evicting process has not seen the deletion.
    backend = cold.repo.backend
    fresh = Store(create_on(backend, exist_ok=True))
    _watched(hot).before = let_go
    report = evict(hot.repo, fresh.repo, hot.versions())

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
def test_a_damaged_copy_counts_for_nothing(hot: Store, cold: Store, when: str) -> None:
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


def test_collected_here_at_the_same_moment(hot: Store, cold: Store) -> None:
    """A collection without grace that is faster yet: the report names what is to be undeleted."""
    other = Store(create_on(cold.repo.backend, exist_ok=True))
    collector = Store(create_on(hot.repo.backend, exist_ok=True))

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


def test_what_is_not_all_there_stays(hot: Store, cold: Store) -> None:
    """Versions whose objects are missing there are not let go."""
    gone = hot.versions()[0].id
    cold.repo.backend.delete(cold.resolve(f"#{gone}").manifest_key)
    report = _evict(hot, cold)
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


def test_no_answer_to_the_second_look(hot: Store, cold: Store) -> None:
    """Where the other store cannot be looked at again, everything is here as before."""
    down = Fault(calls=frozenset({"list"}), at=0, times=0)
    backend = FaultyBackend(cold.repo.backend, down)
    there = Store(create_on(backend, exist_ok=True))
    _watched(hot).after = lambda: setattr(down, "at", down.seen + 1)
    with pytest.raises(errors.StorageError, match="injected"):
        evict(hot.repo, there.repo, hot.versions())

    assert _levels(hot) == ["full", "full", "full"]
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    for step in STEPS:
        _assert_loads(hot, step)


def test_what_was_damaged_comes_back_as_damaged(hot: Store, cold: Store) -> None:
    """Whose parts are lost here, and who comes back all the same, is shared with by nobody."""
    damaged = hot.versions()[0]
    lost = {damaged.id: damaged.manifest_digest}
    hot.repo.log.append(lambda now: content_ops.quarantine(now, lost))
    other = Store(create_on(cold.repo.backend, exist_ok=True))
    _watched(hot).before = lambda: other.remove(["gpt@1"])
    report = _evict(hot, cold)

    assert report.returned == (damaged.id,)
    assert hot.versions()[0].damaged
    assert not hot.versions()[1].damaged


PINS_STEPS = (1, 2, 3, 4)
ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> tuple[Store, Store]:
    """Return a store of four versions, and its replica ``cold``."""
    made: list[Store] = []
    for place in ("cold", "hot"):
        backend = _Watched(f"pins/{request.node.nodeid}/{place}")
        repo = create_on(backend, chunk_bytes=1 << 16)
        made.append(Store(repo, replicas={"cold": made[0]} if made else None))
    cold, hot = made
    store = cold.info.store_id
    hot.repo.log.append_any(
        lambda now: name_replica(now, name="cold", url="memory://cold", store=store)
    )
    run = hot.run("gpt", metrics={"loss": "min"})
    for step in PINS_STEPS:
        run.save(_state(step), step=step, metrics={"loss": float(step)})
    hot.replicate(cold)
    return hot, cold


def _anew(store: Store) -> Store:
    """Return the same store, as another process sees it."""
    return Store(create_on(_watched(store), exist_ok=True))


def _just(op: Op, _: Catalog) -> list[Op]:
    return [op]


def _pinned(store: Store) -> list[int]:
    return [version.step for version in store.versions() if version.pinned]


def test_two_policies_that_are_each_right_lose_nothing(stores: tuple[Store, Store]) -> None:
    """What the hot store evicted outlives retention, rm and gc of the cold one; and loads."""
    hot, cold = stores
    report = hot.evict(replica="cold", keep="last 1")
    assert [one.step for one in report.evicted] == [1, 2, 3]
    assert report.pinned == tuple(sorted(one.id for one in report.evicted))

    plan = cold.retain({"full": "last 1"}, dry_run=True)
    reasons = {one.version.step: one.reasons for one in plan.plans[0].decisions}
    assert reasons[1][0].startswith(f"pinned for the store {hot.info.store_id[:8]}, which evicted")
    cold.retain({"full": "last 1"})
    (preview,) = cold.remove(["gpt@2"], dry_run=True, force=True)
    assert "which evicted it" in preview.obstacle
    for force in (False, True):
        with pytest.raises(errors.PolicyError, match="pinned for the store") as caught:
            cold.remove(["gpt@2"], force=force)
        assert "ckptstore pin --delete" in caught.value.hint
        assert "only copy" in caught.value.hint
    with pytest.raises(errors.PolicyError, match="pinned for the store"):
        cold.age(["gpt@2"], "weights", force=True)
    for store in (hot, cold):
        store.gc(**ZERO)

    for step in PINS_STEPS:
        _assert_loads(hot, step)
    assert cold.verify().ok


def test_without_pins_the_replica_decides(stores: tuple[Store, Store]) -> None:
    """``pin=False``: the rules there say how long what was evicted is kept."""
    hot, cold = stores
    assert hot.evict(replica="cold", keep="last 1", pin=False).pinned == ()
    assert _pinned(cold) == []
    cold.retain({"full": "last 1"})
    with pytest.raises(errors.VersionNotFoundError, match="deleted the version"):
        hot.load("gpt@1")


def test_what_was_evicted_before_is_pinned_when_it_is_named(stores: tuple[Store, Store]) -> None:
    """An eviction without pins, or by an older ckptstore, can be made good; once."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1", pin=False)
    report = hot.evict(["gpt@1", "gpt@2"], replica="cold")
    assert not report.evicted
    assert len(report.pinned) == 2
    assert _pinned(cold) == [1, 2]
    assert hot.evict(["gpt@1", "gpt@2"], replica="cold").pinned == ()


def test_content_that_comes_back_takes_its_pin_along(stores: tuple[Store, Store]) -> None:
    """By a refill, and by a replication back; what a person pinned stays pinned."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    cold.pin("gpt@2")
    assert _pinned(cold) == [1, 2, 3]
    hot.load("gpt@1", refill=True)
    assert _pinned(cold) == [2, 3]
    cold.replicate(hot, ["gpt@2", "gpt@3"])
    assert _pinned(cold) == [2]
    assert cold.resolve("gpt@2").pinned_for == ()
    assert hot.evict(replica="cold", keep="last 1").pinned
    assert _pinned(cold) == [1, 2, 3]
    cold.unpin("gpt@2")
    assert _pinned(cold) == [1, 3]


def test_what_is_deleted_here_need_not_be_kept_there(stores: tuple[Store, Store]) -> None:
    """The next eviction takes the pin away; other versions, and unknown ones, stay pinned."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    alien = cold.run("other").save(_state(9), step=9)
    store = hot.info.store_id
    cold.repo.log.append_any(lambda now: pin_for(now, [alien.id], store))
    gone = hot.resolve("gpt@2").id
    hot.remove(["gpt@2"])
    report = hot.evict(replica="cold", keep="last 1")
    assert report.unpinned == (gone,)
    assert _pinned(cold) == [1, 3, 9]


def test_a_replica_that_cannot_be_written_to(stores: tuple[Store, Store]) -> None:
    """Nothing is evicted that could not be pinned, and the error says how to do without."""
    hot, cold = stores
    there = open_on(_watched(cold), options=Options(read_only=True))
    with pytest.raises(errors.ReadOnlyError, match="pinned in the other store") as caught:
        evict(hot.repo, there, hot.versions(), pin=True)
    assert "--no-pin" in caught.value.hint
    assert {version.level for version in hot.versions()} == {"full"}
    report = evict(hot.repo, there, hot.versions())
    assert len(report.evicted) == 3


def test_killed_between_the_pin_and_the_commit_here(stores: tuple[Store, Store]) -> None:
    """A pin that nobody needs is all that is left, and the next eviction uses it."""
    hot, cold = stores

    def die() -> None:
        msg = "killed"
        raise errors.StorageError(msg)

    _watched(hot).before = die
    with pytest.raises(errors.StorageError, match="killed"):
        hot.evict(replica="cold", keep="last 1")
    assert {version.level for version in hot.versions()} == {"full"}
    assert _pinned(cold) == [1, 2, 3]
    assert len(hot.evict(replica="cold", keep="last 1").evicted) == 3


def test_a_pin_that_is_taken_away_at_the_same_moment_is_left_again(
    stores: tuple[Store, Store],
) -> None:
    """Between the pin there and the commit here: the look afterwards finds out."""
    hot, cold = stores
    other = _anew(cold)
    _watched(hot).before = lambda: other.unpin("gpt@1")
    assert len(hot.evict(replica="cold", keep="last 1").evicted) == 3
    assert _pinned(cold) == [1, 2, 3]


def test_deleted_there_between_pin_and_commit(stores: tuple[Store, Store]) -> None:
    """Unpinned and deleted at that moment: it stays here."""
    hot, cold = stores
    other = _anew(cold)

    def take() -> None:
        other.unpin("gpt@1")
        other.remove(["gpt@1"])

    _watched(hot).before = take
    report = hot.evict(replica="cold", keep="last 1")
    assert len(report.returned) == 1
    _assert_loads(hot, 1)
    assert _pinned(cold) == [2, 3]


def test_changed_here_between_pin_and_commit(stores: tuple[Store, Store]) -> None:
    """A version that is tagged at that moment stays, and its pin does not."""
    hot, cold = stores
    other = _anew(hot)
    _watched(hot).before = lambda: other.tag("gpt@1", "good")
    report = hot.evict(replica="cold", keep="last 1")
    assert [one.step for one in report.evicted] == [2, 3]
    assert _pinned(cold) == [2, 3]


def test_evicted_again_while_it_comes_back(stores: tuple[Store, Store]) -> None:
    """A pin that an eviction relied on while it was being taken away is left again."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    second = Store(_anew(hot).repo, replicas={"cold": _anew(cold)})
    done = []

    def evict_again() -> None:
        # The version has come back, and its pin is still there: the eviction leaves none.
        done.append(second.evict(["gpt@1"], replica="cold"))

    _watched(cold).kind, _watched(cold).before = Unpin, evict_again
    hot.replica("cold").replicate(hot, ["gpt@1"])
    assert [one.step for one in done[0].evicted] == [1]
    assert done[0].pinned == ()
    assert hot.resolve("gpt@1").level == "record"
    assert _pinned(cold) == [1, 2, 3]


def test_two_stores_that_evict_to_each_other(stores: tuple[Store, Store]) -> None:
    """What one has let go, the other cannot; also where both begin at once."""
    hot, cold = stores
    cold.replicate(hot)  # notes what the hot one has

    def other_way(*, dry_run: bool = False) -> int:
        here, there = _anew(cold), _anew(hot)
        report = evict(
            here.repo, there.repo, here.versions(), pin=True,
            dry_run=dry_run,
        )  # fmt: skip
        return len(report.evicted)

    assert other_way(dry_run=True) == 3
    evicted: list[int] = []
    # The pins there are made, the commit here is not.
    _watched(hot).before = lambda: evicted.append(other_way())
    report = hot.evict(replica="cold", keep="last 1")
    assert len(report.evicted) == 3
    assert evicted == [0]
    for step in PINS_STEPS:
        _assert_loads(hot, step)


def test_pins_of_a_store_that_is_gone(stores: tuple[Store, Store]) -> None:
    """All of one store's at once, by the beginning of its id; a person's own stay."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    cold.pin("gpt@3")
    other = cold.resolve("gpt@4").id
    cold.repo.log.append_any(lambda now: pin_for(now, [other], "f" * 32))
    with pytest.raises(errors.NotFoundError, match="pinned for a store 'xyz'"):
        cold.unpin_for("xyz")
    with pytest.raises(errors.NotFoundError):
        cold.unpin_for("")
    found = cold.unpin_for(hot.info.store_id[:6])
    assert [version.step for version in found] == [1, 2, 3]
    assert _pinned(cold) == [3, 4]
    twin = "f" * 31 + "e"
    cold.repo.log.append_any(lambda now: pin_for(now, [other], twin))
    with pytest.raises(errors.InvalidInputError, match="2 stores"):
        cold.unpin_for("ff")


def test_pins_are_in_snapshots_and_in_the_log(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the store knows for whom a version is pinned; from either."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 1)
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    cold.pin("gpt@1")
    cold.repo.log.leave_snapshot()
    backend = _watched(cold)
    meant = [(v.pinned, v.pinned_for) for v in cold.versions()]
    assert meant == [*[(True, (hot.info.store_id,))] * 3, (False, ())]
    for _ in range(2):
        assert [(v.pinned, v.pinned_for) for v in _anew(cold).versions()] == meant
        for info in list(backend.list("snapshots/")):
            backend.delete(info.key)
    again = _anew(cold)
    again.unpin_for(hot.info.store_id)
    assert _pinned(again) == [1]


def test_a_pin_of_a_person_is_written_as_before() -> None:
    """The field is there only where another store is meant: older readers see a pin in any case."""
    for op in (Pin(version="0" * 32), Unpin(version="0" * 32)):
        assert b"store" not in msgspec.json.encode(op)
    assert b"store" in msgspec.json.encode(Pin(version="0" * 32, store="1" * 32))


def _pinned_as_before(store: Store) -> list[int]:
    """Return what is pinned to a reader from before pins were for somebody."""
    backend = _watched(store)
    pinned: dict[str, None] = {}
    for info in backend.list("commits/"):
        for op in decode_commit(backend.get(info.key, bytes_max=1 << 20), where=info.key).ops:
            if isinstance(op, Pin):
                pinned[op.version] = None
            elif isinstance(op, Unpin):
                pinned.pop(op.version, None)
    return sorted(store.resolve(f"#{one}").step for one in pinned)


def test_readers_from_before_see_the_same_versions_pinned(stores: tuple[Store, Store]) -> None:
    """Whatever is pinned and unpinned, for whom, and by whom: else one deletes what is pinned.

    Such a deletion would end the log for everybody else.
    """
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    cold.pin("gpt@1")
    other = cold.resolve("gpt@2").id
    cold.repo.log.append_any(lambda now: pin_for(now, [other], "f" * 32))
    assert _pinned_as_before(cold) == _pinned(cold) == [1, 2, 3]
    cold.unpin_for(hot.info.store_id)
    assert _pinned_as_before(cold) == _pinned(cold) == [1, 2]
    cold.unpin_for("f")
    assert _pinned_as_before(cold) == _pinned(cold) == [1]
    assert not cold.resolve("gpt@1").pinned_for
    cold.repo.log.append_any(lambda now: pin_for(now, [other], "f" * 32))
    for step in (1, 2):  # as such a reader unpins, and deletes
        one = cold.resolve(f"gpt@{step}").id
        for op in (Unpin(version=one), Delete(versions=[one])):
            cold.repo.log.append(partial(_just, op))
    assert _pinned_as_before(_anew(cold)) == _pinned(_anew(cold)) == []


def test_pins_of_too_many_stores(stores: tuple[Store, Store]) -> None:
    """Refused when they are made, and when a log has them all the same."""
    _, cold = stores
    one = cold.resolve("gpt@1").id
    for number in range(limits.REPLICAS_MAX):
        cold.repo.log.append_any(partial(pin_for, versions=[one], store=f"{number + 1:032x}"))
    cold.pin("gpt@1")
    with pytest.raises(errors.LimitError, match="is pinned for"):
        cold.repo.log.append_any(lambda now: pin_for(now, [one], "f" * 32))
    with pytest.raises(errors.InvalidInputError, match="too many stores"):
        cold.repo.log.append(lambda _: [Pin(version=one, store="f" * 32)])
    assert len(_anew(cold).resolve("gpt@1").pinned_for) == limits.REPLICAS_MAX
    cold.unpin("gpt@1")
    assert not _anew(cold).resolve("gpt@1").pinned


def test_what_is_said_in_the_log(stores: tuple[Store, Store]) -> None:
    """The trail names the store that a pin is for."""
    hot, cold = stores
    hot.evict(["gpt@1"], replica="cold")
    key = max(info.key for info in _watched(cold).list("commits/"))
    (op,) = decode_commit(_watched(cold).get(key, bytes_max=1 << 20), where=key).ops
    assert op == Pin(version=hot.resolve("gpt@1").id, store=hot.info.store_id)
