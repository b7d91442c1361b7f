"""Ageing with lossy steps: what comes back, with which error, and what it costs."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.checkpoint import stored_sources
from ckptstore.checkpoint.content import read_content
from ckptstore.checkpoint.ranges import read_ranges
from ckptstore.checkpoint.stored_sources import StoredBytes
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.format.manifest import Manifest
from ckptstore.format.tables import Recipe


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _state(seed: int) -> dict[str, Any]:
    """Return weights of two sizes and an optimizer; tied, viewed and small ones among them."""
    embed = _random((300, 100), seed)
    return {
        "model": {
            "embed": embed, "tied": embed, "view": embed[10:20],
            "double": _random((80, 70), seed + 100).double(), "norm": torch.linspace(0.5, 1.5, 100),
            "count": torch.tensor(seed),
        },
        "optimizer": {"m": _random((300, 100), seed + 200)},
        "epoch": seed,
    }  # fmt: skip


def _mixed(seed: int) -> dict[str, Any]:
    """Return bfloat16 weights and their float32 masters, as mixed precision keeps them."""
    masters = {name: _random((200, 150), seed * 10 + n) for n, name in enumerate("abc")}
    return {
        "model": {name: master.bfloat16() for name, master in masters.items()},
        "optimizer": {"masters": masters, "m": _random((200, 150), seed + 300)},
    }


def _manifest(store: ckptstore.Store, ref: str) -> Manifest:
    return store.repo.manifests.load(store.resolve(ref))


def _recipes(store: ckptstore.Store, ref: str) -> dict[str, Recipe]:
    content = read_content(_manifest(store, ref))
    records = content.manifest.tensors
    labels = {leaf.index: content.labels[leaf.index] for leaf in content.leaves}
    return {label: records[n].recipe for n, label in labels.items() if records[n].recipe}  # type: ignore[misc]


def _errors(state: dict[str, Any], loaded: dict[str, Any], name: str) -> tuple[float, float]:
    was, now = state["model"][name].double(), loaded["model"][name].double()
    return float((now - was).abs().max()), float((now - was).norm() / was.norm())


def _pack_bytes(store_path: Path) -> int:
    return sum(path.stat().st_size for path in (store_path / "packs").rglob("*.pack"))


def test_bfloat16_weights_load_in_their_own_type(store: ckptstore.Store) -> None:
    """What comes back is torch's own rounding, in the dtype that was saved; ties and views hold."""
    run = store.run("gpt")
    state = _state(1)
    run.save(state, step=1)
    run.save(_state(2), step=2)
    (after,) = store.age(["gpt@1"], "weights-bf16")
    assert after.level == "weights-bf16"
    assert list(after.roles) == ["weights"]
    loaded = run.load(1)
    assert list(loaded) == ["model", "epoch"]
    model = loaded["model"]
    for name in ("embed", "double"):
        assert model[name].dtype == state["model"][name].dtype
        rounded = state["model"][name].bfloat16().to(state["model"][name].dtype)
        assert torch.equal(model[name], rounded)
    assert model["tied"].data_ptr() == model["embed"].data_ptr()
    assert torch.equal(model["view"], model["embed"][10:20])
    assert torch.equal(model["norm"], state["model"]["norm"]), "small tensors stay as they are"
    assert (model["count"].item(), loaded["epoch"]) == (1, 1)
    assert store.version("gpt@1")["model.embed"][3:5].tolist() == model["embed"][3:5].tolist()
    assert store.verify().ok


@pytest.mark.parametrize("level", ["weights-bf16", "weights-int8"])
def test_recorded_errors_are_those_that_there_are(store: ckptstore.Store, level: str) -> None:
    """Of a single step the recorded error is the measured one, to its six digits."""
    run = store.run("gpt")
    state = _state(1)
    run.save(state, step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], level)  # type: ignore[arg-type]
    loaded = run.load(1)
    recipes = _recipes(store, "gpt@1")
    assert set(recipes) == {"model.embed", "model.double"}
    for name in ("embed", "double"):
        recipe = recipes[f"model.{name}"]
        max_abs, rel_l2 = _errors(state, loaded, name)
        assert max_abs <= recipe.max_abs <= max_abs * 1.00002
        assert rel_l2 <= recipe.rel_l2 <= rel_l2 * 1.00002
        assert not recipe.exact


