"""Versions whose weights were rounded, beside everything else that a store does."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Relocate
from ckptstore.errors import CommitConflictError, VersionNotFoundError
from ckptstore.format.snapshot import VersionRow, decode_snapshot, encode_snapshot
from ckptstore.maintenance.retention import retain as retention_module
from ckptstore.repo import create_on
from ckptstore.testing.faulty import FaultyBackend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of one run: four versions, the loss is least at 1; 0 to 2 are rounded."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(4):
            run.save(_state(step), step=step, metrics={"loss": abs(step - 1)})
        store.age(["gpt@0"], "weights-int8")
        store.age(["gpt@1", "gpt@2"], "weights-bf16")
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[ckptstore.Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _weight(step: int) -> torch.Tensor:
    return torch.randn(200, 100, generator=torch.Generator().manual_seed(step))


def _state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": _weight(step), "norm": torch.full((50,), float(step))},
        "optimizer": {"m": _weight(step + 50)},
        "epoch": step,
    }


def _bf16(step: int) -> torch.Tensor:
    return _weight(step).bfloat16().float()


def test_refs_and_loads_take_them_as_weights(store: ckptstore.Store) -> None:
    """The best, a step, an id, the latest valid: as for versions at level weights."""
    run = store.run("gpt")
    assert run.resolve("best:loss").step == 1
    assert torch.equal(run.load("best:loss")["model"]["w"], _bf16(1))
    assert torch.equal(run.load("~1")["model"]["w"], _bf16(2))
    assert run.resolve("latest-valid").step == 3
    assert torch.equal(run.load(2, include=["model.*"])["model"]["w"], _bf16(2))


def test_rollback_and_fork(store: ckptstore.Store) -> None:
    """Training goes on from rounded weights; what is saved next is saved whole again."""
    run = store.run("gpt")
    run.rollback(1)
    assert run.head is not None
    assert run.head.level == "weights-bf16"
    again = run.save(_state(9), step=9)
    assert (again.level, list(run.load()["optimizer"])) == ("full", ["m"])
    forked = store.fork("gpt@0", "tuned").head
    assert forked is not None
    assert forked.level == "full", "a fork has all that its source had then"
    loaded = store.load("tuned")
    assert torch.equal(loaded["model"]["w"], store.load("gpt@0")["model"]["w"])
    store.run("tuned").save(_state(5), step=5)
    store.remove(["gpt@0"])
    store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    assert torch.equal(store.load(f"#{forked.id}")["model"]["w"], loaded["model"]["w"])
    assert store.verify().ok


def test_undelete_brings_back_what_was_left(store: ckptstore.Store) -> None:
    """A rounded version that is removed comes back rounded; as a whole one it does not."""
    store.remove(["gpt@1"])
    (back,) = store.undelete(["gpt@1"])
    assert back.level == "weights-bf16"
    assert torch.equal(store.load("gpt@1")["model"]["w"], _bf16(1))
    with pytest.raises(VersionNotFoundError, match="reduced to weights-bf16, which is for good"):
        store.undelete(["gpt@2"])


def test_a_snapshot_keeps_the_level(store: ckptstore.Store) -> None:
    """As the log does; and rows that were written before there was the field are read."""
    catalog = store.repo.refresh()
    body = decode_snapshot(encode_snapshot(catalog.to_snapshot()), where="here")
    again = Catalog.from_snapshot(body, where="here")
    levels = [version.level for version in again.versions("gpt")]
    assert levels == ["weights-int8", "weights-bf16", "weights-bf16", "full"]
    assert levels == [version.level for version in catalog.versions("gpt")]
    bare = [row[:-1] for row in msgspec.msgpack.decode(msgspec.msgpack.encode(body.versions))]
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(bare), type=list[VersionRow])
    assert [(row.id, row.flags, row.encoding) for row in rows] == [
        (row.id, row.flags, "") for row in body.versions
    ]


def test_the_log_says_it_in_a_field_that_others_may_ignore(store: ckptstore.Store) -> None:
    """The level is weights, with an encoding beside it."""
    found = [
        (op.level, op.encoding)
        for commit in store.log()
        for op in commit.ops
        if isinstance(op, Relocate)
    ]
    assert found == [("weights", "int8"), ("weights", "bf16"), ("weights", "bf16")]


def test_repack_and_repair_leave_the_level(
    store: ckptstore.Store, path: Path, tmp_path: Path
) -> None:
    """What moves a version about keeps what it is; what mends it from a second store, too."""
    store.remove(["gpt@2"])
    reports = [store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99) for _ in range(2)]
    assert sum(report.repacked.versions_count for report in reports) > 0
    levels = {version.step: version.level for version in store.versions("gpt")}
    assert levels == {0: "weights-int8", 1: "weights-bf16", 3: "full"}
    assert torch.equal(store.load("gpt@1")["model"]["w"], _bf16(1))
    assert store.verify().ok
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for pack in store.repo.manifests.load(store.resolve("gpt@1")).pieces.packs:
        (path / "packs" / pack[:2] / f"{pack}.pack").unlink()
    assert not store.verify().ok
    store.repair(copy)
    assert store.verify().ok
    assert store.resolve("gpt@1").level == "weights-bf16"
    assert torch.equal(store.load("gpt@1")["model"]["w"], _bf16(1))


def test_what_is_damaged_is_not_rounded(store: ckptstore.Store, path: Path) -> None:
    """A weight that cannot be read stops its version, which stays as it was."""
    store.run("gpt").save(_state(8), step=8)
    manifest = store.repo.manifests.load(store.resolve("gpt@3"))
    for pack in manifest.pieces.packs:
        (path / "packs" / pack[:2] / f"{pack}.pack").unlink()
    with pytest.raises(ckptstore.CkptStoreError, match=r"model\.w"):
        store.age(["gpt@3"], "weights-bf16")
    assert store.resolve("gpt@3").level == "full"


def test_two_that_age_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever commits second is told, changes nothing, and finds nothing left to do."""
    real = retention_module.prepare
    turn = iter([True, False])

    def prepare(*arguments: Any) -> Any:  # noqa: ANN401 - passed on
        prepared = real(*arguments)
        if next(turn, False):
            with ckptstore.open(path) as other:
                other.age(["gpt@1"], "weights-int8")
        return prepared

    monkeypatch.setattr(retention_module, "prepare", prepare)
    with ckptstore.open(path) as store:
        with pytest.raises(CommitConflictError):
            store.age(["gpt@1"], "weights-int8")
        assert store.age(["gpt@1"], "weights-int8") == []
        assert store.resolve("gpt@1").level == "weights-int8"
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0)
        assert store.verify().ok


