"""Replication: versions of one store become versions of another, whole or not at all."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from damaging import flip_object
from metered import MeteredBackend
from shortening import places

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CkptStoreError, ConflictError, InvalidInputError, ReadOnlyError
from ckptstore.limits import KIB
from ckptstore.maintenance.replicas import replicate_version as module
from ckptstore.maintenance.replicas.evict import evict
from ckptstore.model import Version
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend, When

Backends = Callable[[], MemoryBackend]
ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


def _store(backend: Backend, *, chunk_bytes: int = 64 * KIB) -> ckptstore.Store:
    return ckptstore.Store(create_on(backend, exist_ok=True, chunk_bytes=chunk_bytes))


def _state(step: int) -> dict[str, Any]:
    torch.manual_seed(1)
    weight = torch.randn(300, 300)
    weight[step % 300] += step
    return {
        "model": {"w": weight, "b": torch.full((7,), float(step)), "zeros": torch.zeros(200, 200)},
        "optimizer": {"m": torch.randn(100, 300) + step},
        "epoch": step,
    }


def _history(store: ckptstore.Store) -> None:
    """Four versions, a rollback, a fork, tags, metrics of all kinds."""
    run = store.run("gpt", metrics={"loss": "min", "acc": "max"})
    losses = {1: 3.0, 2: math.nan, 3: -math.inf, 4: 2.5}
    for step, loss in losses.items():
        run.save(
            _state(step), step=step, metrics={"loss": loss, "acc": step / 10},
            tags=["first"] if step == 1 else (), metadata={"lr": 0.1 * step},
        )  # fmt: skip
    run.rollback("3")
    run.save(_state(5), step=5, metrics={"loss": 2.0})
    store.fork("gpt@3", "ft", roles=["weights"])
    store.run("ft").save(_state(6), step=6, tags=["release"])
    store.annotate("gpt@1", {"bleu": 31.0})


def _said(version: Version) -> dict[str, Any]:
    """Return what of a version must be the same in every store."""
    names = [
        "id", "run", "step", "parent", "created_at", "content", "tags", "metadata", "level",
        "abandoned",
    ]  # fmt: skip
    metrics = {name: repr(value) for name, value in version.metrics.items()}
    return {**{name: getattr(version, name) for name in (*names, "abandoned")}, "metrics": metrics}


def _catalog(store: ckptstore.Store) -> dict[str, Any]:
    runs = {
        info.name: (dict(info.metrics), info.head, dict(info.tags), info.origin)
        for info in store.runs()
    }
    return {"runs": runs, "versions": {v.id: _said(v) for v in store.versions()}}


def _assert_loads(store: ckptstore.Store, versions: list[Version]) -> None:
    for version in versions:
        state = store.load(f"#{version.id}")
        expected = _state(version.step)["model"]
        assert all(torch.equal(state["model"][name], expected[name]) for name in expected)


def test_a_store_travels_and_comes_back(backends: Backends) -> None:
    """Through a second store into a third: catalogs are equal, and all states bit for bit."""
    first = _store(backends())
    second, third = _store(backends(), chunk_bytes=256 * KIB), _store(backends())
    _history(first)

    there = first.replicate(second)
    back = second.replicate(third)

    assert _catalog(first) == _catalog(second) == _catalog(third)
    assert len(there.copied) == len(back.copied) == 7
    assert there.checked
    assert there.noted
    _assert_loads(third, third.versions())
    assert second.verify().ok
    assert third.verify().ok
    assert third.resolve("gpt@best:loss").step == 3  # -inf, as in the first
    assert {v.origin for v in third.versions()} == {first.info.store_id}
    assert all(v.state == "replicated" for v in first.versions())
    assert {v.replicas for v in second.versions()} == {(third.info.store_id,)}


def test_what_is_there_does_not_travel(backends: Backends) -> None:
    """A repetition moves no pack and takes under 10 requests on each side, however many runs."""
    here, there = MeteredBackend(backends()), MeteredBackend(backends())
    source, target = _store(here), _store(there)
    _history(source)
    source.replicate(target)
    before = {meter: meter.snapshot() for meter in (here, there)}

    report = source.replicate(target)

    assert (report.copied, report.chunk_bytes, len(report.present)) == ((), 0, 7)
    for meter, counted in before.items():
        after = meter.snapshot()
        calls = {name: after[name].calls - counted[name].calls for name in after}
        assert sum(calls.values()) < 10, calls
        assert calls.get("open_writer", 0) == 0
        assert calls.get("put", 0) == 0


def test_only_missing_chunks_travel(backends: Backends) -> None:
    """A version that continues one which is there costs the chunks that differ, once."""
    source, target = _store(backends()), _store(backends())
    run = source.run("gpt")
    run.save(_state(1), step=1)
    whole = source.replicate(target)
    run.save(_state(2), step=2)

    foreseen = source.replicate(target, dry_run=True)
    more = source.replicate(target)

    assert whole.chunk_bytes > 2 * more.chunk_bytes > 0
    assert (foreseen.chunk_bytes, foreseen.chunks_count) == (more.chunk_bytes, more.chunks_count)
    assert foreseen.copied == more.copied
    assert [v.step for v in target.versions()] == [1, 2]


def test_ancestors_come_as_records_and_are_filled_later(backends: Backends) -> None:
    """Of what was not asked for the record comes; asking for it later brings its content."""
    source, target = _store(backends()), _store(backends())
    _history(source)

    report = source.replicate(target, ["ft@6"])

    levels = {(v.run, v.step): v.level for v in target.versions()}
    assert levels == {
        ("gpt", 1): "record", ("gpt", 2): "record", ("gpt", 3): "record", ("ft", 3): "record",
        ("ft", 6): "full",
    }  # fmt: skip
    assert report.records_count == 4
    assert target.runs()[-1].origin == source.resolve("gpt@3").id
    source.replicate(target, runs=["gpt"], keep="best 1 loss")
    assert {v.step: v.level for v in target.versions("gpt")} == {
        1: "record",
        2: "record",
        3: "full",
    }
    source.replicate(target, ["gpt@2"])
    assert target.resolve("gpt@2").level == "full"
    source.replicate(target)
    assert _catalog(target) == _catalog(source)
    _assert_loads(target, target.versions())


def test_rules_choose_versions(backends: Backends) -> None:
    """`keep` takes what a policy of these rules would name, and not what is kept anyway."""
    source, target = _store(backends()), _store(backends())
    _history(source)
    source.replicate(target, keep="tagged")
    full = {(v.run, v.step) for v in target.versions() if v.level == "full"}
    assert full == {("gpt", 1), ("ft", 6)}
    with pytest.raises(InvalidInputError, match="rule"):
        source.replicate(target, keep="nonsense")


def test_the_head_stays_where_training_went_on(backends: Backends) -> None:
    """A target whose run has versions of its own keeps its head, and gets the source's versions."""
    source, target = _store(backends()), _store(backends())
    source.run("gpt").save(_state(1), step=1)
    source.replicate(target)
    own = target.run("gpt").save(_state(7), step=7)
    source.run("gpt").save(_state(2), step=2)

    source.replicate(target)

    head = target.run("gpt").head
    assert head is not None
    assert head.id == own.id
    assert sorted(v.step for v in target.versions()) == [1, 2, 7]
    back = target.replicate(source)
    assert len(back.copied) == 1
    source_head = source.run("gpt").head
    assert source_head is not None
    assert source_head.step == 2


