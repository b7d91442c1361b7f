"""Ageing: what stays of a version, that it loads beside all else; a crash changes nothing."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import errors
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Condemn, Relocate
from ckptstore.checkpoint.content import read_content
from ckptstore.format.snapshot import VersionRow, decode_snapshot, encode_snapshot
from ckptstore.maintenance.retention import retain as retention_module
from ckptstore.maintenance.retention.reduce import roles_of
from ckptstore.repo import create_on
from ckptstore.serving.model_folder import find_weights
from ckptstore.store import Store
from ckptstore.testing.faulty import FaultyBackend


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 100, generator=generator)
    model = OrderedDict(embed=weight, norm=torch.ones(5) * seed)
    model["tied"] = weight
    return {
        "model": model,
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(300, 100, generator=generator)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "lr_scheduler": {"last_epoch": seed},
        "rng": {"torch": torch.get_rng_state(), "python": (3, (1, 2, 3))},
        "data": {"position": seed, "order": np.arange(50)},
        "epoch": seed,
        "config": {"name": "gpt", "layers": [1, 2]},
    }


def test_the_weights_part_is_what_it_says(store: Store) -> None:
    """Weights, tied as they were, and plain values that are nobody else's; nothing more."""
    run = store.run("gpt")
    state = _state(1)
    before = run.save(state, step=1, metrics={"loss": 2.0}, metadata={"a": 1})
    run.save(_state(2), step=2)
    (after,) = store.age(["gpt@1"], "weights")
    assert after.level == "weights"
    assert (after.id, after.metrics, after.metadata) == (before.id, {"loss": 2.0}, {"a": 1})
    assert list(after.roles) == ["weights"]
    assert after.roles["weights"].logical == 300 * 100 * 4 + 20
    assert after.content != before.content
    assert after.manifest_bytes < before.manifest_bytes
    loaded = run.load(1)
    assert list(loaded) == ["model", "epoch", "config"]
    assert type(loaded["model"]) is OrderedDict
    assert torch.equal(loaded["model"]["embed"], state["model"]["embed"])
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["embed"].data_ptr()
    assert (loaded["epoch"], loaded["config"]) == (1, {"name": "gpt", "layers": [1, 2]})
    assert store.version("gpt@1")["model.norm"][1:3].tolist() == [1.0, 1.0]
    assert store.verify().ok
    assert torch.equal(run.load(2)["optimizer"]["state"][0]["exp_avg"],
                       _state(2)["optimizer"]["state"][0]["exp_avg"])  # fmt: skip


def test_equal_weights_have_equal_content(store: Store) -> None:
    """The digest is of what is kept: of two versions with the same weights it is the same."""
    run = store.run("gpt")
    one, other = _state(1), _state(1)
    other["optimizer"]["state"][0]["exp_avg"] += 1
    other["rng"]["python"] = (4, ())
    first, second = run.save(one, step=1), run.save(other, step=2)
    run.save(one, step=3)
    assert first.content != second.content
    first, second = store.age(["gpt@1", "gpt@2"], "weights")
    assert first.content == second.content


def test_the_record_stays(store: Store) -> None:
    """Metrics, tags and lineage are there; tensors are not, and say so."""
    run = store.run("gpt", metrics={"loss": "min"})
    run.save(_state(1), step=1, metrics={"loss": 1.0}, tags=["first"])
    run.save(_state(2), step=2, metrics={"loss": 2.0})
    with pytest.raises(errors.PolicyError, match="is tagged first"):
        store.age(["gpt@first"], "record")
    (after,) = store.age(["gpt@first"], "record", force=True)
    assert (after.level, after.metrics, after.tags) == ("record", {"loss": 1.0}, ("first",))
    assert after.roles == {}
    with pytest.raises(errors.VersionNotFoundError, match="only the record"):
        run.load(1)
    assert run.resolve("best:loss").step == 2, "a record cannot be loaded, so it is not the best"
    assert store.verify().ok
    assert store.age(["gpt@1"], "weights") == [], "less never becomes more"


