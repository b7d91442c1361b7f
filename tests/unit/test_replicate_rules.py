"""Replication: which decision of two stores counts, and copies that go on where they ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from damaging import flip_object

from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import UserKey
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.codecs.codec_table import Encoded
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import Options, SystemEnvironment
from ckptstore.errors import ConflictError, StorageError
from ckptstore.format.keys import pack_id
from ckptstore.limits import KIB
from ckptstore.model import Version
from ckptstore.objects.packs import PackPlan, PackSink, read_index
from ckptstore.repo import create_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

Backends = Callable[[], MemoryBackend]
ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


def _store(backend: Backend) -> Store:
    return Store(create_on(backend, exist_ok=True))


def _save(store: Store, step: int, run: str = "gpt", ways: dict[str, Any] | None = None) -> Version:
    state = {"model": {"w": torch.full((50,), float(step))}, "m": torch.full((40,), step / 2)}
    return store.run(run, metrics=ways).save(state, step=step)


def _head(store: Store, run: str = "gpt") -> int:
    head = store.run(run).head
    assert head is not None
    return head.step


def _assert_loads(store: Store, step: int) -> None:
    assert torch.equal(store.load(f"gpt@{step}")["model"]["w"], torch.full((50,), float(step)))


@pytest.fixture
def pair(backends: Backends) -> tuple[Store, Store]:
    """Return a store of three versions, and its replica."""
    source, target = _store(backends()), _store(backends())
    for step in (1, 2, 3):
        _save(source, step)
    source.replicate(target)
    return source, target


Pair = tuple[Store, Store]


def test_a_rollback_in_the_target_stays(pair: Pair) -> None:
    """Neither a repetition nor further training of the source takes it back; the report says so."""
    source, target = pair
    target.rollback("gpt@2")
    assert source.replicate(target).heads_kept == ("gpt",)
    assert _head(target) == 2
    _save(source, 4)
    report = source.replicate(target)
    assert len(report.copied) == 1
    assert report.heads_kept == ("gpt",)
    assert _head(target) == 2
    _assert_loads(target, 4)


def test_a_rollback_in_the_target_outlives_its_snapshots(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens the target from a snapshot knows as well who has decided."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 2)
    source, memory = _store(backends()), backends()
    target = _store(memory)
    for step in (1, 2, 3):
        _save(source, step)
    source.replicate(target)
    target.rollback("gpt@2")
    for number in range(6):
        target.annotate("gpt@1", {"x": number})
    assert list(memory.list("snapshots/"))
    again = _store(memory)
    assert again.repo.refresh().holds_head("gpt")
    source.replicate(again)
    assert _head(again) == 2


def test_the_target_follows_again_where_the_source_agrees(pair: Pair) -> None:
    """Training that goes on from the version that the target chose is followed."""
    source, target = pair
    target.rollback("gpt@2")
    source.rollback("gpt@2")
    _save(source, 5)
    assert source.replicate(target).heads_kept == ()
    assert _head(target) == 5
    _save(source, 6)
    source.replicate(target)
    assert _head(target) == 6


def test_a_rollback_that_is_taken_back_by_hand_follows_again(pair: Pair) -> None:
    """Back at the source's head, the target goes on with it."""
    source, target = pair
    target.rollback("gpt@2")
    target.rollback("gpt@3")
    _save(source, 4)
    source.replicate(target)
    assert _head(target) == 4


def test_what_the_source_has_left_may_be_chosen_in_the_target(pair: Pair) -> None:
    """A version that the source rolled back from, and the target chose, stays its head."""
    source, target = pair
    source.rollback("gpt@1")
    source.replicate(target)
    assert _head(target) == 1
    target.rollback("gpt@3")
    source.replicate(target)
    assert _head(target) == 3
    _save(source, 7)
    assert source.replicate(target).heads_kept == ("gpt",)
    assert _head(target) == 3


def test_rollbacks_of_the_source_are_followed_both_ways(pair: Pair) -> None:
    """Back, and forward again with more training: no version stays abandoned in the target."""
    source, target = pair
    source.rollback("gpt@1")
    source.replicate(target)
    assert _head(target) == 1
    source.rollback("gpt@3")
    _save(source, 4)
    source.replicate(target)
    assert _head(target) == 4
    assert not any(version.abandoned for version in target.versions())