def test_rollbacks_and_metrics_follow(backends: Backends) -> None:
    """Heads, abandoned versions, later metrics and moved tags are brought by the next run."""
    source, target = _store(backends()), _store(backends())
    _history(source)
    source.replicate(target)
    source.run("gpt").rollback("2")
    source.annotate("gpt@2", {"loss": 1.5})
    source.tag("gpt@2", "first")

    source.replicate(target)

    assert _catalog(target) == _catalog(source)


def test_deleted_in_the_target_stays_deleted(backends: Backends) -> None:
    """What the target's own retention took away is not brought back, and the report says so."""
    source, target = _store(backends()), _store(backends())
    _history(source)
    source.replicate(target)
    target.remove(["gpt@2"])
    report = source.replicate(target)
    assert [(one.step, one.why) for one in report.left] == [(2, "deleted in the target")]
    assert 2 not in {v.step for v in target.versions("gpt")}


def test_other_runs_of_the_name_are_refused(backends: Backends) -> None:
    """Two runs that have nothing in common are never mixed; nothing is written."""
    backend = backends()
    source, target = _store(backends()), _store(backend)
    source.run("gpt").save(_state(1), step=1)
    target.run("gpt").save(_state(2), step=2)
    before = len(list(backend.list("")))
    with pytest.raises(ConflictError, match="nothing in common"):
        source.replicate(target)
    assert len(list(backend.list(""))) == before