def test_errors_of_steps_add_up_to_a_bound(store: ckptstore.Store) -> None:
    """After bf16 and then int8 the record bounds the distance to what was saved, not to bf16."""
    run = store.run("gpt")
    state = _state(1)
    run.save(state, step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights-bf16")
    first = _recipes(store, "gpt@1")
    store.age(["gpt@1"], "weights-int8")
    second = _recipes(store, "gpt@1")
    loaded = run.load(1)
    for name in ("embed", "double"):
        max_abs, rel_l2 = _errors(state, loaded, name)
        label = f"model.{name}"
        assert max_abs <= second[label].max_abs <= 1.5 * max_abs
        assert rel_l2 <= second[label].rel_l2 <= 1.5 * rel_l2
        assert second[label].rel_l2 > first[label].rel_l2
        assert second[label].given == first[label].given, "what was saved, not what was left of it"
    assert store.verify().ok


def test_each_level_takes_fewer_bytes(store: ckptstore.Store, tmp_path: Path) -> None:
    """A half of the weights, then a quarter; the report says what a collection then frees."""
    run = store.run("gpt", metrics={"loss": "min"})
    for step in range(4):
        run.save(_state(step), step=step)
    sizes = []
    for level in ("weights", "weights-bf16", "weights-int8"):
        report = run.retain({"full": "last 1", level: "all"}, dry_run=True)
        done = run.retain({"full": "last 1", level: "all"})
        assert report.reclaimable_bytes == done.reclaimable_bytes
        assert report.roundings == done.roundings
        for _ in range(2):
            store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
        sizes.append((report.reclaimable_bytes, _pack_bytes(tmp_path / "store")))
        assert store.verify().ok
    for (_, before), (freed, after) in itertools.pairwise(sizes):
        assert 0.8 * freed < before - after < 1.2 * freed
    head, weights = 4 * (300 * 100 * 2 + 80 * 70 * 2), 4 * (300 * 100 + 80 * 70 * 2)
    assert sizes[-1][1] < head + 3 * weights * 0.30


def test_a_plan_made_again_changes_nothing(store: ckptstore.Store) -> None:
    """Levels of a policy follow each other; what was carried out is stable."""
    run = store.run("gpt")
    for step in range(6):
        run.save(_state(step), step=step)
    policy = {
        "full": "last 1", "weights": "last 2", "weights-bf16": "last 3", "weights-int8": "last 4",
        "record": "all",
    }  # fmt: skip
    run.set_policy(policy)
    assert len(run.retain().changes) == 5
    levels = {version.step: version.level for version in run.versions()}
    assert levels == {
        0: "record", 1: "record", 2: "weights-int8", 3: "weights-bf16", 4: "weights", 5: "full"
    }  # fmt: skip
    again = run.retain()
    assert (again.changes, again.commits) == ((), ())
    run.save(_state(6), step=6)
    run.retain()
    levels = {version.step: version.level for version in run.versions()}
    assert levels == {0: "record", 1: "record", 2: "record", 3: "weights-int8", 4: "weights-bf16",
                      5: "weights", 6: "full"}  # fmt: skip
    assert store.verify().ok


def test_less_never_becomes_more(store: ckptstore.Store) -> None:
    """A version in 8 bits stays so, whatever level is asked for above."""
    run = store.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights-int8")
    assert store.age(["gpt@1"], "weights-int8") == []
    assert store.age(["gpt@1"], "weights-bf16") == []
    assert store.age(["gpt@1"], "weights") == []
    assert run.retain({"full": "last 1", "weights": "all"}).changes == ()
    assert store.age(["gpt@1"], "record")[0].level == "record"


def test_a_bound_that_is_passed_keeps_the_level_above(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensor by tensor, loudly: int8, else bf16, else as it was."""
    run = store.run("gpt")
    state = _state(1)
    state["model"]["spiky"] = _random((100, 100), 5)
    state["model"]["spiky"][:, 0] = 1000.0  # one outlier a block: 8 bits hold nothing else
    state["model"]["huge"] = _random((100, 100), 6) * 1e9
    run.save(state, step=1)
    run.save(_state(2), step=2)
    lossy = ["int8:rel_l2=0.02,max_abs=1", "bf16:max_abs=1e3"]
    policy = {"full": "last 1", "weights-int8": "all", "lossy": lossy}
    with caplog.at_level(logging.WARNING, "ckptstore"):
        report = run.retain(policy)
    (rounding,) = report.roundings.values()
    found = {one.path: (one.form, bool(one.problem)) for one in rounding.tensors}
    assert found == {
        "model.embed": ("int8, blocks of 256", False),
        "model.double": ("int8, blocks of 256", False),
        "model.spiky": ("bf16", True),
        "model.huge": ("unchanged", True),
    }
    assert "model.spiky (int8: " in caplog.text
    assert "model.huge" in caplog.text
    assert run.resolve(1).level == "weights-int8"
    loaded = run.load(1)["model"]
    assert torch.equal(loaded["huge"], state["model"]["huge"])
    assert torch.equal(loaded["spiky"], state["model"]["spiky"].bfloat16().float())
    assert _recipes(store, "gpt@1")["model.embed"].rel_l2_bound == 0.02
    assert store.verify().ok


def test_bounds_are_of_the_distance_to_what_was_saved(store: ckptstore.Store) -> None:
    """What bf16 took counts when int8 is tried: the sum has to be within."""
    run = store.run("gpt")
    for step in (1, 2, 3):
        run.save(_state(1), step=step)
    store.age(["gpt@1"], "weights-int8")
    alone = _recipes(store, "gpt@1")["model.embed"].rel_l2
    store.age(["gpt@2"], "weights-bf16")
    (after,) = store.age(["gpt@2"], "weights-int8", lossy=f"int8:rel_l2={alone * 1.01}")
    assert after.level == "weights-int8"
    assert _recipes(store, "gpt@2")["model.embed"].kind == "cast", "it was kept in bf16"


def test_what_no_form_can_hold_stays(store: ckptstore.Store) -> None:
    """NaN and infinities survive: in bf16 they are held, in 8 bits the tensor falls back."""
    run = store.run("gpt")
    state = _state(1)
    odd = _random((100, 100), 3)
    odd[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    state["model"]["odd"] = odd
    run.save(state, step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights-int8")
    loaded = run.load(1)["model"]["odd"]
    assert torch.isnan(loaded[0, 0])
    assert loaded[0, 1:3].tolist() == [math.inf, -math.inf]
    assert torch.equal(loaded[1:], odd[1:].bfloat16().float())


def test_weights_whose_bits_a_view_reads_stay(store: ckptstore.Store) -> None:
    """A view as integers would come back as other numbers; a tensor that follows stays, too."""
    run = store.run("gpt")
    state = _mixed(1)["model"] | _mixed(1)["optimizer"]["masters"]
    state = {"model": {"low": state["a"].bfloat16(), "w": state["a"], "b": state["b"]}}
    state["model"]["bits"] = state["model"]["low"].view(torch.int16)
    state["model"]["packed"] = state["model"]["b"].view(torch.int32)
    for step in (1, 2):
        run.save(state, step=step)
    store.age(["gpt@1"], "weights-int8")
    back = run.load(1)["model"]
    assert all(torch.equal(back[name], state["model"][name]) for name in ("bits", "packed", "low"))
    assert not torch.equal(back["w"], state["model"]["w"])


def test_weights_that_have_so_few_bits_are_not_touched(store: ckptstore.Store) -> None:
    """Of weights that are bfloat16 nothing is written at bf16; at int8 they are rounded."""
    run = store.run("gpt")
    state = {"model": {"w": _random((200, 100), 1).bfloat16()}, "optimizer": {"m": torch.ones(9)}}
    run.save(state, step=1)
    run.save(_state(2), step=2)
    report = run.retain({"full": "last 1", "weights-bf16": "all"})
    (rounding,) = report.roundings.values()
    assert (rounding.tensors, rounding.written_bytes) == ((), 0)
    assert run.resolve(1).level == "weights-bf16"
    assert torch.equal(run.load(1)["model"]["w"], state["model"]["w"])
    store.age(["gpt@1"], "weights-int8")
    assert run.load(1)["model"]["w"].dtype == torch.bfloat16
    assert store.verify().ok


def test_weights_whose_masters_go_are_written(store: ckptstore.Store, tmp_path: Path) -> None:
    """Derived weights cost nothing beside their masters; without these they are stored."""
    run = store.run("gpt")
    for step in (1, 2):
        run.save(_mixed(step), step=step)
    assert set(_recipes(store, "gpt@1")) == {"model.a", "model.b", "model.c"}
    (after,) = store.age(["gpt@1"], "weights")
    assert _recipes(store, "gpt@1") == {}
    assert len(_manifest(store, "gpt@1").tensors) == 3, "no master is left, hidden or not"
    assert list(after.roles) == ["weights"]
    assert 0 < after.roles["weights"].stored <= 3 * (200 * 150 * 2 + 64)
    loaded = run.load(1)
    for name, weight in _mixed(1)["model"].items():
        assert torch.equal(loaded["model"][name], weight)
    before = _pack_bytes(tmp_path / "store")
    for _ in range(2):
        store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    assert before - _pack_bytes(tmp_path / "store") > 4 * 200 * 150 * 4 * 0.7
    assert store.verify().ok
    assert torch.equal(run.load(2)["model"]["a"], _mixed(2)["model"]["a"])


def test_weights_whose_masters_stay_cost_nothing(store: ckptstore.Store) -> None:
    """A recipe whose source is a weight too is kept; rounded, both are the same bytes."""
    run = store.run("gpt")
    wide = _random((200, 150), 1)
    state = {"model": {"wide": wide, "low": wide.bfloat16()}, "optimizer": {"m": torch.ones(9)}}
    run.save(state, step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights")
    assert set(_recipes(store, "gpt@1")) == {"model.low"}
    report = run.retain({"full": "last 1", "weights-bf16": "all"})
    (rounding,) = report.roundings.values()
    assert rounding.written_bytes <= 200 * 150 * 2 + 64, "one copy in bfloat16 for both"
    loaded = run.load(1)["model"]
    assert torch.equal(loaded["low"], state["model"]["low"])
    assert torch.equal(loaded["wide"], state["model"]["low"].float())
    assert store.verify().ok


def test_frozen_weights_are_rounded_once(store: ckptstore.Store) -> None:
    """Versions that share weights share the rounded ones: in one call, and from call to call."""
    run = store.run("lora")
    frozen = _random((400, 300), 1)

    def state(step: int) -> dict[str, Any]:
        return {
            "model": {"base": frozen, "adapter": _random((100, 50), 10 + step)},
            "optimizer": {"m": _random((100, 50), 50 + step)},
        }

    for step in range(5):
        run.save(state(step), step=step)
    report = run.retain({"full": "last 3", "weights-bf16": "all"})
    first, second = (report.roundings[run.resolve(step).id].written_bytes for step in (0, 1))
    assert first > 400 * 300
    assert second < 100 * 50 * 2 + 200
    report = run.retain({"full": "last 1", "weights-bf16": "all"}, dry_run=True)
    assert all(r.written_bytes < 100 * 50 * 2 + 200 for r in report.roundings.values())
    run.retain({"full": "last 1", "weights-bf16": "all"})
    shared = {_manifest(store, f"lora@{step}").pieces.ids[0].tobytes() for step in range(4)}
    assert len(shared) == 1
    assert store.verify().ok


def test_equal_weights_have_equal_content_when_rounded(store: ckptstore.Store) -> None:
    """Rounding is deterministic: two versions with the same weights are the same afterwards."""
    run = store.run("gpt")
    other = _state(1)
    other["optimizer"]["m"] += 1
    first, second = run.save(_state(1), step=1), run.save(other, step=2)
    run.save(_state(2), step=3)
    assert first.content != second.content
    for level in ("weights-bf16", "weights-int8"):
        first, second = store.age(["gpt@1", "gpt@2"], level)
        assert first.content == second.content


def test_encoded_saves_are_aged(store: ckptstore.Store) -> None:
    """Weights that were saved in bf16 by a rule are in bf16 already, and have an error already."""
    run = store.run("gpt")
    state = _state(1)
    run.save(state, step=1, encodings={"model.*": "bf16", "role:optimizer": "dynamic8"})
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights")
    recipes = _recipes(store, "gpt@1")
    assert recipes["model.embed"].kind == "cast"
    report = run.retain({"full": "last 1", "weights-bf16": "all"})
    assert next(iter(report.roundings.values())).written_bytes == 0
    store.age(["gpt@1"], "weights-int8")
    after = _recipes(store, "gpt@1")["model.embed"]
    assert (after.kind, after.given) == ("scaled", recipes["model.embed"].given)
    assert after.rel_l2 > recipes["model.embed"].rel_l2
    assert _errors(state, run.load(1), "embed")[1] <= after.rel_l2
    assert store.verify().ok


def test_deltas_are_aged(store: ckptstore.Store) -> None:
    """What stays keeps its base, though the base's version goes; what is rounded has none."""
    run = store.run("gpt")
    states = [_state(1) for _ in range(3)]
    for step, state in enumerate(states):
        state["model"]["embed"] = states[0]["model"]["embed"] + step * 1e-6
        state["model"]["tied"] = state["model"]["embed"]
        state["model"]["view"] = state["model"]["embed"][10:20]
        run.save(state, step=step, codec="delta")
    assert _manifest(store, "gpt@1").pieces.base is not None
    store.age(["gpt@1"], "weights")
    assert _manifest(store, "gpt@1").pieces.base is not None
    store.remove(["gpt@0"])
    store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    assert torch.equal(run.load(1)["model"]["embed"], states[1]["model"]["embed"])
    store.age(["gpt@1"], "weights-bf16")
    assert _manifest(store, "gpt@1").pieces.base is None
    store.gc(grace_s=0, orphan_age_s=0, repack_below=0.99)
    assert torch.equal(
        run.load(1)["model"]["embed"], states[1]["model"]["embed"].bfloat16().float()
    )
    assert store.verify().ok


def test_large_tensors_are_read_in_windows(tmp_path: Path) -> None:
    """A tensor beyond the memory for one is read window by window, more than once: same bits."""
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=64 * 1024) as store:
        weight = _random((1000, 500), 1)
        store.run("gpt").save({"model": {"w": weight}}, step=1)
        store.run("gpt").save({"model": {"w": weight + 1}}, step=2)
    with ckptstore.open(tmp_path / "s", host_bytes=2 * 1024 * 1024, workers=1) as store:
        store.age(["gpt@1"], "weights-bf16")
        assert torch.equal(store.load("gpt@1")["model"]["w"], weight.bfloat16().float())
        store.age(["gpt@1"], "weights-int8")
        recipe = _recipes(store, "gpt@1")["model.w"]
        loaded = store.load("gpt@1")
        assert _errors({"model": {"w": weight}}, loaded, "w")[0] <= recipe.max_abs
        assert store.verify().ok


def test_a_dry_run_measures_or_estimates(store: ckptstore.Store) -> None:
    """Errors and bytes before anything is done; with quick nothing is read."""
    run = store.run("gpt")
    for step in (1, 2, 3):
        run.save(_state(step), step=step)
    policy = {"full": "last 1", "weights-int8": "all"}
    before = store.repo.refresh().number
    report = run.retain(policy, dry_run=True)
    quick = run.retain(policy, dry_run=True, quick=True)
    assert store.repo.refresh().number == before
    assert quick.roundings == {}
    assert len(report.roundings) == 2
    assert all(0 < r.rel_l2 < 0.02 and r.max_abs > 0 for r in report.roundings.values())
    assert 0.7 < quick.reclaimable_bytes / report.reclaimable_bytes < 1.3
    assert store.resolve("gpt@1").level == "full"
    assert sum(1 for _ in (store.repo.backend.list("packs/"))) == 3


def test_what_does_not_fit_the_level_is_refused(store: ckptstore.Store) -> None:
    """An encoding of another level, one that is none, and versions that have no weights."""
    run = store.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    with pytest.raises(InvalidInputError, match="not what the level weights-bf16"):
        store.age(["gpt@1"], "weights-bf16", lossy="int8:rel_l2=0.1")
    with pytest.raises(InvalidInputError, match="not what the level record"):
        store.age(["gpt@1"], "record", lossy="bf16")
    with pytest.raises(InvalidInputError, match="fp8_e5m2 is not for ageing"):
        store.age(["gpt@1"], "weights-int8", lossy="fp8_e5m2")
    odd = store.run("odd")
    for step in (1, 2):
        odd.save({"things": {"a": torch.ones(3)}}, step=step, roles={"*": "extra"})
    with pytest.raises(PolicyError, match="no tensors of role weights"):
        store.age(["odd@1"], "weights-int8")
    plan = store.retain({"full": "last 1", "weights-bf16": "all"}, run="odd", dry_run=True)
    assert "no tensors of role weights" in plan.plans[0].decisions[0].reasons


def test_second_moments_among_the_weights_are_not_made_zero(store: ckptstore.Store) -> None:
    """Whoever calls an optimizer's state weights does not lose its small numbers to int8."""
    run = store.run("gpt")
    state = {"model": {"w": _random((100, 100), 1), "exp_avg_sq": _random((100, 100), 2) ** 2}}
    run.save(state, step=1)
    run.save(_state(2), step=2)
    store.age(["gpt@1"], "weights-int8")
    kinds = {label: recipe.kind for label, recipe in _recipes(store, "gpt@1").items()}
    assert kinds == {"model.w": "scaled", "model.exp_avg_sq": "cast"}


@pytest.mark.parametrize("engine", ["none", "thread", "process"])
def test_derived_weights_are_a_choice(tmp_path: Path, engine: str) -> None:
    """By default weights cost nothing beside their masters, with each engine; or else they do."""
    options = {} if engine == "none" else {"engine": engine}
    with ckptstore.open(tmp_path / "store", create=True, **options) as store:  # type: ignore[arg-type]
        run = store.run("gpt")
        for step, derive in ((1, True), (2, False)):
            state = _mixed(step)
            if engine == "none":
                run.save(state, step=step, derive=derive)
            else:
                run.save_async(state, step=step, derive=derive).result()
            assert bool(_recipes(store, f"gpt@{step}")) == derive
            stored = run.resolve(step).roles.get("weights")
            assert stored is not None
            assert (stored.stored == 0) == derive
            loaded = run.load(step)["model"]
            assert all(torch.equal(loaded[name], w) for name, w in state["model"].items())


def test_equal_copies_cost_nothing_without_a_recipe(store: ckptstore.Store) -> None:
    """An average that has not moved, and tied buffers that are copies: the pieces are shared."""
    weight = _random((300, 100), 1)
    state = {"model": {"w": weight}, "ema": {"w": weight.clone()}, "tied": weight.clone()}
    version = store.run("gpt").save(state, step=1)
    assert sum(part.new for part in version.roles.values()) == weight.nbytes
    assert _recipes(store, "gpt@1") == {}
    assert torch.equal(store.load("gpt@1")["ema"]["w"], weight)


def test_windows_of_a_large_tensor_stay_few_and_go_with_it(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before a window is read; all are freed with their tensor, by no collector."""
    store.run("r").save({"model": {"w": torch.arange(6 << 20, dtype=torch.int32)}}, step=1)
    content = read_content(_manifest(store, "r@1"))
    kept: list[int] = []

    def reading(*args: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        kept.append(len(stored[0]._kept))
        read_ranges(*args, **options)

    monkeypatch.setattr(stored_sources, "read_ranges", reading)
    stored = [StoredBytes(store.repo, content, 0, window_bytes=store.repo.chunk_bytes)]
    for start in range(0, 24 << 20, 1 << 20):
        stored[0].copy_into(start, memoryview(bytearray(1 << 20)))
    assert kept == [0, 1, 2, 2, 2, 2]
    gone = weakref.ref(stored[0])
    gc.disable()
    try:
        stored.clear()
        assert gone() is None
    finally:
        gc.enable()
