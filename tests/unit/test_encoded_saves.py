"""Saves with encodings, from a state to a store and back: errors, sharing, fallbacks, refusals."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peaks import memory_below

import ckptstore
from ckptstore import errors
from ckptstore.checkpoint import encoding_trial, write
from ckptstore.checkpoint.content import TensorInfo, read_content
from ckptstore.checkpoint.encode import Draft, encode_draft
from ckptstore.checkpoint.encoding_trial import measure
from ckptstore.config import CODEC_CHOICES
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import EncodingRules
from ckptstore.events import Progress
from ckptstore.integrations.lightning_loop import LoopIO
from ckptstore.model import Version
from ckptstore.objects.index import KnownPieces
from ckptstore.saver.arena import Arena, sources_in
from ckptstore.saver.save_job import CancellationToken, write_job
from ckptstore.saver.staging import Staging, lay_out
from ckptstore.states.save import draft_of
from ckptstore.store import Store
from ckptstore.tensors.flatten import flatten

pytestmark = pytest.mark.short(sample=4)

RULES = {
    "*.exp_avg": "int8:rel_l2=0.02",
    "*.exp_avg_sq": "dynamic8:rel_l2=0.01",
    "model": "bf16:rel_l2=0.004",
}
ENGINES = ["blocking", "thread", "process"]
Saving = Callable[..., Version]


def _state(seed: int = 0, rows: int = 60) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * scale

    return {
        "model": {
            "weight": normal(rows, 300),
            "bias": normal(30),
            "table": normal(rows, 100).to(torch.bfloat16),
            "indices": torch.arange(5000),
        },
        "optimizer": {
            "state": {
                0: {
                    "step": torch.tensor(7.0),
                    "exp_avg": normal(rows, 300, scale=1e-3),
                    "exp_avg_sq": normal(rows, 300, scale=1e-6).square(),
                }
            },
            "param_groups": [{"lr": 1e-3}],
        },
        "rng": torch.get_rng_state(),
    }


def _moments(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["optimizer"]["state"][0]
    return found


def _error(given: torch.Tensor, back: torch.Tensor) -> float:
    assert (given.dtype, given.shape, given.stride()) == (back.dtype, back.shape, back.stride())
    off = (given.double() - back.double()).norm() / given.double().norm()
    return float(off)


@pytest.fixture(params=ENGINES)
def saving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Saving]]:
    """Return a store and a function that saves to run ``gpt``, one for each engine."""
    engine = request.param
    options = {} if engine == "blocking" else {"engine": engine}
    with ckptstore.open(tmp_path / "ckpts", create=True, **options) as opened:
        run = opened.run("gpt")

        def save(state: object, **wanted: Any) -> Version:  # noqa: ANN401 - as Run.save
            if engine == "blocking":
                return run.save(state, **wanted)
            return run.save_async(state, **wanted).result()

        yield opened, save


def _infos(store: Store, ref: str) -> dict[str, TensorInfo]:
    manifest = store.repo.manifests.load(store.resolve(ref))
    return {info.path: info for info in read_content(manifest).tensors()}


# --- there and back -------------------------------------------------------------------------------
def test_what_comes_back_is_as_near_as_recorded(saving: tuple[Store, Saving]) -> None:
    """Types and shapes are those that were given, errors those that the manifest tells."""
    store, save = saving
    state = _state()
    version = save(state, step=1, encodings=RULES)
    back = store.load("gpt@1")
    infos = _infos(store, "gpt@1")
    pairs = {
        "model.weight": (state["model"]["weight"], back["model"]["weight"], "bf16"),
        **{
            f"optimizer.state.0.{name}": (_moments(state)[name], _moments(back)[name], form)
            for name, form in (("exp_avg", "int8"), ("exp_avg_sq", "dynamic8"))
        },
    }
    for path, (given, restored, form) in pairs.items():
        info = infos[path]
        assert info.encoding == form
        assert _error(given, restored) == pytest.approx(info.rel_l2, rel=1e-4)
        assert float((given - restored).abs().max()) == pytest.approx(info.max_abs, rel=1e-4)
        assert info.rel_l2_bound is not None
        assert 0 < info.rel_l2 <= info.rel_l2_bound
        assert info.coded_bytes <= info.nbytes * (0.5 if form == "bf16" else 0.26)
    for path, info in infos.items():
        if path not in pairs:
            assert (info.encoding, info.max_abs, info.rel_l2) == ("lossless", 0.0, 0.0)
    assert torch.equal(back["model"]["table"], state["model"]["table"])
    assert torch.equal(back["model"]["bias"], state["model"]["bias"])
    assert torch.equal(back["rng"], state["rng"])
    assert _moments(back)["step"] == 7
    assert version.receipt["lossy_count"] == 3
    assert version.receipt["rel_l2_max"] == max(info.rel_l2 for info in infos.values())
    assert "kept_lossless" not in version.metadata


def test_bytes_are_counted(saving: tuple[Store, Saving]) -> None:
    """Sizes are those in memory; new is what the tensors bring; stored is less than half of it."""
    _, save = saving
    state = _state()
    version = save(state, step=1, encodings=RULES)
    moments = sum(tensor.nbytes for tensor in _moments(state).values())
    role = version.roles["optimizer"]
    assert (role.logical, role.new) == (moments, moments)
    assert role.stored < 0.27 * moments
    again = save(state, step=2, encodings=RULES)
    assert all(role.new == 0 for role in again.roles.values())
    assert again.roles["optimizer"].logical == moments


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_engines_make_the_same_version(engine: str, tmp_path: Path) -> None:
    """The content of a version does not tell which process or thread encoded it."""
    state = _state()
    with ckptstore.open(tmp_path / "one", create=True) as one:
        blocking = one.run("gpt").save(state, step=1, encodings=RULES)
    with ckptstore.open(tmp_path / "two", create=True, engine=engine) as two:
        background = two.run("gpt").save_async(state, step=1, encodings=RULES).result()
    assert background.content == blocking.content


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "int8", "dynamic8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_forms_and_types(store: Store, name: str, dtype: torch.dtype) -> None:
    """Every form takes every float type that it makes smaller, in any order of memory."""
    random = torch.Generator().manual_seed(1)
    plain = torch.randn(64, 80, 3, generator=random).to(dtype)
    state: dict[str, Any] = {
        "plain": plain,
        "turned": plain.permute(2, 0, 1),
        "gaps": torch.randn(90, 200, generator=random).to(dtype)[:, ::2],
        "array": plain.float().numpy(),
    }
    store.run("r").save(state, step=1, encodings={"*": name})
    back = store.load("r@1")
    assert np.allclose(back["array"], state["array"], rtol=0.2, atol=0.05)
    for key in ("plain", "turned", "gaps"):
        assert back[key].dtype == dtype
        off = (back[key].double() - state[key].double()).norm() / state[key].double().norm()
        assert off < 0.06
    assert back["turned"].stride() == state["turned"].stride()
    smaller = torch.empty(0, dtype=dtype).element_size() > (2 if name in ("bf16", "fp16") else 1)
    assert (_infos(store, "r@1")["plain"].encoding == name) is smaller


def test_loads_of_parts(store: Store) -> None:
    """Slices, single tensors and loads into existing memory give what a whole load gives."""
    state = _state(rows=3000)  # several pieces
    store.run("gpt").save(state, step=1, encodings=RULES)
    whole = store.load("gpt@1")
    lazy = store.version("gpt@1")
    for path, tensor in (
        ("model.weight", whole["model"]["weight"]),
        ("optimizer.state.0.exp_avg", _moments(whole)["exp_avg"]),
        ("optimizer.state.0.exp_avg_sq", _moments(whole)["exp_avg_sq"]),
    ):
        assert torch.equal(lazy[path][1501:1507, 3:9], tensor[1501:1507, 3:9])
        assert torch.equal(lazy[path][2999], tensor[2999])
    target = _state(seed=5, rows=3000)
    store.load("gpt@1", into=target)
    assert torch.equal(target["model"]["weight"], whole["model"]["weight"])


# --- sharing ------------------------------------------------------------------------------------
def test_equal_inputs_share_every_chunk(store: Store) -> None:
    """Another run that saves the same state has the same codes, whatever its codec."""
    state = _state()
    ids = []
    for number, codec in enumerate(CODEC_CHOICES):
        store.run(f"r{number}").save(state, step=1, encodings=RULES, codec=codec)
        manifest = store.repo.manifests.load(store.resolve(f"r{number}@1"))
        ids.append(manifest.pieces.ids[: manifest.first[-1]].tobytes())
    assert len(set(ids)) == 1


def test_an_unchanged_tensor_is_not_encoded_again(
    saving: tuple[Store, Saving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parent has in the same form is used again, by the digest of what was given."""
    store, save = saving
    state = _state()
    save(state, step=1, encodings=RULES)
    # Of this process: the child cannot be reached.
    monkeypatch.setattr(encoding_trial, "measure", None)
    again = save(state, step=2, encodings=RULES)
    assert again.receipt["codes_reused_count"] == 3
    assert again.receipt["new_bytes"] == 0
    assert again.content == store.resolve("gpt@1").content
    monkeypatch.setattr(encoding_trial, "measure", measure)
    state["model"]["weight"][5, 5] += 1
    third = save(state, step=3, encodings=RULES)
    assert third.receipt["codes_reused_count"] == 2


