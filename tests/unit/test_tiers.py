"""Replicas with names: loads of what is not here fall through to them, and nothing else does."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import flip_pack
from metered import MeteredBackend

import ckptstore
from ckptstore import errors
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.events import Progress
from ckptstore.repo import create_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend

ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0, "repack_below": None}
STEPS = (1, 2, 3, 4)


def state_of(step: int) -> dict[str, Any]:
    """Return a state of which only a part changes from step to step."""
    random = torch.Generator().manual_seed(1)  # its own: threads make states at once
    same = torch.randn(200, 300, generator=random)
    weight = torch.randn(300, 300, generator=random) + step
    return {
        "model": {"w": weight, "same": same},
        "optimizer": {"m": torch.full((100, 300), float(step))},
        "step": step,
    }


def assert_same(found: Mapping[str, Any], step: int) -> None:
    """Compare a state bit by bit."""
    wanted = state_of(step)
    assert found["step"] == step
    for part in ("model", "optimizer"):
        for name, tensor in wanted[part].items():
            assert torch.equal(found[part][name], tensor), (part, name)


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[Store]:
    """Return a store of four versions, all of which are in the replica ``cold``."""
    with ckptstore.open(tmp_path / "hot", create=True, chunk_bytes=1 << 16) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in STEPS:
            run.save(state_of(step), step=step, metrics={"loss": 1 / step})
        store.add_replica("cold", tmp_path / "cold", create=True)
        store.replicate(tmp_path / "cold")
        yield store


def lose(folder: Path, pattern: str) -> int:
    """Delete objects past the log; return how many."""
    files = list(folder.rglob(pattern))
    for file in files:
        file.unlink()
    return len(files)


# --- names --------------------------------------------------------------------------------------
def test_names_are_kept_for_everyone_and_options_are_not(tmp_path: Path) -> None:
    """The log holds name, place and id; another process sees them in the order of their naming."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        for name in ("z", "a"):
            hot.add_replica(name, tmp_path / name, create=True)
        ids = [ckptstore.open(tmp_path / name).info.store_id for name in ("z", "a")]
    with ckptstore.open(tmp_path / "hot") as again:
        found = again.replicas()
        again.remove_replica("z")
        left = again.replicas()
        with pytest.raises(errors.NotFoundError, match="no replica is called 'z'"):
            again.remove_replica("z")

    assert [(one.name, one.url, one.store) for one in found] == [
        ("z", str(tmp_path / "z"), ids[0]),
        ("a", str(tmp_path / "a"), ids[1]),
    ]
    assert [one.name for one in left] == ["a"]