def test_steps_of_ageing_follow_each_other(store: Store) -> None:
    """Full, weights, record; each condemns the manifest before it in its own commit."""
    run = store.run("gpt")
    keys = [run.save(_state(1), step=1).manifest_key]
    run.save(_state(2), step=2)
    for level in ("weights", "record"):
        (after,) = store.age(["gpt@1"], level)
        move, condemned = store.log()[-1].ops
        assert isinstance(move, Relocate)
        assert isinstance(condemned, Condemn)
        assert list(condemned.keys) == keys[-1:]
        keys.append(after.manifest_key)


def test_what_ageing_frees_a_collection_takes(store: Store, tmp_path: Path) -> None:
    """Afterwards the weights load, and the other roles' bytes are gone from the disk."""
    run = store.run("gpt")
    for step in (1, 2, 3):
        run.save(_state(step), step=step)

    def size() -> int:
        packs = (tmp_path / "store" / "packs").rglob("*.pack")
        return sum(path.stat().st_size for path in packs)

    before = size()
    estimate = run.retain({"full": "last 1", "weights": "all"}, dry_run=True).reclaimable_bytes
    run.retain({"full": "last 1", "weights": "all"})
    for _ in range(2):
        store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    freed = before - size()
    assert 0.8 * estimate < freed < 1.1 * estimate
    for step in (1, 2):
        assert torch.equal(run.load(step)["model"]["embed"], _state(step)["model"]["embed"])
    assert store.verify().ok


def test_a_save_from_a_reduced_head_shares_its_weights(store: Store) -> None:
    """After a rollback to a version of which the weights are left, those cost nothing again."""
    run = store.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights")
    run.rollback(1)
    again = run.save(_state(1), step=3)
    assert again.roles["weights"].new == 0
    assert again.roles["optimizer"].new > 0


def test_the_head_and_pins_are_not_reduced(store: Store) -> None:
    """The head can be forced, for a run that is over; a pin cannot."""
    run = store.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    run.pin(1)
    with pytest.raises(errors.PolicyError, match="head"):
        store.age(["gpt@2"], "weights")
    with pytest.raises(errors.PolicyError, match="pinned"):
        store.age(["gpt@1"], "record", force=True)
    (head,) = store.age(["gpt"], "weights", force=True)
    assert (head.level, run.load()["epoch"]) == ("weights", 2)


def test_a_state_without_weights_is_not_reduced_to_nothing(store: Store) -> None:
    """Who says that all tensors are something else learns it before they are gone."""
    run = store.run("odd")
    run.save({"things": {"a": torch.ones(3)}}, step=1, roles={"things": "extra"})
    run.save({"things": {"a": torch.ones(3)}}, step=2)
    with pytest.raises(errors.PolicyError, match="no tensors of role weights"):
        store.age(["odd@1"], "weights")
    run.save({"things": {"a": torch.ones(3)}, "b": torch.ones(2)}, step=3, roles={"b": "extra"})
    run.save({"x": 1}, step=4)
    store.age(["odd@3"], "weights")
    assert list(run.load(3)) == ["things"]


def _two_networks(store: Store, name: str, **words: Any) -> ckptstore.Run:  # noqa: ANN401
    run = store.run(name)
    for step in (1, 2):
        state = {"generator": torch.randn(50, 9), "mpd": {"w": torch.randn(50, 8)}}
        optimizer = {"state": {0: {"exp_avg": torch.ones(50, 9)}}, "param_groups": []}
        run.save({**state, "optim_g": optimizer, "epoch": step}, step=step, **words)
    return run