def test_two_retentions_at_once(path: Path) -> None:
    """Threads with stores of their own carry out one policy: each step is done once."""
    with ckptstore.open(path) as store:
        store.run("gpt").save(_state(8), step=8)
        store.set_policy({"full": "last 1", "weights-int8": "all"})
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with ckptstore.open(path) as store:
                store.retain()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is shown
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with ckptstore.open(path) as store:
        levels = [version.level for version in store.versions("gpt")]
        assert levels == ["weights-int8"] * 4 + ["full"]
        moves = [op for c in store.log() for op in c.ops if isinstance(op, Relocate)]
        assert len(moves) == 3 + 3
        assert store.verify().ok


def test_a_collection_that_takes_the_new_packs_for_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no patience it may condemn what ageing has written: it is written again."""
    faulty = FaultyBackend(MemoryBackend(str(tmp_path)))
    store = ckptstore.Store(create_on(faulty))
    run = store.run("gpt")
    for step in range(4):
        run.save(_state(step), step=step)
    real = retention_module.prepare
    collections = iter([True, True, False, True])

    def prepare(*arguments: Any) -> Any:  # noqa: ANN401 - passed on
        prepared = real(*arguments)
        if next(collections, False):
            store.gc(grace_s=0, orphan_age_s=0)
        return prepared

    monkeypatch.setattr(retention_module, "prepare", prepare)
    store.retain({"full": "last 1", "weights-bf16": "all"})
    assert [v.level for v in store.versions("gpt")] == ["weights-bf16"] * 3 + ["full"]
    for step in range(3):
        assert torch.equal(run.load(step)["model"]["w"], _bf16(step))
    assert store.verify().ok