def test_a_rollback_travels_to_where_nothing_was_decided(pair: Pair) -> None:
    """The other way round: what the target rolled back, its own replica follows."""
    source, target = pair
    target.rollback("gpt@2")
    target.replicate(source)
    assert _head(source) == 2
    source.replicate(target)
    assert (_head(source), _head(target)) == (2, 2)


def test_content_that_comes_to_the_head_moves_no_head(pair: Pair) -> None:
    """The rest of a version that the target chose and keeps in part: the choice stands."""
    source, target = pair
    target.rollback("gpt@2")
    target.age(["gpt@2"], "weights", force=True)
    report = source.replicate(target, again=True)
    assert len(report.copied) == 1
    assert report.heads_kept == ("gpt",)
    assert _head(target) == 2


def test_two_decisions_stand(pair: Pair) -> None:
    """Where both stores rolled back, to different versions, neither moves the other, ever."""
    source, target = pair
    source.rollback("gpt@2")
    target.rollback("gpt@1")
    for _ in range(2):
        assert source.replicate(target).heads_kept == ("gpt",)
        assert target.replicate(source).heads_kept == ("gpt",)
    assert (_head(source), _head(target)) == (2, 1)


@pytest.mark.parametrize("swept", [False, True])
def test_what_the_target_deleted_returns_if_named(pair: Pair, swept: bool) -> None:
    """Under its id, in its place, with its content: undeleted, or copied anew after a sweep."""
    source, target = pair
    order = [version.id for version in target.versions()]
    source.tag("gpt@2", "good")
    source.replicate(target)
    target.remove(["gpt@2"], force=True)
    if swept:
        target.gc(**ZERO)
    left = source.replicate(target).left
    assert [(one.step, one.why) for one in left] == [(2, "deleted in the target")]
    assert source.replicate(target, ["gpt@2"], again=False).left == left

    report = source.replicate(target, ["gpt@2"])

    assert (len(report.copied), len(report.present)) == ((1, 0) if swept else (0, 1))
    assert (report.chunk_bytes > 0) == swept
    assert [version.id for version in target.versions()] == order
    assert target.resolve("gpt@good").step == 2
    _assert_loads(target, 2)
    target.gc(**ZERO)
    assert target.verify().ok
    assert report.noted


def test_all_that_the_target_deleted_returns_if_asked_for(pair: Pair, backends: Backends) -> None:
    """`again` brings a run back whose versions were all deleted and swept, head included."""
    source, target = pair
    target.remove([f"#{version.id}" for version in target.versions()], force=True)
    target.gc(**ZERO)
    assert target.versions() == []
    source.replicate(target, again=True)
    assert [version.step for version in target.versions()] == [1, 2, 3]
    assert _head(target) == 3
    third = _store(backends())
    target.replicate(third)
    assert [version.step for version in third.versions()] == [1, 2, 3]


def test_what_the_target_reduced_stays_so(pair: Pair) -> None:
    """A version aged to its record is not brought anew each night; named, it comes."""
    source, target = pair
    target.age(["gpt@1"], "record")
    report = source.replicate(target)
    assert [(one.step, one.why) for one in report.left] == [(1, "reduced in the target")]
    assert target.resolve("gpt@1").level == "record"
    source.replicate(target, ["gpt@1"])
    assert target.resolve("gpt@1").level == "full"
    _assert_loads(target, 1)


@pytest.mark.parametrize("how", ["live", "deleted", "swept"])
def test_what_the_target_keeps_a_part_of(backends: Backends, how: str) -> None:
    """Aged to its weights, a version stays so; named, the rest comes, and the weights do not."""
    source, memory = _store(backends()), backends()
    target = _store(memory)
    weights = torch.randn(2, 30_000)  # in chunks of their own
    for step in (1, 2):
        source.run("gpt").save(
            {"model": {"w": weights[step - 1]}, "m": torch.full((40_000,), step / 2)}, step=step
        )
    whole = source.replicate(target).chunk_bytes
    target.age(["gpt@1"], "weights")
    target.gc(**ZERO)
    report = source.replicate(target)
    assert [(one.step, one.why) for one in report.left] == [(1, "reduced in the target")]
    if how != "live":
        target.remove(["gpt@1"])
    if how == "swept":
        target.gc(**ZERO)

    back = source.replicate(target, ["gpt@1"])

    assert len(back.copied) == 1
    assert (back.chunk_bytes < whole / 4) == (how != "swept")
    assert back.noted
    assert target.resolve("gpt@1").level == "full"
    loaded = target.load("gpt@1")
    assert loaded["m"][0] == 0.5
    assert torch.equal(loaded["model"]["w"], weights[0])
    again = _store(memory)
    again.gc(**ZERO)
    assert again.verify().ok
    named = {version.manifest_key for version in again.versions()}
    assert {info.key for info in memory.list("manifests/")} == named