def test_a_store_is_no_replica_of_itself(backends: Backends) -> None:
    """Source and target that are one store are refused."""
    backend = backends()
    source = _store(backend)
    with pytest.raises(ConflictError, match="one store"):
        source.replicate(_store(backend))


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_interrupted_at_any_call(backends: Backends, when: When) -> None:
    """Whatever call of the target fails: what shows there loads, and a repetition finishes."""
    source = _store(backends())
    run = source.run("gpt", metrics={"loss": "min"})
    for step in (1, 2):
        state = {"model": {"w": torch.full((9,), 1.0)}, "epoch": step}
        run.save(state, step=step, metrics={"loss": 1 / step}, tags=[f"t{step}"])
    counting = Fault(at=0)
    source.replicate(_store(FaultyBackend(backends(), counting)))
    for at in places(counting.seen, str(when), every=9):
        memory = backends()
        _store(memory)
        fault = Fault(at=at, when=when)
        try:
            source.replicate(
                ckptstore.Store(create_on(FaultyBackend(memory, fault), exist_ok=True))
            )
        except CkptStoreError:
            assert fault.hits
        target = _store(memory)
        assert not target.verify().damaged_versions
        source.replicate(target)
        assert _catalog(target) == _catalog(source)
        target.gc(**ZERO)
        assert target.verify().ok


def test_two_at_once(backends: Backends) -> None:
    """Two replications of the same versions bring each once, and neither fails."""
    source, memory = _store(backends()), backends()
    _history(source)
    _store(memory)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            source.replicate(_store(memory))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    target = _store(memory)
    assert not failures
    assert _catalog(target) == _catalog(source)
    target.gc(**ZERO)
    _assert_loads(target, target.versions())


