"""Pins for other stores: what one store let go, the other keeps, whatever its own rules say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import decode_commit
from ckptstore.catalog.lifecycle_ops import Delete, Pin, Unpin, pin_for
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.catalog.state import Op
from ckptstore.config import Options
from ckptstore.errors import (
    InvalidInputError,
    LimitError,
    NotFoundError,
    PolicyError,
    ReadOnlyError,
    StorageError,
    VersionNotFoundError,
)
from ckptstore.maintenance.replicas.evict import evict
from ckptstore.repo import create_on, open_on

STEPS = (1, 2, 3, 4)
ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


class _Watched(MemoryBackend):
    """Calls something right before a commit lands, once: the next one, or the next of a kind."""

    before: Callable[[], object] | None = None
    kind: type | None = None

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object."""
        if self.before and key.startswith("commits/") and self._is_awaited(bytes(data)):
            call, self.before = self.before, None
            call()
        super().put_if_absent(key, data)

    def _is_awaited(self, data: bytes) -> bool:
        return self.kind is None or any(
            isinstance(op, self.kind) for op in decode_commit(data, where="").ops
        )


def _watched(store: ckptstore.Store) -> _Watched:
    backend = store.repo.backend
    while not isinstance(backend, _Watched):
        backend = backend.inner  # type: ignore[attr-defined]
    return backend


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((20_000,), float(step))}, "m": {"v": torch.arange(9.0)}}


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> tuple[ckptstore.Store, ckptstore.Store]:
    """Return a store of four versions, and its replica ``cold``."""
    made: list[ckptstore.Store] = []
    for place in ("cold", "hot"):
        backend = _Watched(f"pins/{request.node.nodeid}/{place}")
        repo = create_on(backend, chunk_bytes=1 << 16)
        made.append(ckptstore.Store(repo, replicas={"cold": made[0]} if made else None))
    cold, hot = made
    store = cold.info.store_id
    hot.repo.log.append_any(
        lambda now: name_replica(now, name="cold", url="memory://cold", store=store)
    )
    run = hot.run("gpt", metrics={"loss": "min"})
    for step in STEPS:
        run.save(_state(step), step=step, metrics={"loss": float(step)})
    hot.replicate(cold)
    return hot, cold


def _anew(store: ckptstore.Store) -> ckptstore.Store:
    """Return the same store, as another process sees it."""
    backend = store.repo.backend
    while not isinstance(backend, _Watched):
        backend = backend.inner  # type: ignore[attr-defined]
    return ckptstore.Store(create_on(backend, exist_ok=True))


def _just(op: Op, _: Catalog) -> list[Op]:
    return [op]


def _pinned(store: ckptstore.Store) -> list[int]:
    return [version.step for version in store.versions() if version.pinned]


def _assert_loads(store: ckptstore.Store, step: int) -> None:
    assert torch.equal(store.load(f"gpt@{step}")["model"]["w"], _state(step)["model"]["w"])