def test_what_was_loaded_is_saved_without_loss(store: Store) -> None:
    """A resumed state loses nothing more: weights that were rounded are what they round to."""
    run = store.run("gpt")
    run.save(_state(), step=1, encodings=RULES)
    once = store.load("gpt@1")
    run.save(once, step=2, encodings=RULES)
    twice = store.load("gpt@2")
    assert torch.equal(once["model"]["weight"], twice["model"]["weight"])
    assert torch.equal(_moments(once)["exp_avg"], _moments(twice)["exp_avg"])
    assert torch.equal(_moments(once)["exp_avg_sq"], _moments(twice)["exp_avg_sq"])
    assert _infos(store, "gpt@2")["model.weight"].rel_l2 == 0


def test_a_change_of_the_rules_is_a_change_of_the_form(store: Store) -> None:
    """Codes of another form, or over a tighter bound, are not used again."""
    state = _state()
    run = store.run("gpt")
    run.save(state, step=1, encodings={"*.exp_avg": "int8"})
    for step, text in enumerate(("int8:block=64", "dynamic8", "bf16", "lossless"), start=2):
        version = run.save(state, step=step, encodings={"*.exp_avg": text})
        assert "codes_reused_count" not in version.receipt
        assert _infos(store, f"gpt@{step}")["optimizer.state.0.exp_avg"].encoding == text
    run.save(state, step=7, encodings={"*.exp_avg": "int8"})
    version = run.save(state, step=8, encodings={"*.exp_avg": "int8:rel_l2=1e-6"})
    assert version.receipt["kept_lossless_count"] == 1