def test_collected_while_it_travels(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collection without patience took for orphans is sent again."""
    source, memory = _store(backends()), backends()
    source.run("gpt").save(_state(1), step=1)
    target = _store(memory)
    target.run("other").save({"x": torch.zeros(3)}, step=0)
    collected: list[int] = []
    check = module._read_deltas

    def collecting(sides: Any, landed: Any) -> None:  # noqa: ANN401
        check(sides, landed)
        if not collected:
            _store(memory).gc(**ZERO)
            collected.append(1)

    monkeypatch.setattr(module, "_read_deltas", collecting)
    report = source.replicate(target)
    assert len(report.copied) == 1
    _store(memory).gc(**ZERO)
    _assert_loads(target, target.versions("gpt"))


def test_unchecked_copies_do_not_count(backends: Backends) -> None:
    """Without reading back versions come, and count once the target has verified them."""
    source, target = _store(backends()), _store(backends())
    source.run("gpt").save(_state(1), step=1)
    report = source.replicate(target, check=False)
    assert not report.noted
    assert len(report.copied) == 1
    assert not source.replicate(target).noted
    assert source.versions()[0].state == "durable"
    target.verify(record=True)
    assert source.replicate(target).noted
    assert source.versions()[0].state == "replicated"


def test_a_target_that_is_read_only(backends: Backends) -> None:
    """It is refused before anything is read."""
    source, memory = _store(backends()), backends()
    source.run("gpt").save(_state(1), step=1)
    _store(memory)
    with ckptstore.open(memory.url, read_only=True) as target, pytest.raises(ReadOnlyError):
        source.replicate(target)


def test_deltas_and_encodings_travel(backends: Backends) -> None:
    """Chunks that refer to others, and rounded tensors, come out as they do in the source."""
    source, target = _store(backends()), _store(backends())
    run = source.run("gpt")
    state = _state(1)
    for step in (1, 2, 3):
        state["model"]["w"] += 1e-6
        state["epoch"] = step
        run.save(state, step=step, codec="delta")
    source.replicate(target, ["gpt@3"])
    source.replicate(target)
    for version in source.versions():
        here, there = (store.load(f"#{version.id}")["model"]["w"] for store in (source, target))
        assert torch.equal(here, there)
    assert target.verify().ok


def test_records_of_one_commit_travel_on(backends: Backends) -> None:
    """Ancestors that came in one commit keep their order: for refs, and for a third store."""
    first, second, third = _store(backends()), _store(backends()), _store(backends())
    run = first.run("gpt")
    ids = [run.save({"w": torch.full((5,), float(n))}, step=n // 2).id for n in range(6)]
    first.replicate(second, [f"#{ids[-1]}"])
    assert [v.id for v in second.versions()] == ids
    assert len({v.commit for v in second.versions()}) < len(ids)
    assert second.resolve("gpt@1").id == first.resolve("gpt@1").id == ids[3]
    second.replicate(third)
    assert _catalog(third) == _catalog(second)
    third.remove([f"#{ids[-1]}"], force=True)
    head = third.run("gpt").head
    assert head is not None
    assert head.id == ids[-2]


def test_that_it_was_read_back_is_said_of_one_store(backends: Backends) -> None:
    """What a second store read back was not read back in a third: it does not count there."""
    first, second, third = _store(backends()), _store(backends()), _store(backends())
    first.run("gpt").save(_state(1), step=1)
    first.replicate(second)
    second.replicate(third, check=False)
    second.replicate(third)
    assert second.versions()[0].replicas == ()
    assert "read_back_s" not in third.versions()[0].receipt


def test_what_came_back_unchecked_is_not_relied_on(backends: Backends) -> None:
    """A store that saved a version itself, and has it back unread, is not trusted with it alone."""
    first, second = _store(backends()), _store(backends())
    for step in (1, 2):
        first.run("gpt").save(_state(step), step=step)
    first.replicate(second)
    second.replicate(first)  # notes that the first has both
    first.age(["gpt@1"], "record")
    first.gc(**ZERO)
    second.replicate(first, ["gpt@1"], check=False)
    assert first.versions()[0].level == "full"

    def let_go() -> list[int]:
        old = second.versions()[:1]
        done = evict(second.repo, first.repo, old)
        return [version.step for version in done.evicted]

    assert let_go() == []
    first.age(["gpt@1"], "record")
    second.replicate(first, ["gpt@1"])
    assert let_go() == [1]


def test_what_was_not_read_back_is_not_relied_on(backends: Backends) -> None:
    """A version that is to be read back shares no chunk with one that never was."""
    source, memory = _store(backends()), backends()
    target = _store(memory)
    run = source.run("gpt")
    run.save(_state(1), step=1)
    source.replicate(target, check=False)
    for info in list(memory.list("packs/")):  # what arrived is not what was sent
        flip_object(memory, info.key)
    run.save(_state(2), step=2)
    source.replicate(target)
    _assert_loads(target, [target.resolve("gpt@2")])
    assert [v.replicas != () for v in source.versions()] == [False, True]


@pytest.mark.parametrize("level", ["weights", "record"])
def test_less_than_the_source_has_does_not_count(backends: Backends, level: Any) -> None:  # noqa: ANN401
    """A version that the target has aged since is not noted as one that the target has."""
    source, target = _store(backends()), _store(backends())
    run = source.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    source.replicate(target, check=False)
    target.age(["gpt@1"], level)
    source.replicate(target)
    assert source.resolve("gpt@1").replicas == ()
    source.replicate(target, again=True)
    assert source.resolve("gpt@1").replicas == (target.info.store_id,)
    _assert_loads(target, [target.resolve("gpt@1")])


def test_content_that_comes_back_is_of_here(backends: Backends) -> None:
    """An evicted version that comes back was saved here still, and who has it is still known."""
    source, target = _store(backends()), _store(backends())
    run = source.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    source.replicate(target)
    before = _catalog(source)
    source.age(["gpt@1"], "record")
    target.replicate(source, ["gpt@1"])
    back = source.resolve("gpt@1")
    assert (back.origin, back.replicas) == ("", (target.info.store_id,))
    assert _catalog(source) == before
    _assert_loads(source, [back])


def test_the_head_leaves_what_the_source_deleted(backends: Backends) -> None:
    """Where the source deleted its head and went on from before it, the target's head follows.

    As long as the source has not gone on, it stays: deletion alone does not travel.
    """
    source, target = _store(backends()), _store(backends())
    run = source.run("gpt")
    for step in (1, 2):
        run.save({"w": torch.full((5,), float(step))}, step=step)
    source.replicate(target)
    source.remove(["gpt@2"], force=True)
    source.replicate(target)
    assert target.resolve("gpt@latest").step == 2
    source.run("gpt").save({"w": torch.full((5,), 3.0)}, step=3)
    source.replicate(target)
    assert target.resolve("gpt@latest").step == 3


@pytest.mark.slow
def test_many_metrics_travel_in_commits_of_their_size(backends: Backends) -> None:
    """Records and annotations of any size go into as many commits as they need."""
    source, target, later = _store(backends()), _store(backends()), _store(backends())
    run = source.run("gpt")
    names = [f"evaluation/harness/task number {number:04}/accuracy" for number in range(900)]
    for step in range(90):
        metrics = dict.fromkeys(names, step / 7)
        run.save({"w": torch.full((2,), float(step))}, step=step, metrics=metrics)
    source.replicate(target, ["gpt@89"])
    assert {v.id: v.metrics for v in target.versions()} == {
        v.id: v.metrics for v in source.versions()
    }
    source.replicate(later)
    for version in source.versions():
        source.annotate(f"#{version.id}", dict.fromkeys(names, 1 / 3))
    source.replicate(later)
    assert {v.id: v.metrics for v in later.versions()} == {
        v.id: v.metrics for v in source.versions()
    }


def test_one_operation_names_a_bounded_number(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another store has is noted in as many commits as it takes."""
    monkeypatch.setattr("ckptstore.limits.VERSIONS_PER_OP_MAX", 2)
    source, target = _store(backends()), _store(backends())
    _history(source)
    assert source.replicate(target).noted
    assert all(v.replicas for v in source.versions())


def test_requests_do_not_grow_with_the_target(backends: Backends) -> None:
    """A version costs the same requests, however many versions are there."""
    meter = MeteredBackend(backends())
    source, target = _store(backends()), _store(meter)
    run = source.run("gpt")
    costs = []
    for count in (10, 40):
        for number in range(count):
            run.save({"w": torch.full((50,), float(count + number))}, step=count + number)
        before = {name: one.calls for name, one in meter.snapshot().items()}
        source.replicate(target)
        after = {name: one.calls - before.get(name, 0) for name, one in meter.snapshot().items()}
        costs.append(sum(after.values()) / count)
    assert costs[1] <= costs[0]


def test_brought_by_another_meanwhile(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another brought unchecked, or the target deleted, while it travelled does not count."""
    source, memory = _store(backends()), backends()
    run = source.run("gpt")
    for step in (1, 2):
        run.save({"w": torch.full((5,), float(step))}, step=step)
    check = module._read_deltas
    done: list[int] = []

    def overtaken(sides: Any, landed: Any) -> None:  # noqa: ANN401
        check(sides, landed)
        if not done:
            done.append(1)
            other = _store(memory)
            source.replicate(other, check=False)
            other.remove(["gpt@2"], force=True)

    monkeypatch.setattr(module, "_read_deltas", overtaken)
    report = source.replicate(_store(memory))
    assert (len(report.copied), len(report.present), len(report.left)) == (0, 1, 1)
    assert all(v.state == "durable" for v in source.versions())


def test_the_head_is_never_a_record(backends: Backends) -> None:
    """Where the source's head could not be copied, the target's stays at what can be loaded."""
    backend = backends()
    source, target = _store(backend), _store(backends())
    run = source.run("gpt")
    for step in (1, 2):
        run.save({"model": {"w": torch.randn(64, 64) + step}}, step=step)
    pack = source.version("gpt@2")._content.manifest.pieces.packs[0]
    key = f"packs/{pack[:2]}/{pack}.pack"
    sound = backend.get(key, bytes_max=1 << 20)
    backend.delete(key)
    assert source.replicate(target).failures
    assert target.resolve("gpt@2").level == "record"
    head = target.run("gpt").head
    assert head is not None
    assert head.step == 1
    backend.put(key, sound)
    source.replicate(target)
    assert _catalog(target) == _catalog(source)