def test_what_goes_is_told_before_and_after(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A preview, a report, both logs name each part, with bytes."""
    run, policy = _two_networks(store, "gan"), {"full": "last 1", "weights": "all"}
    first, _ = run.versions()
    told = {first.id: {"optim_g": 50 * 9 * 4}}
    assert run.retain(policy, dry_run=True).dropped == told
    assert run.retain(policy, dry_run=True, quick=True).dropped == {}
    with caplog.at_level("INFO", logger="ckptstore"):
        report = run.retain(policy)
    assert report.dropped == told
    assert "optim_g (1.76 KiB)" in caplog.text
    assert "optim_g (1.76 KiB)" in str(report._repr_html_())
    (move,) = (op for op in store.log()[-1].ops if isinstance(op, Relocate))
    assert move.dropped == told[first.id]
    assert list(run.load(1)) == ["generator", "mpd", "epoch"]


def test_networks_that_an_older_rule_did_not_know_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role of an older rule takes no network away, by ageing, a fork or what is served."""
    monkeypatch.setattr("ckptstore.checkpoint.write.RULE", 1)
    old = _two_networks(store, "old", roles={"mpd": "extra"})
    store.fork("old@1", "part", roles=["weights"])
    assert list(store.load("part")) == ["generator", "mpd"]
    read = read_content(store.repo.manifests.load(store.resolve("old@1")))
    assert [one.name for one in find_weights(read)] == ["generator", "mpd.w"]
    store.age(["old@1"], "weights")
    assert list(old.load(1)) == ["generator", "mpd", "epoch"]


def test_roles_that_are_fixed_for_a_run(store: Store) -> None:
    """They hold for versions that are there and for those to come, and outlive each policy."""
    run = _two_networks(store, "gan", roles={"generator": "data"})
    count = len(store.log())
    for _ in range(2):
        run = store.run("gan", roles={"mpd": "extra", "generator": "weights"})
    assert len(store.log()) == count + 1
    run.set_policy({"full": "last 1", "weights": "all"})
    run.set_policy(None)
    store.run("gan", keep_last=1)
    assert roles_of(store.repo, store.resolve("gan@2")).keys() == {
        (("generator",), "weights", "roles= of generator"),
        (("mpd",), "extra", "roles= of mpd"),
        (("optim_g",), "optimizer", "it has state and param_groups"),
    }
    saved = run.save({"mpd": torch.ones(2), "generator": torch.ones(3)}, step=3)
    assert {role: part.logical for role, part in saved.roles.items()} == {"extra": 8, "weights": 12}
    store.age(["gan@2"], "weights")
    assert list(run.load(2)) == ["generator", "epoch"]
    store.run("gan", roles={})
    assert store.repo.catalog.run("gan").policy == {"full": ["last 1"]}
    for bad in ({"mpd": "weight"}, {3: "weights"}, ["mpd"]):
        with pytest.raises(errors.InvalidInputError, match="role"):
            store.run("gan", roles=bad)  # type: ignore[arg-type]


def test_roles_that_are_fixed_hold_for_forks_and_copies(store: Store, tmp_path: Path) -> None:
    """Nowhere is a network dropped that its run keeps; roles of one's own stay."""
    _two_networks(store, "gan")
    store.run("gan", roles={"optim_g": "weights"})
    store.fork("gan@2", "part", roles=["weights"])
    assert "optim_g" in store.load("part")
    with ckptstore.open(tmp_path / "other", create=True) as other:
        for _ in range(2):
            store.replicate(other)
        store.fork("gan@2", "foreign", store=other)
        store.fork("gan@2", "fork")
        for place, name in ((store, "fork"), (other, "foreign"), (other, "gan")):
            place.run(name).save({"w": torch.ones(2)}, step=9)
            place.age([f"{name}@2"], "weights")
            assert "optim_g" in place.load(f"{name}@2"), name
        other.run("gan", roles={"optim_g": "optimizer"})
        store.run("gan", roles={"optim_g": "extra"})
        store.replicate(other)
        policy = other.repo.catalog.run("gan").policy
        assert policy is not None
        assert policy["roles"] == {"optim_g": "optimizer"}


def test_a_weight_that_the_optimizer_came_first_with_stays(store: Store) -> None:
    """The role is of the first path; ageing looks at the other paths of shared memory, too."""
    run = store.run("gpt")
    weight = torch.randn(200, 100)
    state = {"optimizer": {"params": [weight], "m": torch.ones(9)}, "model": {"w": weight}}
    saved = run.save({**state, "net": {"b": torch.ones(2)}}, step=1)
    assert saved.roles["optimizer"].logical > 80_000
    run.save({"x": 1}, step=2)
    store.age(["gpt@1"], "weights")
    loaded = run.load(1)
    assert list(loaded) == ["model", "net"]
    assert torch.equal(loaded["model"]["w"], weight)


def _two(path: Path) -> tuple[Store, FaultyBackend]:
    faulty = FaultyBackend(MemoryBackend(str(path)))
    store = Store(create_on(faulty))
    run = store.run("gpt")
    for step in (1, 2):
        run.save(_state(step), step=step)
    return store, faulty


def test_a_collection_that_does_so_for_ever_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, and the version is whole."""
    store, _ = _two(tmp_path)
    real = retention_module.prepare

    def prepare(*arguments: Any) -> Any:  # noqa: ANN401 - passed on
        move = real(*arguments)
        store.gc(grace_s=0, orphan_age_s=0)
        return move

    monkeypatch.setattr(retention_module, "prepare", prepare)
    with pytest.raises(errors.CondemnedError):
        store.age(["gpt@1"], "weights")
    with pytest.raises(errors.CondemnedError):
        store.retain({"full": "last 1", "weights": "all"})
    assert store.run("gpt").load(1)["epoch"] == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_every_kind_of_leaf_is_found_again(store: Store) -> None:
    """Every kind of leaf and container is renumbered: views, arrays, bytes, nested tuples."""
    run = store.run("gpt")
    base = torch.arange(40_000, dtype=torch.float32)
    state = {
        "optimizer": {"a": torch.ones(3), "b": np.arange(9)},
        "model": {
            "base": base,
            "view": base[100:200].view(10, 10),
            "array": np.arange(5.0),
            "blob": b"x" * 5000,
            "list": [torch.tensor(1), (torch.tensor(2), {"deep": torch.tensor(3)}), "text"],
            "quantized": torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
        },
        "generator": torch.Generator().manual_seed(3),
    }
    run.save(state, step=1)
    run.save({"x": 1}, step=2)
    whole = run.load(1)
    store.age(["gpt@1"], "weights")
    part = run.load(1)
    assert next(iter(part)) == "model"
    model = part["model"]
    assert torch.equal(model["view"], whole["model"]["view"])
    assert model["view"].untyped_storage().data_ptr() == model["base"].untyped_storage().data_ptr()
    assert np.array_equal(model["array"], state["model"]["array"])  # type: ignore[index]
    assert model["blob"] == b"x" * 5000
    assert model["list"][1][1]["deep"].item() == 3
    assert torch.equal(model["quantized"].int_repr(), whole["model"]["quantized"].int_repr())
    assert store.repo.manifests.load(store.resolve("gpt@1")).version == store.resolve("gpt@1").id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of one run: four versions, the loss is least at 1; 0 to 2 are rounded."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(4):
            run.save(_rounded_state(step), step=step, metrics={"loss": abs(step - 1)})
        store.age(["gpt@0"], "weights-int8")
        store.age(["gpt@1", "gpt@2"], "weights-bf16")
    return tmp_path / "store"


@pytest.fixture
def rounded(path: Path) -> Iterator[Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _weight(step: int) -> torch.Tensor:
    return torch.randn(200, 100, generator=torch.Generator().manual_seed(step))


def _rounded_state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": _weight(step), "norm": torch.full((50,), float(step))},
        "optimizer": {"m": _weight(step + 50)},
        "epoch": step,
    }


def _bf16(step: int) -> torch.Tensor:
    return _weight(step).bfloat16().float()


def test_refs_and_loads_take_them_as_weights(rounded: Store) -> None:
    """The best, a step, an id, the latest valid: as for versions at level weights."""
    run = rounded.run("gpt")
    assert run.resolve("best:loss").step == 1
    assert torch.equal(run.load("best:loss")["model"]["w"], _bf16(1))
    assert torch.equal(run.load("~1")["model"]["w"], _bf16(2))
    assert run.resolve("latest-valid").step == 3
    assert torch.equal(run.load(2, include=["model.*"])["model"]["w"], _bf16(2))


def test_rollback_and_fork(rounded: Store) -> None:
    """Training goes on from rounded weights; what is saved next is saved whole again."""
    run = rounded.run("gpt")
    run.rollback(1)
    assert run.head is not None
    assert run.head.level == "weights-bf16"
    again = run.save(_rounded_state(9), step=9)
    assert (again.level, list(run.load()["optimizer"])) == ("full", ["m"])
    forked = rounded.fork("gpt@0", "tuned").head
    assert forked is not None
    assert forked.level == "full", "a fork has all that its source had then"
    loaded = rounded.load("tuned")
    assert torch.equal(loaded["model"]["w"], rounded.load("gpt@0")["model"]["w"])
    rounded.run("tuned").save(_rounded_state(5), step=5)
    rounded.remove(["gpt@0"])
    rounded.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    assert torch.equal(rounded.load(f"#{forked.id}")["model"]["w"], loaded["model"]["w"])
    assert rounded.verify().ok


def test_undelete_brings_back_what_was_left(rounded: Store) -> None:
    """A rounded version that is removed comes back rounded; as a whole one it does not."""
    rounded.remove(["gpt@1"])
    (back,) = rounded.undelete(["gpt@1"])
    assert back.level == "weights-bf16"
    assert torch.equal(rounded.load("gpt@1")["model"]["w"], _bf16(1))
    with pytest.raises(
        errors.VersionNotFoundError, match="reduced to weights-bf16, which is for good"
    ):
        rounded.undelete(["gpt@2"])


def test_a_snapshot_keeps_the_level(rounded: Store) -> None:
    """As the log does; and rows that were written before there was the field are read."""
    catalog = rounded.repo.refresh()
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


def test_the_log_says_it_in_a_field_that_others_may_ignore(rounded: Store) -> None:
    """The level is weights, with an encoding beside it."""
    found = [
        (op.level, op.encoding)
        for commit in rounded.log()
        for op in commit.ops
        if isinstance(op, Relocate)
    ]
    assert found == [("weights", "int8"), ("weights", "bf16"), ("weights", "bf16")]


def test_repack_and_repair_leave_the_level(rounded: Store, path: Path, tmp_path: Path) -> None:
    """What moves a version about keeps what it is; what mends it from a second store, too."""
    rounded.remove(["gpt@2"])
    reports = [rounded.gc(grace_s=0, orphan_age_s=0, repack_below=0.99) for _ in range(2)]
    assert sum(report.repacked.versions_count for report in reports) > 0
    levels = {version.step: version.level for version in rounded.versions("gpt")}
    assert levels == {0: "weights-int8", 1: "weights-bf16", 3: "full"}
    assert torch.equal(rounded.load("gpt@1")["model"]["w"], _bf16(1))
    assert rounded.verify().ok
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for pack in rounded.repo.manifests.load(rounded.resolve("gpt@1")).pieces.packs:
        (path / "packs" / pack[:2] / f"{pack}.pack").unlink()
    assert not rounded.verify().ok
    rounded.repair(copy)
    assert rounded.verify().ok
    assert rounded.resolve("gpt@1").level == "weights-bf16"
    assert torch.equal(rounded.load("gpt@1")["model"]["w"], _bf16(1))


def test_what_is_damaged_is_not_rounded(rounded: Store, path: Path) -> None:
    """A weight that cannot be read stops its version, which stays as it was."""
    rounded.run("gpt").save(_rounded_state(8), step=8)
    manifest = rounded.repo.manifests.load(rounded.resolve("gpt@3"))
    for pack in manifest.pieces.packs:
        (path / "packs" / pack[:2] / f"{pack}.pack").unlink()
    with pytest.raises(ckptstore.CkptStoreError, match=r"model\.w"):
        rounded.age(["gpt@3"], "weights-bf16")
    assert rounded.resolve("gpt@3").level == "full"


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
        with pytest.raises(errors.CommitConflictError):
            store.age(["gpt@1"], "weights-int8")
        assert store.age(["gpt@1"], "weights-int8") == []
        assert store.resolve("gpt@1").level == "weights-int8"
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0)
        assert store.verify().ok


def test_two_retentions_at_once(path: Path) -> None:
    """Threads with stores of their own carry out one policy: each step is done once."""
    with ckptstore.open(path) as store:
        store.run("gpt").save(_rounded_state(8), step=8)
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
    store = Store(create_on(faulty))
    run = store.run("gpt")
    for step in range(4):
        run.save(_rounded_state(step), step=step)
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