def test_codes_that_were_collected_are_made_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the parent's pieces may not be shared any more, they are encoded, to the same ids."""
    state = _state()
    run = store.run("gpt")
    first = run.save(state, step=1, encodings=RULES)
    monkeypatch.setattr(write, "KnownPieces", lambda *_, **__: KnownPieces([]))
    second = run.save(state, step=2, encodings=RULES)
    assert second.receipt["codes_reused_count"] == 3
    assert second.content == first.content
    assert second.receipt["stored_bytes"] > 0.9 * first.receipt["stored_bytes"]


def test_derived_weights_cost_nothing(saving: tuple[Store, Saving]) -> None:
    """bfloat16 weights beside their masters take no bytes, and come back bit for bit."""
    store, save = saving
    state = _state()
    state["low"] = {"weight": state["model"]["weight"].to(torch.bfloat16)}
    version = save(state, step=1)
    info = _infos(store, "gpt@1")["low.weight"]
    assert (info.encoding, info.derived_from) == ("derived", "model.weight")
    assert info.coded_bytes == 0
    assert version.receipt["derived_bytes"] == state["low"]["weight"].nbytes
    assert torch.equal(store.load("gpt@1")["low"]["weight"], state["low"]["weight"])


def test_a_lossy_master_gives_nothing_away(store: Store) -> None:
    """Weights are not derived from masters that are themselves rounded; equal codes are shared."""
    state = _state()
    low = state["model"]["weight"].to(torch.bfloat16)
    store.run("gpt").save({**state, "low": low}, step=1, encodings={"model": "bf16"})
    infos = _infos(store, "gpt@1")
    assert infos["low"].encoding == "lossless"
    assert infos["model.weight"].encoding == "bf16"
    back = store.load("gpt@1")
    assert torch.equal(back["low"], low)
    manifest = store.repo.manifests.load(store.resolve("gpt@1"))
    ids = manifest.pieces.ids[: manifest.first[-1]]
    assert len(np.unique(ids, axis=0)) < len(ids)