def test_metrics_that_do_not_fit_are_left_out(pair: Pair) -> None:
    """Where both stores have measured much, what fits comes, and the report counts the rest."""
    source, target = pair
    own = {f"own/{number}": 1.0 for number in range(600)}
    target.annotate("gpt@2", own)
    source.annotate("gpt@2", {f"eval/{number}": 2.0 for number in range(700)})
    source.annotate("gpt@3", {"loss": 1.0})

    report = source.replicate(target)

    assert report.metrics_left_count == 300
    there = target.resolve("gpt@2").metrics
    assert len(there) == limits.METRICS_MAX
    assert own.items() <= there.items()
    assert target.resolve("gpt@3").metrics == {"loss": 1.0}
    number = target.repo.refresh().number
    assert source.replicate(target).metrics_left_count == 300
    assert target.repo.refresh().number == number
    source.annotate("gpt@2", {"eval/0": 5.0})
    source.replicate(target)
    assert target.resolve("gpt@2").metrics["eval/0"] == 5.0


def test_directions_that_do_not_fit_are_left_out(pair: Pair) -> None:
    """A run that knows as many metrics as it may, or another direction, is no obstacle."""
    source, target = pair
    _save(target, 9, ways={"loss": "min", **{f"own/{n}": "min" for n in range(900)}})
    _save(source, 4, ways={"loss": "max", **{f"eval/{n}": "max" for n in range(300)}})
    source.replicate(target)
    known = target.runs()[0].metrics
    assert len(known) == limits.METRICS_MAX
    assert known["loss"] == "min"
    assert [version.step for version in target.versions()] == [1, 2, 3, 9, 4]


def test_an_ancestor_of_another_run_is_found_out_first(backends: Backends) -> None:
    """An ancestor's run that means something else in the target: nothing at all was written."""
    source, memory = _store(backends()), backends()
    target = _store(memory)
    _save(source, 1, "base")
    source.fork("base@1", "tuned")
    _save(source, 2, "tuned")
    _save(target, 9, "base")
    before = sorted(info.key for info in memory.list(""))
    for dry_run in (True, False):
        with pytest.raises(ConflictError, match=r"'base'.*nothing in common"):
            source.replicate(target, runs=["tuned"], dry_run=dry_run)
    assert sorted(info.key for info in memory.list("")) == before


PACKS = 10


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PACK_BYTES_MIN", 64 * KIB)
    monkeypatch.setattr(limits, "RESUME_BYTES_MIN", 64 * KIB)


def _resumed_store(backend: Backend, key: UserKey | None = None) -> Store:
    options = Options(workers=1)
    repo = create_on(backend, exist_ok=True, chunk_bytes=64 * KIB, options=options, key=key)
    return Store(repo)


