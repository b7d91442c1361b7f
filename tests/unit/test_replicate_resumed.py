"""A replication that was interrupted goes on within the version at which it stopped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from damaging import flip_object

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Backend, Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.sealing import UserKey
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.codecs.codec_table import Encoded
from ckptstore.codecs.plane_layout import Layout
from ckptstore.config import Options, SystemEnvironment
from ckptstore.errors import StorageError
from ckptstore.format.keys import pack_id
from ckptstore.limits import KIB
from ckptstore.objects.packs import PackPlan, PackSink, read_index
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend, When

ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}
PACKS = 10


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PACK_BYTES_MIN", 64 * KIB)
    monkeypatch.setattr(limits, "RESUME_BYTES_MIN", 64 * KIB)


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> Callable[[], MemoryBackend]:
    """Return a function that makes memory backends of this test alone."""
    numbers = itertools.count()
    return lambda: MemoryBackend(f"resumed/{request.node.nodeid}/{next(numbers)}")


def _store(backend: Backend, key: UserKey | None = None) -> ckptstore.Store:
    options = Options(workers=1)
    repo = create_on(backend, exist_ok=True, chunk_bytes=64 * KIB, options=options, key=key)
    return ckptstore.Store(repo)


def _state(step: int = 1) -> dict[str, Any]:
    torch.manual_seed(step)
    small = {f"b{number}": torch.randn(50) for number in range(40)}
    return {"model": {"w": torch.randn(PACKS - 1, 64 * KIB // 4), **small}, "epoch": 3}


def _interrupted(source: ckptstore.Store, target: Backend, key: UserKey | None = None) -> int:
    """Replicate until nine tenths of the packs are there; return how many bytes that sent."""
    writes = Fault(calls=frozenset({"writer.commit"}), at=PACKS - 1, times=0)
    with _store(FaultyBackend(target, writes), key) as broken, pytest.raises(StorageError):
        source.replicate(broken)
    assert writes.hits
    return sum(info.size_bytes for info in target.list("packs/"))


def _assert_equal(target: ckptstore.Store) -> None:
    found = target.load("a@1")
    assert torch.equal(found["model"]["w"], _state()["model"]["w"])
    assert torch.equal(found["model"]["b7"], _state()["model"]["b7"])
    assert not target.verify().problems


@pytest.mark.parametrize("key", [None, UserKey(bytes(range(32)))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("check", [True, False])
def test_what_was_sent_is_not_sent_again(
    backends: Callable[[], MemoryBackend], key: UserKey | None, check: bool
) -> None:
    """Interrupted at nine tenths, the second run sends the last tenth, and the whole is there."""
    inner = backends()
    with _store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        sent = _interrupted(source, inner, key)
        with _store(inner, key) as target:
            report = source.replicate(target, check=check)
            assert len(report.copied) == 1
            assert report.checked == check
            assert report.chunk_bytes < sent / 4
            assert report.resumed_bytes > sent * 0.8
            _assert_equal(target)
            packs = sum(info.size_bytes for info in inner.list("packs/"))
            assert packs < sent * 1.3  # nothing lies there twice
            assert target.gc(**ZERO).swept["packs"].count == 0


def test_deltas_go_on_as_well(backends: Callable[[], MemoryBackend]) -> None:
    """Chunks that refer to others are shared where these are, too, or come."""
    inner = backends()
    state = _state()
    with _store(backends()) as source:
        run = source.run("a")
        run.save(state, step=0, codec="raw")
        state["model"]["w"] += 0.001 * torch.randn_like(state["model"]["w"])
        run.save(state, step=1, codec="delta")
        with _store(inner) as target:
            source.replicate(target, refs=["a@0"])
        faulty = FaultyBackend(inner)
        with _store(faulty) as broken:
            faulty.faults.append(Fault(calls=frozenset({"put", "put_if_absent"}), times=0))
            with pytest.raises(StorageError):  # all packs are there, and no manifest
                source.replicate(broken)
        with _store(inner) as target:
            report = source.replicate(target)
            assert (report.chunk_bytes, len(report.copied)) == (0, 1)
            assert report.resumed_bytes > 64 * KIB
            assert torch.equal(target.load("a@1")["model"]["w"], state["model"]["w"])


@pytest.mark.parametrize("grace_s", [0.0, 3600.0])
def test_a_collection_before_the_second_run(
    backends: Callable[[], MemoryBackend], grace_s: float
) -> None:
    """What a collection has condemned is copied again, whether it was deleted yet or not."""
    inner = backends()
    with _store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        sent = _interrupted(source, inner)
        with _store(inner) as target:
            assert target.gc(grace_s=grace_s, orphan_age_s=0.0).condemned["packs"].count
            report = source.replicate(target)
            assert (report.resumed_bytes, report.chunk_bytes > sent) == (0, True)
            target.gc(**ZERO)
            _assert_equal(target)


def test_a_collection_between_look_and_commit(backends: Callable[[], MemoryBackend]) -> None:
    """Orphans that are condemned after they were found are copied under new names at the commit."""
    inner = backends()

    def collect(_call: str, key: str) -> None:
        """Collect once, when all packs are there and the manifest is about to come."""
        if key.startswith("manifests/") and not collected:
            collected.append(key)
            with _store(inner) as other:
                other.gc(**ZERO)

    collected: list[str] = []
    with _store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        fault = Fault(
            calls=frozenset({"put", "put_if_absent"}), times=0, when=When.CALLBACK, callback=collect
        )
        with _store(FaultyBackend(inner, fault)) as target:
            report = source.replicate(target)
            assert collected
            assert len(report.copied) == 1
        with _store(inner) as target:
            target.gc(**ZERO)
            _assert_equal(target)


def test_a_sound_orphan_that_lies_is_not_shared(backends: Callable[[], MemoryBackend]) -> None:
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
    with _store(from_backend) as source, _store(FaultyBackend(inner, reads)) as target:
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
def test_a_collection_at_any_call(backends: Callable[[], MemoryBackend], codec: str) -> None:
    """Whenever a collection without grace comes, the copy goes on, and all of it is there after."""
    stranded = backends()
    state = _state()
    with _store(backends()) as source:
        run = source.run("a")
        run.save(state, step=0, codec="raw")
        state["model"]["w"] += 0.001 * torch.randn_like(state["model"]["w"])
        run.save(state, step=1, codec=codec)
        faulty = FaultyBackend(stranded)
        with _store(faulty) as broken:
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
            with _store(faulty) as target:
                faulty.faults.append(fault)
                assert len(source.replicate(target, refs=["a@1"]).copied) == 1
            _collect(inner)
            with _store(inner) as target:
                assert torch.equal(target.load("a@1")["model"]["w"], state["model"]["w"])
                assert not target.verify().problems
            if not fault.hits:
                break
        assert at > 20


def _collect(backend: Backend) -> None:
    with _store(backend) as other:
        other.gc(**ZERO)


def test_what_is_shared_is_durable_before_the_manifest(
    backends: Callable[[], MemoryBackend],
) -> None:
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
    with _store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        left = {info.key for info in inner.list("packs/")}
        with _store(Noting(inner)) as target:
            assert source.replicate(target).resumed_bytes
    assert set(noted) == left
    assert before == [len(noted)]


def test_a_damaged_orphan_is_copied_again(backends: Callable[[], MemoryBackend]) -> None:
    """Content is read back before it counts: what is not what it should be travels again."""
    inner = backends()
    with _store(backends()) as source:
        source.run("a").save(_state(), step=1, codec="raw")
        _interrupted(source, inner)
        for info in inner.list("packs/"):
            flip_object(inner, info.key)
        with _store(inner) as target:
            report = source.replicate(target, check=False)
            assert (report.resumed_bytes, len(report.copied)) == (0, 1)
            _assert_equal(target)


def test_nothing_is_listed_for_little(
    backends: Callable[[], MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy below RESUME_BYTES_MIN, and the second of one replication, list no packs."""
    seen: list[str] = []
    fault = Fault(
        calls=frozenset({"list"}),
        times=0,
        when=When.CALLBACK,
        callback=lambda _call, key: seen.append(key),
    )
    with _store(backends()) as source, _store(FaultyBackend(backends(), fault)) as target:
        for step in (1, 2, 3):
            source.run("a").save(_state(step), step=step, codec="raw")
        seen.clear()
        source.replicate(target, refs=["a@1", "a@2"])
        assert sum(key.startswith("packs") for key in seen) == 1
        monkeypatch.setattr(limits, "RESUME_BYTES_MIN", 64 * limits.MIB)
        source.replicate(target)
        assert sum(key.startswith("packs") for key in seen) == 1