# --- fallbacks and refusals ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "encoding", "why"),
    [
        (lambda t: t, "bf16:rel_l2=0.0001", "relative error"),
        (lambda t: t, "int8:max_abs=1e-6", "element would differ"),
        (lambda t: t.masked_fill(t > 2, torch.nan), "int8", "NaN"),
        (lambda t: t.masked_fill(t > 2, torch.inf), "dynamic8", "NaN or an infinity"),
        (lambda t: t * 1e6, "fp16", "larger than the form"),
        (lambda t: t * 1e6, "fp8_e4m3fn", "larger than the form"),
        (lambda t: t * 1e-12, "fp16", "relative error"),
        (lambda t: t * 1e-40, "int8", "relative error"),
        (lambda t: t.masked_fill(t > 2, torch.inf), "fp8_e4m3fn", "larger|infinity"),
        (lambda t: t.masked_fill(t < -2, torch.nan).masked_fill(t > 3, 1e3), "fp8_e4m3fn", "larg"),
    ],
)
def test_what_does_not_fit_is_kept_as_it_is(
    saving: tuple[Store, Saving],
    change: Callable[[torch.Tensor], torch.Tensor],
    encoding: str,
    why: str,
) -> None:
    """Over a bound, or not to be held at all: stored lossless, noted with the version, logged."""
    store, save = saving
    tensor = change(torch.randn(100, 100, generator=torch.Generator().manual_seed(2)))
    version = save({"model": {"w": tensor}}, step=1, encodings={"*": encoding})
    back = store.load("gpt@1")["model"]["w"]
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))
    ((name, wanted, reason),) = version.metadata["kept_lossless"]
    assert (name, wanted) == ("model.w", str(Encoding.parse(encoding)))
    assert re.search(why, reason)
    assert version.receipt["kept_lossless_count"] == 1
    assert _infos(store, "gpt@1")["model.w"].encoding == "lossless"


def test_a_fallback_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """It is loud: a warning that names the tensor and the reason."""
    with caplog.at_level(logging.WARNING, "ckptstore"):
        store.run("r").save({"w": torch.randn(5000)}, step=1, encodings={"w": "bf16:rel_l2=1e-9"})
    assert "w is saved lossless, not as bf16:rel_l2=1e-09" in caplog.text