def test_two_policies_that_are_each_right_lose_nothing(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
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
        with pytest.raises(PolicyError, match="pinned for the store") as caught:
            cold.remove(["gpt@2"], force=force)
        assert "ckptstore pin --delete" in caught.value.hint
        assert "only copy" in caught.value.hint
    with pytest.raises(PolicyError, match="pinned for the store"):
        cold.age(["gpt@2"], "weights", force=True)
    for store in (hot, cold):
        store.gc(**ZERO)

    for step in STEPS:
        _assert_loads(hot, step)
    assert cold.verify().ok


def test_without_pins_the_replica_decides(stores: tuple[ckptstore.Store, ckptstore.Store]) -> None:
    """``pin=False``: the rules there say how long what was evicted is kept."""
    hot, cold = stores
    assert hot.evict(replica="cold", keep="last 1", pin=False).pinned == ()
    assert _pinned(cold) == []
    cold.retain({"full": "last 1"})
    with pytest.raises(VersionNotFoundError, match="deleted the version"):
        hot.load("gpt@1")


def test_what_was_evicted_before_is_pinned_when_it_is_named(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """An eviction without pins, or by an older ckptstore, can be made good; once."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1", pin=False)
    report = hot.evict(["gpt@1", "gpt@2"], replica="cold")
    assert not report.evicted
    assert len(report.pinned) == 2
    assert _pinned(cold) == [1, 2]
    assert hot.evict(["gpt@1", "gpt@2"], replica="cold").pinned == ()


def test_content_that_comes_back_takes_its_pin_along(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
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


def test_what_is_deleted_here_need_not_be_kept_there(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
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


def test_a_replica_that_cannot_be_written_to(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """Nothing is evicted that could not be pinned, and the error says how to do without."""
    hot, cold = stores
    there = open_on(_watched(cold), options=Options(read_only=True))
    with pytest.raises(ReadOnlyError, match="pinned in the other store") as caught:
        evict(hot.repo, there, hot.versions(), missing=lambda _: set(), pin=True)
    assert "--no-pin" in caught.value.hint
    assert {version.level for version in hot.versions()} == {"full"}
    report = evict(hot.repo, there, hot.versions(), missing=lambda _: set())
    assert len(report.evicted) == 3


def test_killed_between_the_pin_and_the_commit_here(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """A pin that nobody needs is all that is left, and the next eviction uses it."""
    hot, cold = stores

    def die() -> None:
        msg = "killed"
        raise StorageError(msg)

    _watched(hot).before = die
    with pytest.raises(StorageError, match="killed"):
        hot.evict(replica="cold", keep="last 1")
    assert {version.level for version in hot.versions()} == {"full"}
    assert _pinned(cold) == [1, 2, 3]
    assert len(hot.evict(replica="cold", keep="last 1").evicted) == 3


def test_a_pin_that_is_taken_away_at_the_same_moment_is_left_again(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """Between the pin there and the commit here: the look afterwards finds out."""
    hot, cold = stores
    other = _anew(cold)
    _watched(hot).before = lambda: other.unpin("gpt@1")
    assert len(hot.evict(replica="cold", keep="last 1").evicted) == 3
    assert _pinned(cold) == [1, 2, 3]


def test_deleted_there_between_pin_and_commit(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
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


def test_changed_here_between_pin_and_commit(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """A version that is tagged at that moment stays, and its pin does not."""
    hot, cold = stores
    other = _anew(hot)
    _watched(hot).before = lambda: other.tag("gpt@1", "good")
    report = hot.evict(replica="cold", keep="last 1")
    assert [one.step for one in report.evicted] == [2, 3]
    assert _pinned(cold) == [2, 3]


def test_evicted_again_while_it_comes_back(stores: tuple[ckptstore.Store, ckptstore.Store]) -> None:
    """A pin that an eviction relied on while it was being taken away is left again."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    second = ckptstore.Store(_anew(hot).repo, replicas={"cold": _anew(cold)})
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


def test_two_stores_that_evict_to_each_other(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
    """What one has let go, the other cannot; also where both begin at once."""
    hot, cold = stores
    cold.replicate(hot)  # notes what the hot one has

    def other_way(*, dry_run: bool = False) -> int:
        here, there = _anew(cold), _anew(hot)
        report = evict(
            here.repo,
            there.repo,
            here.versions(),
            missing=lambda _: set(),
            pin=True,
            dry_run=dry_run,
        )
        return len(report.evicted)

    assert other_way(dry_run=True) == 3
    evicted: list[int] = []
    # The pins there are made, the commit here is not.
    _watched(hot).before = lambda: evicted.append(other_way())
    report = hot.evict(replica="cold", keep="last 1")
    assert len(report.evicted) == 3
    assert evicted == [0]
    for step in STEPS:
        _assert_loads(hot, step)


def test_pins_of_a_store_that_is_gone(stores: tuple[ckptstore.Store, ckptstore.Store]) -> None:
    """All of one store's at once, by the beginning of its id; a person's own stay."""
    hot, cold = stores
    hot.evict(replica="cold", keep="last 1")
    cold.pin("gpt@3")
    other = cold.resolve("gpt@4").id
    cold.repo.log.append_any(lambda now: pin_for(now, [other], "f" * 32))
    with pytest.raises(NotFoundError, match="pinned for a store 'xyz'"):
        cold.unpin_for("xyz")
    with pytest.raises(NotFoundError):
        cold.unpin_for("")
    found = cold.unpin_for(hot.info.store_id[:6])
    assert [version.step for version in found] == [1, 2, 3]
    assert _pinned(cold) == [3, 4]
    twin = "f" * 31 + "e"
    cold.repo.log.append_any(lambda now: pin_for(now, [other], twin))
    with pytest.raises(InvalidInputError, match="2 stores"):
        cold.unpin_for("ff")


def test_pins_are_in_snapshots_and_in_the_log(
    stores: tuple[ckptstore.Store, ckptstore.Store], monkeypatch: pytest.MonkeyPatch
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


def _pinned_as_before(store: ckptstore.Store) -> list[int]:
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


def test_readers_from_before_see_the_same_versions_pinned(
    stores: tuple[ckptstore.Store, ckptstore.Store],
) -> None:
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


def test_pins_of_too_many_stores(stores: tuple[ckptstore.Store, ckptstore.Store]) -> None:
    """Refused when they are made, and when a log has them all the same."""
    _, cold = stores
    one = cold.resolve("gpt@1").id
    for number in range(limits.REPLICAS_MAX):
        cold.repo.log.append_any(partial(pin_for, versions=[one], store=f"{number + 1:032x}"))
    cold.pin("gpt@1")
    with pytest.raises(LimitError, match="is pinned for"):
        cold.repo.log.append_any(lambda now: pin_for(now, [one], "f" * 32))
    with pytest.raises(InvalidInputError, match="too many stores"):
        cold.repo.log.append(lambda _: [Pin(version=one, store="f" * 32)])
    assert len(_anew(cold).resolve("gpt@1").pinned_for) == limits.REPLICAS_MAX
    cold.unpin("gpt@1")
    assert not _anew(cold).resolve("gpt@1").pinned


def test_what_is_said_in_the_log(stores: tuple[ckptstore.Store, ckptstore.Store]) -> None:
    """The trail names the store that a pin is for."""
    hot, cold = stores
    hot.evict(["gpt@1"], replica="cold")
    key = max(info.key for info in _watched(cold).list("commits/"))
    (op,) = decode_commit(_watched(cold).get(key, bytes_max=1 << 20), where=key).ops
    assert op == Pin(version=hot.resolve("gpt@1").id, store=hot.info.store_id)