def _state(step: int = 1) -> dict[str, Any]:
    torch.manual_seed(step)
    small = {f"b{number}": torch.randn(50) for number in range(40)}
    return {"model": {"w": torch.randn(PACKS - 1, 64 * KIB // 4), **small}, "epoch": 3}


def _interrupted(source: Store, target: Backend, key: UserKey | None = None) -> int:
    """Replicate until nine tenths of the packs are there; return how many bytes that sent."""
    writes = Fault(calls=frozenset({"writer.commit"}), at=PACKS - 1, times=0)
    with _resumed_store(FaultyBackend(target, writes), key) as broken, pytest.raises(StorageError):
        source.replicate(broken)
    assert writes.hits
    return sum(info.size_bytes for info in target.list("packs/"))


def _assert_equal(target: Store) -> None:
    found = target.load("a@1")
    assert torch.equal(found["model"]["w"], _state()["model"]["w"])
    assert torch.equal(found["model"]["b7"], _state()["model"]["b7"])
    assert not target.verify().problems


@pytest.mark.parametrize("key", [None, UserKey(bytes(range(32)))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("check", [True, False])
def test_what_was_sent_is_not_sent_again(
    backends: Backends, key: UserKey | None, check: bool
) -> None:
    """Interrupted at nine tenths, the second run sends the last tenth, and the whole is there."""
    inner = backends()
    with _resumed_store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        sent = _interrupted(source, inner, key)
        with _resumed_store(inner, key) as target:
            report = source.replicate(target, check=check)
            assert len(report.copied) == 1
            assert report.checked == check
            assert report.chunk_bytes < sent / 4
            assert report.resumed_bytes > sent * 0.8
            _assert_equal(target)
            packs = sum(info.size_bytes for info in inner.list("packs/"))
            assert packs < sent * 1.3  # nothing lies there twice
            assert target.gc(**ZERO).swept["packs"].count == 0


def test_deltas_go_on_as_well(backends: Backends) -> None:
    """Chunks that refer to others are shared where these are, too, or come."""
    inner = backends()
    state = _state()
    with _resumed_store(backends()) as source:
        run = source.run("a")
        run.save(state, step=0, codec="raw")
        state["model"]["w"] += 0.001 * torch.randn_like(state["model"]["w"])
        run.save(state, step=1, codec="delta")
        with _resumed_store(inner) as target:
            source.replicate(target, refs=["a@0"])
        faulty = FaultyBackend(inner)
        with _resumed_store(faulty) as broken:
            faulty.faults.append(Fault(calls=frozenset({"put", "put_if_absent"}), times=0))
            with pytest.raises(StorageError):  # all packs are there, and no manifest
                source.replicate(broken)
        with _resumed_store(inner) as target:
            report = source.replicate(target)
            assert (report.chunk_bytes, len(report.copied)) == (0, 1)
            assert report.resumed_bytes > 64 * KIB
            assert torch.equal(target.load("a@1")["model"]["w"], state["model"]["w"])


@pytest.mark.parametrize("grace_s", [0.0, 3600.0])
def test_a_collection_before_the_second_run(backends: Backends, grace_s: float) -> None:
    """What a collection has condemned is copied again, whether it was deleted yet or not."""
    inner = backends()
    with _resumed_store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        sent = _interrupted(source, inner)
        with _resumed_store(inner) as target:
            assert target.gc(grace_s=grace_s, orphan_age_s=0.0).condemned["packs"].count
            report = source.replicate(target)
            assert (report.resumed_bytes, report.chunk_bytes > sent) == (0, True)
            target.gc(**ZERO)
            _assert_equal(target)


def test_a_collection_between_look_and_commit(backends: Backends) -> None:
    """Orphans that are condemned after they were found are copied under new names at the commit."""
    inner = backends()

    def collect(_call: str, key: str) -> None:
        """Collect once, when all packs are there and the manifest is about to come."""
        if key.startswith("manifests/") and not collected:
            collected.append(key)
            with _resumed_store(inner) as other:
                other.gc(**ZERO)

    collected: list[str] = []
    with _resumed_store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        fault = Fault(
            calls=frozenset({"put", "put_if_absent"}), times=0, when=When.CALLBACK, callback=collect
        )
        with _resumed_store(FaultyBackend(inner, fault)) as target:
            report = source.replicate(target)
            assert collected
            assert len(report.copied) == 1
        with _resumed_store(inner) as target:
            target.gc(**ZERO)
            _assert_equal(target)


def test_a_sound_orphan_that_lies_is_not_shared(backends: Backends) -> None:
    """Index and checksums are in order, ids and lengths the right ones, the content another."""
    from_backend, inner = backends(), backends()
    environment = SystemEnvironment()
    plan = PackPlan(streams=1, at_once=1, first_bytes=2**20, most_bytes=2**20)
    looked: list[str] = []
    reads = Fault(
        calls=frozenset({"read_into"}),
        times=0,
        when=When.CALLBACK,
        callback=lambda _call, key: looked.append(key),
    )
    with (
        _resumed_store(from_backend) as source,
        _resumed_store(FaultyBackend(inner, reads)) as target,
    ):
        source.run("a").save(_state(), step=1, codec="raw")
        sink = PackSink(inner, environment, plan)
        for info in from_backend.list("packs/"):
            for row in read_index(from_backend, pack_id(info.key) or "", info.size_bytes):
                size = row.stored_bytes
                lie = Encoded(codec=0, layout=Layout.BYTES, parts=(bytes(size),), stored_bytes=size)
                sink.append(0, lie, row.chunk_id, row.raw_bytes)
        sink.finish()
        (lying,) = inner.list("packs/")
        report = source.replicate(target, check=False)
        assert (report.resumed_bytes, len(report.copied)) == (0, 1)
        assert looked.count(lying.key) > 3  # header, trailer, index: and content
        _assert_equal(target)


@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.short(sample=1)
def test_a_collection_at_any_call(backends: Backends, codec: str) -> None:
    """Whenever a collection without grace comes, the copy goes on, and all of it is there after."""
    stranded = backends()
    state = _state()
    with _resumed_store(backends()) as source:
        run = source.run("a")
        run.save(state, step=0, codec="raw")
        state["model"]["w"] += 0.001 * torch.randn_like(state["model"]["w"])
        run.save(state, step=1, codec=codec)
        faulty = FaultyBackend(stranded)
        with _resumed_store(faulty) as broken:
            faulty.faults.append(Fault(calls=frozenset({"writer.commit"}), at=3, times=0))
            with pytest.raises(StorageError):
                source.replicate(broken, refs=["a@1"])
        objects = {one.key: stranded.get(one.key, bytes_max=2**20) for one in stranded.list("")}
        for at in range(1, 100, 7):
            inner = backends()
            for key, data in objects.items():
                inner.put(key, data)
            fault = Fault(at=at, when=When.CALLBACK, callback=lambda *_, to=inner: _collect(to))
            faulty = FaultyBackend(inner)
            with _resumed_store(faulty) as target:
                faulty.faults.append(fault)
                assert len(source.replicate(target, refs=["a@1"]).copied) == 1
            _collect(inner)
            with _resumed_store(inner) as target:
                assert torch.equal(target.load("a@1")["model"]["w"], state["model"]["w"])
                assert not target.verify().problems
            if not fault.hits:
                break
        assert at > 20


def _collect(backend: Backend) -> None:
    with _resumed_store(backend) as other:
        other.gc(**ZERO)


def test_what_is_shared_is_durable_before_the_manifest(backends: Backends) -> None:
    """A pack may be visible, and not durable: that is made up for before anything names it."""
    noted: list[str] = []

    class Noting(WrapperBackend):
        def make_durable(self, keys: Iterable[str]) -> None:
            noted.extend(keys)

        def put(self, key: str, data: Buffer) -> None:
            if key.startswith("manifests/"):
                before.append(len(noted))
            super().put(key, data)

    before: list[int] = []
    inner = backends()
    with _resumed_store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        left = {info.key for info in inner.list("packs/")}
        with _resumed_store(Noting(inner)) as target:
            assert source.replicate(target).resumed_bytes
    assert set(noted) == left
    assert before == [len(noted)]


def test_a_damaged_orphan_is_copied_again(backends: Backends) -> None:
    """Content is read back before it counts: what is not what it should be travels again."""
    inner = backends()
    with _resumed_store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        for info in inner.list("packs/"):
            flip_object(inner, info.key)
        with _resumed_store(inner) as target:
            report = source.replicate(target, check=False)
            assert (report.resumed_bytes, len(report.copied)) == (0, 1)
            _assert_equal(target)


def test_nothing_is_listed_for_little(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy below RESUME_BYTES_MIN, and the second of one replication, list no packs."""
    seen: list[str] = []
    fault = Fault(
        calls=frozenset({"list"}),
        times=0,
        when=When.CALLBACK,
        callback=lambda _call, key: seen.append(key),
    )
    with (
        _resumed_store(backends()) as source,
        _resumed_store(FaultyBackend(backends(), fault)) as target,
    ):
        for step in (1, 2, 3):
            source.run("a").save(_state(step), step=step, codec="raw")
        seen.clear()
        source.replicate(target, refs=["a@1", "a@2"])
        assert sum(key.startswith("packs") for key in seen) == 1
        monkeypatch.setattr(limits, "RESUME_BYTES_MIN", 64 * limits.MIB)
        source.replicate(target)
        assert sum(key.startswith("packs") for key in seen) == 1