def test_non_finite_elements_survive_a_cast(store: Store) -> None:
    """NaN and infinities are no error of bfloat16, which has them; their neighbours are rounded."""
    tensor = torch.randn(5000)
    tensor[3], tensor[4], tensor[5], tensor[6] = torch.nan, torch.inf, -torch.inf, -0.0
    store.run("r").save({"w": tensor}, step=1, encodings={"w": "bf16"})
    back = store.load("r@1")["w"]
    assert torch.equal(back.isnan(), tensor.isnan())
    assert back[4:6].tolist() == [torch.inf, -torch.inf]
    assert torch.signbit(back[6])
    assert 0 < _infos(store, "r@1")["w"].rel_l2 < 0.004


def test_edges(store: Store) -> None:
    """Empty, 0-d and all-zero tensors, and those of other types, pass any rule."""
    state = {
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(1.5),
        "zeros": torch.zeros(100, 100),
        "minus": torch.full((100, 100), -0.0),
        "complex": torch.randn(80, 80, dtype=torch.complex64),
        "bools": torch.ones(9000, dtype=torch.bool),
    }
    for number, name in enumerate(("int8", "dynamic8", "bf16", "fp8_e5m2")):
        store.run("r").save(state, step=number, encodings={"*": name})
        back = store.load(f"r@{number}")
        for key, tensor in state.items():
            assert torch.equal(back[key], tensor)
        info = _infos(store, f"r@{number}")["zeros"]
        assert (info.encoding, info.max_abs) == (name, 0.0)


def test_second_moments_are_refused_before_anything_is_written(
    saving: tuple[Store, Saving],
) -> None:
    """By their name, in every engine at the call, with what to use instead."""
    store, save = saving
    with pytest.raises(errors.UnsafeEncodingError, match="exp_avg_sq") as caught:
        save(_state(), step=1, encodings={"role:optimizer": "int8"})
    assert "dynamic8" in caught.value.hint
    assert store.runs() == []
    version = save(
        _state(), step=1, encodings={"*.exp_avg_sq": "dynamic8", "role:optimizer": "int8"}
    )
    assert version.receipt["lossy_count"] == 2


def test_second_moments_by_another_name_are_kept(store: Store) -> None:
    """What an optimizer holds without a negative element is not stored in linear int8 either."""
    given = torch.rand(5000) * 1e-6
    state = {"optimizer": {"state": {0: {"curvature": given, "drift": torch.randn(5000)}}}}
    version = store.run("r").save(state, step=1, encodings={"role:optimizer": "int8"})
    ((name, _, why),) = version.metadata["kept_lossless"]
    assert name == "optimizer.state.0.curvature"
    assert "dynamic8" in why
    back = store.load("r@1")["optimizer"]["state"][0]
    assert torch.equal(back["curvature"], given)
    given[7] = torch.nan
    version = store.run("r").save(state, step=2, encodings={"role:optimizer": "fp16"})
    assert [name for name, _, _ in version.metadata["kept_lossless"]] == [name]


def test_all_places_of_a_tensor_decide(saving: tuple[Store, Saving]) -> None:
    """Memory with several names is lossy if the rules of all agree, and no view reads its bits."""
    store, save = saving
    w, packed, flat = torch.randn(5000), torch.randn(5000), torch.randn(10_000)
    state = {
        "model": {"w": w, "packed": packed, "flat": flat, "own": torch.randn(5000)},
        "bits": packed.view(torch.int32),
        "optimizer": {"master": w, "part": flat[:5000]},
    }
    rules = {"optimizer.part": "lossless", "role:weights": "bf16", "*": "bf16"}
    version = save(state, step=1, encodings=rules)
    back = store.load("gpt@1")
    assert torch.equal(back["bits"], packed.view(torch.int32))
    assert torch.equal(back["model"]["flat"], flat)
    assert torch.equal(back["model"]["w"], w.bfloat16().float())
    assert version.receipt["lossy_count"] == 2
    save(state, step=2, encodings={"role:optimizer": "lossless", "*": "bf16"})
    assert torch.equal(store.load("gpt@2")["model"]["w"], w)
    flat.abs_()
    state = {"optimizer": {"flat": flat, "state": {0: {"exp_avg_sq": flat[:5000]}}}}
    with pytest.raises(errors.UnsafeEncodingError, match="exp_avg_sq"):
        save(state, step=3, encodings={"role:optimizer": "int8"})