def test_a_snapshot_holds_the_names(tmp_path: Path) -> None:
    """From the snapshot as from the log: the same replicas."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True)
        run = hot.run("gpt")
        for step in range(101):
            run.save({"x": step}, step=step)
        named = hot.replicas()
    assert list((tmp_path / "hot" / "snapshots").iterdir())
    with ckptstore.open(tmp_path / "hot") as again:
        assert again.repo.refresh().number > 100
        assert again.replicas() == named


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "-a", "ä", "x" * 65, 3])
@pytest.mark.short(sample=2)
def test_a_name_that_could_be_a_place_is_refused(hot: Store, name: str) -> None:
    """So that ``replica:NAME`` and locations are never taken for each other."""
    with pytest.raises(errors.InvalidInputError, match="replica's name"):
        hot.add_replica(name, "anywhere")


def test_what_cannot_be_a_replica(hot: Store, tmp_path: Path) -> None:
    """The store itself, another store under a known name, one store under two names, no store."""
    ckptstore.open(tmp_path / "other", create=True).close()
    with pytest.raises(errors.ConflictError, match="this very store"):
        hot.add_replica("self", tmp_path / "hot")
    with pytest.raises(errors.ConflictError, match="the replica 'cold' is the store"):
        hot.add_replica("cold", tmp_path / "other")
    with pytest.raises(errors.ConflictError, match="is the replica 'cold' already"):
        hot.add_replica("two", tmp_path / "cold")
    with pytest.raises(errors.StoreNotFoundError):
        hot.add_replica("none", tmp_path / "nowhere")
    assert [one.name for one in hot.replicas()] == ["cold"]


def test_a_replica_that_moved_is_named_again(hot: Store, tmp_path: Path) -> None:
    """The same store at another place keeps its name, and is found there."""
    hot.age(["gpt@1"], "record")
    (tmp_path / "cold").rename(tmp_path / "moved")
    with pytest.raises(errors.VersionNotFoundError, match=r"no store .*is it mounted\?"):
        hot.load("gpt@1")
    with pytest.raises(errors.StoreNotFoundError, match=r"no store .*is it mounted\?"):
        hot.replicate("replica:cold")
    hot.add_replica("cold", tmp_path / "moved")

    assert_same(hot.load("gpt@1"), 1)


# --- loads --------------------------------------------------------------------------------------
def test_an_evicted_version_loads_from_the_replica(
    hot: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit by bit, after the collector swept it here; said once; and not if it is not wanted."""
    with caplog.at_level(logging.INFO, "ckptstore"):
        hot.age(["gpt@1", "gpt@2"], "record")
        hot.gc(**ZERO)
        with pytest.raises(errors.VersionNotFoundError, match="only the record of gpt@1"):
            hot.load("gpt@1", fall_through=False)
        assert "is read from" not in caplog.text
        for _ in range(3):
            assert_same(hot.load("gpt@1"), 1)
            assert_same(hot.run("gpt").load(2), 2)
    said = [record for record in caplog.records if "is read from replica 'cold'" in record.message]
    assert len(said) == 2  # once a version
    assert hot.resolve("gpt@1").level == "record"  # nothing was written
    with ckptstore.open(tmp_path / "cold") as cold:
        assert len(cold.versions()) == len(STEPS)  # gc here does not touch there
        assert cold.verify().ok


def test_parts_slices_and_targets_fall_through_too(hot: Store) -> None:
    """``include``, ``into``, lazy slices and ``load_into`` take what they need from the replica."""
    hot.age(["gpt@1"], "record")
    wanted = state_of(1)
    part = hot.load("gpt@1", include=["model.w"])
    assert torch.equal(part["model"]["w"], wanted["model"]["w"])
    assert "optimizer" not in part
    target = {"model": {"w": torch.zeros(300, 300)}}
    hot.load("gpt@1", include=["model.w"], into=target)
    assert torch.equal(target["model"]["w"], wanted["model"]["w"])
    lazy = hot.version("gpt@1")
    assert torch.equal(lazy["model.w"][7:19, ::3], wanted["model"]["w"][7:19, ::3])
    linear = torch.nn.Module()
    linear.w = torch.nn.Parameter(torch.zeros(300, 300))
    report = hot.load_into("gpt@1", linear, include=["model.w"], rename={"model": ""})
    assert report.loaded == ("w",)
    assert torch.equal(linear.w, wanted["model"]["w"])


def test_weights_here_and_the_optimizer_there(hot: Store) -> None:
    """Of a version whose weights are kept, the rest comes from the replica when it is asked for."""
    hot.age(["gpt@1"], "weights")
    hot.gc(**ZERO)
    wanted = state_of(1)
    assert set(hot.load("gpt@1")["model"]) == {"w", "same"}
    found = hot.load("gpt@1", include=["model", "optimizer"])
    assert torch.equal(found["optimizer"]["m"], wanted["optimizer"]["m"])
    assert torch.equal(found["model"]["w"], wanted["model"]["w"])
    assert torch.equal(hot.version("gpt@1")["optimizer.m"][3:5], wanted["optimizer"]["m"][3:5])
    into = {"optimizer": {"m": torch.zeros(100, 300)}}
    hot.load("gpt@1", include=["optimizer"], into=into)
    assert torch.equal(into["optimizer"]["m"], wanted["optimizer"]["m"])
    with pytest.raises(errors.TensorNotFoundError):
        hot.load("gpt@1", include=["no.such.thing"])
    with pytest.raises(errors.TensorNotFoundError):
        hot.load("gpt@1", include=["optimizer"], fall_through=False)