def test_a_positive_second_moment_stays_positive(store: Store) -> None:
    """The update of an optimizer divides by its root: no positive element comes back as 0."""
    given = 10.0 ** torch.linspace(-28, -2, 8192)[torch.randperm(8192)]
    state = {"optimizer": {"state": {0: {"exp_avg_sq": given}}}}
    store.run("r").save(state, step=1, encodings={"role:optimizer": "dynamic8"})
    assert (store.load("r@1")["optimizer"]["state"][0]["exp_avg_sq"] > 0).all()


@pytest.mark.parametrize("rules", [{"*": "bf17"}, {"role:x": "bf16"}, "bf16", {"*": 8}])
def test_rules_are_checked_before_anything_is_written(
    saving: tuple[Store, Saving],
    rules: Any,  # noqa: ANN401 - what users give
) -> None:
    """What is no rule is refused at the call."""
    store, save = saving
    with pytest.raises(errors.InvalidInputError):
        save(_state(), step=1, encodings=rules)
    with pytest.raises(errors.InvalidInputError):
        store.run("gpt", encodings=rules)
    assert store.runs() == []


# --- where rules come from ----------------------------------------------------------------------
def test_rules_of_a_save_of_an_object_and_of_the_policy(tmp_path: Path) -> None:
    """A save's own count before those of the object, and these before the stored ones."""
    state = {"model": {"w": torch.randn(5000)}}
    with ckptstore.open(tmp_path / "ckpts", create=True) as store:
        store.run("gpt").save(state, step=0)
        store.run("gpt").set_policy({"full": ["last 9"], "encodings": {"role:weights": "bf16"}})
        run = store.run("gpt", encodings={"*": "fp16"})
        store.run("gpt").save(state, step=1)
        run.save(state, step=2)
        run.save(state, step=3, encodings={"model": "int8"})
        run.save(state, step=4, encodings={})
        run.save_async(state, step=5).result()
        forms = [_infos(store, f"gpt@{step}")["model.w"].encoding for step in range(6)]
    assert forms == ["lossless", "bf16", "fp16", "int8", "lossless", "fp16"]


# --- a state that changes -----------------------------------------------------------------------
def _disturbed(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, change: Callable[[], object]
) -> None:
    """Have a state changed right before a function is called."""
    real = getattr(module, name)

    def late(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
        change()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, late)


@pytest.mark.parametrize("stage", ["measure", "write"])
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_change_while_it_is_encoded_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, stage: str, moment: str
) -> None:
    """Between looking and measuring, or measuring and writing: the tensor is named, and no version.

    A version that had other codes than its recipe says would not load.
    """
    state = _state(rows=3000)
    places = {"measure": (encoding_trial, "measure"), "write": (write, "write_pieces")}
    tensor = _moments(state)[moment]
    _disturbed(monkeypatch, *places[stage], lambda: tensor[2500].mul_(3))
    with pytest.raises(errors.TornStateError, match=r"optimizer\.state\.0\.exp_avg"):
        store.run("gpt").save(state, step=1, encodings=RULES)
    assert store.runs() == []


def test_a_master_that_changes_under_its_derived_weights_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master that is written must be the one that the weights were compared with."""
    state = _state(rows=3000)
    state["low"] = state["model"]["weight"].to(torch.bfloat16)
    _disturbed(monkeypatch, write, "write_pieces", lambda: state["model"]["weight"][2000].mul_(3))
    with pytest.raises(errors.TornStateError, match=r"model\.weight"):
        store.run("gpt").save(state, step=1)
    assert store.runs() == []


def test_an_arena_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged is compared as it is read to be measured, too."""
    with ckptstore.open(tmp_path / "ckpts", create=True, engine="thread") as store:
        run = store.run("gpt")
        run.save(_state(), step=0)

        def scribble(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as write_job
            np.frombuffer(args[2], np.uint8)[: 60 * 300 * 4] ^= 1
            return write_job(*args, **kwargs)

        monkeypatch.setattr("ckptstore.saver.save_job.write_job", scribble)
        pending = run.save_async(_state(seed=3), step=1, encodings=RULES)
        with pytest.raises(errors.TornStateError, match=r"model\.weight"):
            pending.result()
        assert len(run.versions()) == 1


def test_a_save_is_cancelled_while_it_measures() -> None:
    """Whoever cancels does not wait until everything is measured."""
    flat = flatten(_state())
    draft = draft_of(flat, {}, EncodingRules(RULES))
    layout = lay_out(flat.tensors, 1 << 22)
    arena = Arena(layout.size_bytes, shared=False)
    staging = Staging(flat.tensors, layout, arena, later=False)
    staging.begin()
    staging.copy()
    gate = CancellationToken()
    gate.cancel()
    staged = sources_in(arena.view, staging.tensors, staging.digests(), gate.check)
    with pytest.raises(errors.OperationCancelledError):
        encode_draft(replace(draft, sources=staged), parent=None, chunk_bytes=1 << 22, workers=2)


# --- memory -------------------------------------------------------------------------------------
def test_memory_does_not_grow_with_the_state() -> None:
    """A tensor of 64 MiB is measured and encoded within 8 MiB a thread."""
    tensor = torch.randn(1 << 24, generator=torch.Generator().manual_seed(4))
    state = {"optimizer": {"state": {0: {"exp_avg": tensor}}}}
    draft = draft_of(flatten(state), {}, EncodingRules({"*": "int8"}))
    out = memoryview(bytearray(1 << 22))
    with memory_below(8 << 20):
        encoded = encode_draft(draft, parent=None, chunk_bytes=1 << 22, workers=1)
        for start in range(0, 1 << 24, 1 << 22):
            encoded.sources[1].payload.copy_into(start, out)


def test_progress_reaches_its_end(store: Store) -> None:
    """The bytes that are told are those that are written, all of them in the end."""
    seen: list[Progress] = []
    store.run("r").save(_state(), step=1, encodings=RULES, progress=seen.append)
    assert seen[-1].done == seen[-1].total


def test_contents_without_wishes_are_not_touched() -> None:
    """A save without rules and pairs is what it was before there were any."""
    draft = draft_of(flatten({"a": torch.ones(9)}), {}, EncodingRules())
    encoded = encode_draft(draft, parent=None, chunk_bytes=1 << 22, workers=1)
    assert encoded is draft
    assert encoded.numbers == {}
    assert isinstance(replace(draft), Draft)


# --- integrations -------------------------------------------------------------------------------
@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_of_lightning_take_rules(store: Store, background: bool) -> None:
    """Those of the plugin hold for each, those of one save before them; wrong ones are told."""
    checkpoint = {"state_dict": {"w": torch.randn(5000)}, "global_step": 3}
    plugin = LoopIO(store, "gpt", encodings={"state_dict": "bf16"}, background=background)
    plugin.save_checkpoint(checkpoint, "a.ckpt")
    wanted = {"encodings": {"*": "int8"}}
    plugin.save_checkpoint({**checkpoint, "global_step": 4}, "b.ckpt", storage_options=wanted)
    plugin.teardown()
    forms = [_infos(store, f"gpt@{step}")["state_dict.w"].encoding for step in (3, 4)]
    assert forms == ["bf16", "int8"]
    with pytest.raises(errors.InvalidInputError):
        LoopIO(store, "gpt", encodings={"*": "bf17"})