def test_pieces_that_are_lost_here_are_read_there(
    hot: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Packs and manifests that are gone, a flipped bit: each load is whole, and warns."""
    packs = sorted((tmp_path / "hot" / "packs").rglob("*.pack"))
    packs[0].unlink()
    flip_pack(packs[1])
    with caplog.at_level(logging.WARNING, "ckptstore"):
        for step in STEPS:
            assert_same(hot.load(f"gpt@{step}"), step)
        assert "is damaged and read from replica 'cold'" in caplog.text
        assert "ckptstore repair --from replica:cold" in caplog.text
        assert lose(tmp_path / "hot" / "manifests", "*.manifest") == len(STEPS)
    with ckptstore.open(tmp_path / "hot") as again:
        for step in STEPS:
            assert_same(again.load(f"gpt@{step}"), step)
        with pytest.raises((errors.CorruptObjectError, errors.CorruptTensorError)):
            again.load("gpt@1", fall_through=False)
        assert_same(again.load("gpt@latest-valid"), STEPS[-1])


def test_chunks_that_are_still_here_are_read_here(tmp_path: Path) -> None:
    """Of an evicted version only what no other version here holds is asked of the replica."""
    cold_backend = MeteredBackend(MemoryBackend(f"tiers/{tmp_path}/cold"))
    cold = Store(create_on(cold_backend, chunk_bytes=1 << 16))
    with ckptstore.open(
        tmp_path / "hot", create=True, chunk_bytes=1 << 16, replicas={"cold": cold}
    ) as hot:
        run = hot.run("gpt")
        for step in STEPS:
            run.save(state_of(step), step=step, codec="raw")
        _name(hot, "cold", cold)
        hot.replicate(cold)
        hot.age(["gpt@2"], "record")
        hot.gc(**ZERO)
        before = _read_bytes(cold_backend)
        seen: list[Progress] = []
        assert_same(hot.load("gpt@2", progress=seen.append), 2)
        moved = _read_bytes(cold_backend) - before
        total = sum(t.numel() * 4 for p in ("model", "optimizer") for t in state_of(2)[p].values())
        shared = 200 * 300 * 4
        assert total - shared <= moved <= total - shared + 16 * 1024
        assert seen[-1].done == seen[-1].total == total
        assert [step.done for step in seen] == sorted(step.done for step in seen)


def test_chunks_that_are_cold_here_are_read_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That a chunk lies in an archive class here stops no load from there, and is no damage."""
    cold = Store(create_on(MemoryBackend(f"tiers/{tmp_path}/there")))
    asleep = Fault(
        calls=frozenset({"read_into"}),
        at=0,
        times=0,
        error=lambda: errors.ColdObjectError("in GLACIER"),
    )
    here = FaultyBackend(MemoryBackend(f"tiers/{tmp_path}/here"), asleep)
    with Store(create_on(here), replicas={"cold": cold}) as hot:
        for step in STEPS:
            hot.run("gpt").save(state_of(step), step=step)
        _name(hot, "cold", cold)
        hot.replicate(cold)
        hot.age(["gpt@2"], "record")
        asleep.at = 1
        with caplog.at_level(logging.INFO, "ckptstore"):
            for step in (2, 3):
                assert_same(hot.load(f"gpt@{step}"), step)
        assert asleep.hits
        assert "gpt@3" in caplog.text
        assert "is damaged" not in caplog.text


def _name(hot: Store, name: str, other: Store) -> None:
    """Name a replica that is open already, where nothing can be opened by its location."""
    from ckptstore.catalog.replica_ops import name_replica

    url, store = f"memory://{name}", other.info.store_id
    hot.repo.log.append_any(lambda now: name_replica(now, name=name, url=url, store=store))


def _read_bytes(backend: MeteredBackend) -> int:
    meter = backend.snapshot().get("read_into")
    return 0 if meter is None else meter.bytes_moved


def test_where_nothing_is_missing_nothing_more_is_asked(tmp_path: Path) -> None:
    """A load of what is here makes the same requests with a replica as without, and none there."""
    numbers = itertools.count()
    cold_backend = MeteredBackend(MemoryBackend(f"tiers-cost/{tmp_path}/cold"))
    cold = Store(create_on(cold_backend))

    def requests(replicas: Any) -> dict[str, int]:  # noqa: ANN401
        inner = MemoryBackend(f"tiers-cost/{tmp_path}/{next(numbers)}")
        backend = MeteredBackend(inner)
        store = Store(create_on(backend), replicas=replicas)
        store.run("gpt").save(state_of(1), step=1)
        if replicas:
            _name(store, "cold", cold)
        store.versions()
        before = {name: meter.calls for name, meter in backend.snapshot().items()}
        assert_same(store.load("gpt@1"), 1)
        after = {name: meter.calls for name, meter in backend.snapshot().items()}
        return {name: count - before.get(name, 0) for name, count in after.items()}

    plain = requests(None)
    there = {name: meter.calls for name, meter in cold_backend.snapshot().items()}
    assert requests({"cold": cold}) == plain
    assert {name: meter.calls for name, meter in cold_backend.snapshot().items()} == there


def test_local_replicas_come_before_remote_ones_then_the_order_of_naming(tmp_path: Path) -> None:
    """The nearest replica that has it is read; what comes before and has it not is passed over."""
    asked: list[str] = []

    class Telling(MeteredBackend):
        def __init__(self, inner: Backend, name: str) -> None:
            super().__init__(inner)
            self.told = name

        def read_into(self, key: str, offset: int, buffers: Any) -> None:  # noqa: ANN401
            asked.append(self.told)
            super().read_into(key, offset, buffers)

    stores = {
        name: Store(create_on(Telling(MemoryBackend(f"{tmp_path}/{name}"), name)))
        for name in ("far", "empty", "near", "nearer")
    }
    from ckptstore.catalog.replica_ops import name_replica

    with ckptstore.open(tmp_path / "hot", create=True, replicas=stores) as hot:
        hot.run("gpt").save(state_of(1), step=1)
        hot.run("gpt").save(state_of(2), step=2)
        for name, store in stores.items():
            url = f"s3://{name}/x" if name == "far" else f"memory://{name}"
            store_id = store.info.store_id

            def named(now: Catalog, n: str = name, u: str = url, s: str = store_id) -> list[Op]:
                return name_replica(now, name=n, url=u, store=s)

            hot.repo.log.append_any(named)
            if name != "empty":
                hot.replicate(store)
        hot.age(["gpt@1"], "record")
        asked.clear()
        assert_same(hot.load("gpt@1"), 1)
    assert set(asked) == {"near"}


def test_a_second_replica_has_what_the_first_lost(hot: Store, tmp_path: Path) -> None:
    """Pieces that the nearest replica has lost too come from the next one."""
    hot.add_replica("second", tmp_path / "second", create=True)
    hot.replicate("replica:second")
    hot.age(["gpt@1"], "record")
    hot.gc(**ZERO)
    packs = sorted((tmp_path / "cold" / "packs").rglob("*.pack"))
    packs[0].unlink()
    assert_same(hot.load("gpt@1"), 1)
    lose(tmp_path / "cold" / "packs", "*.pack")
    assert_same(hot.load("gpt@1"), 1)
    lose(tmp_path / "second" / "packs", "*.pack")
    with pytest.raises(errors.VersionNotFoundError, match=r"only the record .*'cold'.*'second'"):
        hot.load("gpt@1")


def test_a_replica_that_repacked_meanwhile_is_looked_at_again(hot: Store, tmp_path: Path) -> None:
    """What was opened lazily is found again after the replica moved it and swept the old packs."""
    hot.age(["gpt@1", "gpt@2"], "record")
    hot.gc(**ZERO)
    lazy = hot.version("gpt@1")
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.remove(["gpt@2", "gpt@3"])
        cold.gc(grace_s=0.0, orphan_age_s=0.0, repack_below=1.0)
    assert torch.equal(lazy["model.w"].load(), state_of(1)["model"]["w"])


# --- refusals -----------------------------------------------------------------------------------
def test_both_reasons_are_told_the_one_here_first(hot: Store, tmp_path: Path) -> None:
    """Of the kind of what is wrong here; then the replica's; then what to do."""
    hot.age(["gpt@1"], "record")
    shutil.rmtree(tmp_path / "cold")
    with pytest.raises(errors.VersionNotFoundError) as caught:
        hot.load("gpt@1")
    text = str(caught.value)
    assert text.index("only the record of gpt@1") < text.index("replica 'cold'")
    assert "replica add cold" in caught.value.hint
    lose(tmp_path / "hot" / "packs", "*.pack")
    with pytest.raises(errors.CorruptTensorError, match=r"pack is gone .*replica 'cold'"):
        hot.load("gpt@2")


def test_another_store_in_the_place_of_a_replica_is_refused(
    hot: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read from it, the log says so, and so does the error."""
    hot.age(["gpt@1"], "record")
    shutil.rmtree(tmp_path / "cold")
    ckptstore.open(tmp_path / "cold", create=True).close()
    with pytest.raises(errors.VersionNotFoundError, match="there is the store"):
        hot.load("gpt@1")
    assert "is left out: at" in caplog.text
    with pytest.raises(errors.ReplicaChangedError):
        hot.replica("cold")
    with pytest.raises(errors.ReplicaChangedError):
        hot.replicate("replica:cold")


def test_another_state_under_the_same_id_is_refused(hot: Store, tmp_path: Path) -> None:
    """A replica that keeps only the weights of a version does not pass for one that has it all."""
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.age(["gpt@1"], "weights")
    hot.age(["gpt@1"], "record")
    with pytest.raises(errors.VersionNotFoundError, match="it has the version only as weights"):
        hot.load("gpt@1")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (errors.TransientStorageError("503"), "try again when"),
        (
            errors.ColdObjectError("in GLACIER", hint="ckptstore thaw gpt@1 --store x"),
            "ckptstore thaw",
        ),
    ],
)
def test_a_replica_that_is_down_or_cold_says_what_to_do(
    tmp_path: Path, error: Exception, hint: str
) -> None:
    """Reads that fail there end in an error with both reasons and the next step."""
    inner = MemoryBackend(f"tiers-down/{tmp_path}/{hint}")
    fault = Fault(calls=frozenset({"read_into"}), at=0, times=0, error=lambda: error)
    cold = Store(create_on(FaultyBackend(inner, fault)))
    with ckptstore.open(tmp_path / "hot", create=True, replicas={"cold": cold}) as hot:
        hot.run("gpt").save(state_of(1), step=1)
        hot.run("gpt").save(state_of(2), step=2)
        _name(hot, "cold", cold)
        hot.replicate(cold)
        hot.age(["gpt@1"], "record")
        fault.at = 1
        with pytest.raises(errors.VersionNotFoundError, match="only the record") as caught:
            hot.load("gpt@1")
    assert hint in caught.value.hint


def test_the_key_of_an_encrypted_replica_is_asked_for_where_it_is_given(
    hot: Store, tmp_path: Path
) -> None:
    """The key of a replica is no key of this store: the hint names the place for it."""
    key = tmp_path / "a.key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    spec = f"file:{key}"
    with ckptstore.open(tmp_path / "secret", create=True, encryption_key=spec) as secret:
        hot.replicate(secret)
        hot.add_replica("secret", tmp_path / "secret", encryption_key=spec)
        hot.remove_replica("cold")
        hot.evict(["gpt@1"], replica="secret")
    with ckptstore.open(hot.url) as store, pytest.raises(errors.VersionNotFoundError) as caught:
        store.load("gpt@1")
    assert caught.value.hint is not None
    assert "replicas={'secret': {'encryption_key'" in caught.value.hint
    given = {"secret": {"encryption_key": spec}}
    with ckptstore.open(hot.url, replicas=given) as store:
        assert_same(store.load("gpt@1"), 1)


def test_a_version_that_other_stores_have_is_told_of_where_none_has_a_name(tmp_path: Path) -> None:
    """The error names the stores that are noted to have it, and how a name is given."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        hot.run("gpt").save(state_of(1), step=1)
        hot.run("gpt").save(state_of(2), step=2)
        hot.replicate(tmp_path / "cold")
        hot.age(["gpt@1"], "record")
        with pytest.raises(errors.VersionNotFoundError) as caught:
            hot.load("gpt@1")
        assert "replica add" in caught.value.hint
        assert hot.resolve("gpt@1").replicas[0][:8] in caught.value.hint


# --- refill, eviction, threads --------------------------------------------------------------------
def test_refill_brings_it_back_first(hot: Store, tmp_path: Path) -> None:
    """The version is here as it was, and loads without the replica from then on."""
    hot.age(["gpt@1", "gpt@2"], "record")
    hot.gc(**ZERO)
    assert_same(hot.load("gpt@1", refill=True), 1)
    assert hot.resolve("gpt@1").level == "full"
    assert hot.resolve("gpt@2").level == "record"
    shutil.rmtree(tmp_path / "cold")
    assert_same(hot.load("gpt@1", refill=True), 1)
    with pytest.raises(errors.VersionNotFoundError, match="'cold'"):
        hot.load("gpt@2", refill=True)
    with ckptstore.open(tmp_path / "hot") as again:
        assert again.verify().ok


def test_eviction_takes_only_what_the_replica_has(hot: Store, tmp_path: Path) -> None:
    """Never heads, tags or pins, nor what is not there; loads fall through after the sweep."""
    run = hot.run("gpt")
    hot.tag("gpt@2", "keep")
    for step in (5, 6):
        run.save(state_of(step), step=step)
    with pytest.raises(errors.InvalidInputError, match="which versions"):
        hot.evict(replica="cold")
    seen = hot.evict(replica="cold", runs=["gpt"], dry_run=True)
    assert [one.step for one in seen.evicted] == [1, 3, 4]
    assert all(v.level == "full" for v in run.versions())
    done = hot.evict(replica="cold", keep="best 2 loss")
    assert [one.step for one in done.evicted] == [1]
    assert [one.step for one in hot.evict(["gpt@3"], replica="cold").evicted] == [3]
    hot.gc(**ZERO)
    for step in (1, 2, 3, 4, 5, 6):
        assert_same(hot.load(f"gpt@{step}"), step)
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.remove(["gpt@4"], force=True)
        cold.gc(**ZERO)
    assert hot.evict(["gpt@4"], replica="cold").evicted == ()
    assert_same(hot.load("gpt@4"), 4)


def test_eviction_looks_at_the_objects_and_not_at_its_memory(hot: Store, tmp_path: Path) -> None:
    """A manifest that the replica has lost keeps its version here, though it was read before."""
    for step in STEPS:
        hot.replica("cold").load(f"gpt@{step}")
    assert lose(tmp_path / "cold/manifests", "*.manifest") == len(STEPS)
    report = hot.evict(replica="cold", keep="last 1")
    assert not report.evicted
    assert len(report.missed) == len(STEPS) - 1
    hot.gc(**ZERO)
    for step in STEPS:
        assert_same(hot.load(f"gpt@{step}"), step)


def test_eviction_takes_no_other_state_for_the_one_that_is_here(hot: Store, tmp_path: Path) -> None:
    """Rounded here and kept exactly there, but not whole: a load could not fall through to that."""
    hot.age(["gpt@1", "gpt@2"], "weights-bf16")
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.age(["gpt@1"], "weights")
    report = hot.evict(["gpt@1", "gpt@2"], replica="cold")
    assert [one.step for one in report.evicted] == [2]
    hot.gc(**ZERO)
    assert torch.equal(
        hot.load("gpt@1")["model"]["w"], state_of(1)["model"]["w"].bfloat16().float()
    )
    assert_same(hot.load("gpt@2"), 2)


def test_many_threads_load_at_once(hot: Store, tmp_path: Path) -> None:
    """The replica is opened once, and each thread gets its state."""
    hot.age(["gpt@1", "gpt@2", "gpt@3"], "record")
    hot.gc(**ZERO)
    barrier = threading.Barrier(8)

    def load(turn: int) -> None:
        barrier.wait()
        for step in (1 + turn % 4, 1 + (turn + 1) % 4):
            assert_same(hot.load(f"gpt@{step}"), step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(load, range(8)))


def test_threads_share_the_failure_of_a_replica(tmp_path: Path) -> None:
    """Of threads that wait for a replica that cannot be opened only one tries."""
    from ckptstore.model import ReplicaInfo
    from ckptstore.replicas.named import Replicas

    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        opened = Replicas(hot.repo)
        tries = 0
        waiting = threading.Event()

        def fail(info: ReplicaInfo) -> Any:  # noqa: ANN401
            nonlocal tries
            tries += 1
            waiting.wait(60)
            msg = "down"
            raise errors.TransientStorageError(msg)

        opened._open = fail  # type: ignore[method-assign]
        info = ReplicaInfo(name="cold", url="/nowhere", store="0" * 32)

        def get(_: int) -> str:
            try:
                opened.get(info)
            except errors.TransientStorageError as error:
                return error.message
            return ""

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(get, n) for n in range(6)]
            while not opened._slots or not next(iter(opened._slots.values())).lock.locked():
                pass
            before = tries
            waiting.set()
            assert [future.result() for future in futures] == ["down"] * 6
        assert before <= tries <= 6


def test_closing_closes_what_was_opened(hot: Store) -> None:
    """A replica that this store opened is closed with it; one that was given stays open."""
    cold = hot.replica("cold")
    hot.close()
    with pytest.raises(errors.InvalidInputError, match="is closed"):
        cold.versions()
    with pytest.raises(errors.InvalidInputError, match="is closed"):
        hot.replica("cold")


def test_a_save_to_a_replica_is_waited_for(hot: Store) -> None:
    """Closing a store waits for what is saved in the background to the replicas that it opened."""
    cold = hot.replica("cold")
    assert hot.replica("cold")._session is cold._session
    pending = cold.run("new").save_async({"w": torch.ones(3)}, step=1)
    hot.close()
    assert pending.done
    with ckptstore.open(cold.url) as again:
        assert [version.step for version in again.versions("new")] == [1]


def test_a_replica_that_fails_at_close_keeps_nothing_open(hot: Store, tmp_path: Path) -> None:
    """A save to one replica failed, and nobody asked it: all is closed, and the failure told."""
    hot.add_replica("two", tmp_path / "two", create=True)
    cold, two = hot.replica("cold"), hot.replica("two")
    shutil.rmtree(tmp_path / "cold" / "packs")
    (tmp_path / "cold" / "packs").write_bytes(b"no folder")
    cold.run("mine").save_async(state_of(1), step=1)
    with pytest.raises(errors.StorageError, match="packs"):
        hot.close()
    for store in (hot, cold, two):
        with pytest.raises(errors.InvalidInputError, match="closed"):
            store.versions()


def test_a_replica_that_a_store_opened_is_pickled(hot: Store) -> None:
    """Another process opens it by its own location, with the limits that it was opened with."""
    cold = hot.replica("cold")
    with pickle.loads(pickle.dumps(cold)) as again:  # noqa: S301 - our own
        assert again is not cold
        assert again.url == cold.url
        assert again.repo.options == cold.repo.options
        assert again.versions() == cold.versions()


def test_options_of_replicas_are_checked(tmp_path: Path) -> None:
    """A mapping of names to mappings, or to stores."""
    with pytest.raises(errors.InvalidInputError, match="mapping of names"):
        ckptstore.open(tmp_path / "hot", create=True, replicas=["cold"])  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match="are no mapping"):
        ckptstore.open(tmp_path / "hot", create=True, replicas={"cold": "x"})  # type: ignore[dict-item]


def test_a_forked_child_opens_its_own(hot: Store) -> None:
    """A child of a fork does not use the connections of its parent."""
    hot.age(["gpt@1"], "record")
    assert_same(hot.load("gpt@1"), 1)
    opened = hot._session.replicas
    slots = opened._slots
    opened._pid = os.getpid() + 1  # as a child sees it
    assert_same(hot.load("gpt@1"), 1)
    assert opened._slots is not slots


def test_an_evicted_version_is_exported(hot: Store, tmp_path: Path) -> None:
    """A safetensors file of what only the replica has, as of any version."""
    from safetensors.torch import load_file

    from ckptstore.integrations.safetensors_stream import export_safetensors

    hot.age(["gpt@1"], "record")
    hot.gc(**ZERO)
    export_safetensors(hot, "gpt@1", tmp_path / "one.safetensors", include=["model"])
    found = load_file(tmp_path / "one.safetensors")
    assert torch.equal(found["model.w"], state_of(1)["model"]["w"])
