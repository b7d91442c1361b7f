"""Trainings whose states are divided among ranks: one version, and resumes at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rankkit import trainers
from rankkit.groups import Group, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptstore
from ckptstore.integrations.transformers import export_pretrained
from ckptstore.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("training", "kind"),
    [
        (trainers.accelerate, "fsdp2"), (trainers.accelerate, "fsdp2 full"),
        (trainers.accelerate, "fsdp1"), (trainers.accelerate, "fsdp1 full"),
        (trainers.accelerate, "hsdp"), (trainers.accelerate, "tensor parallel"),
        (trainers.trainer, "fsdp2"), (trainers.trainer, "fsdp2 full"), (trainers.trainer, "fsdp1"),
        (trainers.lightning, "parts"), (trainers.lightning, "full"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip
def test_a_killed_rank_and_a_resume_at_any_size(tmp_path: Path, training: Any, kind: str) -> None:
    """After a kill -9 in a save all sizes resume with the same bits; the same size, all losses."""
    url, world = str(tmp_path / "ckpts"), 4 if kind == "hsdp" else 2
    ckptstore.open(url, create=True).close()
    whole = run_ranks(training, world, url, kind, {"epochs": 4})

    killed = {"epochs": 4, "saves": True, "dies": 3}
    with Group(training, world, url, kind, killed) as group:
        group.finish()
        assert ("gone", None) in group.ended
    with ckptstore.open(url) as store:
        assert len(store.versions("gpt")) == 2

    for ranks in (1, 2, 4):
        resumed = run_ranks(training, ranks, url, kind, {"epochs": 4, "resume": True})
        assert resumed[0][1][0] == whole[0][1][2]
        if ranks == world:
            for mine, theirs in zip(resumed, whole, strict=True):
                assert mine[0] == theirs[0][-len(mine[0]) :]
                assert mine[1][-1] == theirs[1][-1]


def _weights(store: Store) -> dict[str, torch.Tensor]:
    state = store.load("gpt")
    found: dict[str, torch.Tensor] = state["models"][0] if "models" in state else {}
    return found or state.get("model") or state["state_dict"]


ADAPTERS = ("lora_", "modules_to_save")


TRAINED = (
    (trainers.accelerate, "fsdp2 lora"), (trainers.accelerate, "fsdp2 full lora"),
    (trainers.accelerate, "fsdp1 lora"), (trainers.trainer, "fsdp2 lora"),
    (trainers.trainer, "fsdp2 full lora"), (trainers.lightning, "parts frozen"),
    (trainers.lightning, "full frozen"),
)  # fmt: skip


def test_what_is_trained_alone_resumes_at_any_size(tmp_path: Path) -> None:
    """A version holds adapters and not the base model; it resumes with the same bits."""

    def run(ranks: int, **plan: Any) -> list[Any]:
        tasks = [
            (train, (str(tmp_path / str(number)), kind, plan))
            for number, (train, kind) in enumerate(TRAINED)
        ]
        return run_ranks(trainers.several, ranks, tasks)[0]  # type: ignore[no-any-return]

    for number in range(len(TRAINED)):
        ckptstore.open(tmp_path / str(number), create=True).close()
    before = run(2, epochs=1, saves=True)
    for ranks in (1, 4):
        after = run(ranks, epochs=2, resume=True)
        for mine, saved in zip(after, before, strict=True):
            assert mine[1][0] == saved[1][1]

    for number, (training, kind) in enumerate(TRAINED):
        with ckptstore.open(tmp_path / str(number)) as store:
            weights = _weights(store)
            if "frozen" in kind:
                assert set(weights) == {"net.2.weight", "net.2.bias"}
                continue
            assert all(any(part in name for part in ADAPTERS) for name in weights)
            if training is trainers.accelerate:  # inactive adapters too
                assert sum(".other." in name for name in weights) == len(weights) // 2
            else:
                folder = export_pretrained(store, "gpt", tmp_path / f"exported {kind}")
                exported = load_file(folder / "adapter_model.safetensors")
                assert {one.numpy().tobytes() for one in exported.values()} == {
                    one.numpy().tobytes() for one in weights.values()
                }


PAIRS = (
    (trainers.accelerate, "fsdp2 compiled", "fsdp2"),
    (trainers.accelerate, "fsdp2", "fsdp2 full compiled"),
    (trainers.accelerate, "ddp compiled", "fsdp2 compiled"),
    (trainers.accelerate, "fsdp2 compiled", "ddp"),
    (trainers.accelerate, "ddp", "ddp compiled"),
    (trainers.accelerate, "fsdp2 tied", "fsdp2 full tied"),
    (trainers.accelerate, "fsdp2 full tied", "ddp tied"),
    (trainers.accelerate, "ddp tied", "fsdp2 tied"),
    (trainers.accelerate, "fsdp2 lora", "ddp lora"),
    (trainers.accelerate, "ddp lora", "fsdp2 full lora"),
    (trainers.accelerate, "fsdp1 compiled", "fsdp2"),
    (trainers.accelerate, "fsdp2", "fsdp1"),
    (trainers.accelerate, "fsdp1 full", "ddp"),
    (trainers.accelerate, "ddp", "fsdp1 full compiled"),
    (trainers.accelerate, "fsdp1 tied", "fsdp1 full tied"),
    (trainers.trainer, "fsdp1", "fsdp2 full"),
    (trainers.trainer, "fsdp2 compiled", "fsdp2"),
    (trainers.trainer, "fsdp2", "fsdp2 full compiled"),
    (trainers.lightning, "parts compiled", "full"),
    (trainers.lightning, "full", "parts compiled"),
)


def test_compiled_and_tied_models_have_clean_names(tmp_path: Path) -> None:
    """Names are those of the model as written; each kind resumes from the other."""
    tasks: list[Any] = []
    for number, (training, saved, loaded) in enumerate(PAIRS):
        url = str(tmp_path / str(number))
        ckptstore.open(url, create=True).close()
        tasks.append((training, (url, saved, {"epochs": 1, "saves": True})))
        tasks.append((training, (url, loaded, {"epochs": 2, "resume": True})))
    found = run_ranks(trainers.several, 2, tasks)[0]
    for number, (_, saved, loaded) in enumerate(PAIRS):
        before, after = found[2 * number : 2 * number + 2]
        assert after[1][0] == before[1][1], (saved, loaded)
        with ckptstore.open(tmp_path / str(number)) as store:
            names = _weights(store).keys()
        assert not [name for name in names if "_orig_mod" in name]
        if "tied" in saved:
            assert {"0.weight", "2.weight"} <= names


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2", "tensor parallel"),
        ("ddp", "tensor parallel"), ("tensor parallel", "fsdp2"),
    ],
)  # fmt: skip
def test_one_kind_resumes_from_another(tmp_path: Path, saved: str, loaded: str) -> None:
    """Undivided, FSDP2, tensor parallel: each takes the weights and moments of the others."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    before = run_ranks(trainers.accelerate, 2, url, saved, {"epochs": 2, "saves": True})
    after = run_ranks(trainers.accelerate, 2, url, loaded, {"epochs": 2, "resume": True})
    assert after[0][1][0] == before[0][1][-1]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "fsdp2 full"])
def test_saves_in_the_background_are_of_the_moment(tmp_path: Path, kind: str) -> None:
    """What is saved is the state of the call, one version after the other, best ones by metric."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    plan = {"epochs": 3, "saves": True, "background": True}
    before = run_ranks(trainers.accelerate, 2, url, kind, plan)
    for ref in ("best:loss", 2):
        resumed = {"epochs": 3, "resume": ref}
        after = run_ranks(trainers.accelerate, 2, url, kind, resumed)
        with ckptstore.open(url) as store:
            version = store.run("gpt").resolve(ref)
        assert after[0][1][0] == before[0][1][version.step]
        assert version.metadata["resumed"]["verdict"] == "exact"


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 full"])
def test_the_best_model_of_a_trainer(tmp_path: Path, kind: str) -> None:
    """``load_best_model_at_end``, ``save_total_limit`` and saves in the background, sharded."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    arguments = {
        "eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True, "save_total_limit": 2,
    }  # fmt: skip
    plan = {"epochs": 4, "saves": True, "background": True, "arguments": arguments}
    _, states = run_ranks(trainers.trainer, 2, url, kind, plan)[0]

    with ckptstore.open(url) as store:
        run = store.run("gpt")
        best = max(run.versions(), key=lambda version: version.metrics["eval_loss"])
        assert [version.step for version in run.versions()] == sorted({best.step, 20})
        folder = export_pretrained(store, f"gpt@{best.step}", tmp_path / "exported")
        saved = run.load(best.step)["model"]
    weights = {name: one for name, one in states[-1].items() if " " not in name}
    assert {name: one.numpy().tobytes() for name, one in saved.items()} == weights
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(exported.transformer.wte.weight, saved["transformer.wte.weight"])


def test_all_ranks_hear_why_a_background_save_could_not_begin(tmp_path: Path) -> None:
    """Else the others would wait for rank 0 in their next step."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    plan = {"epochs": 2, "saves": True, "background": True, "store": {"staging_bytes": 1}}
    with Group(trainers.trainer, 2, url, "fsdp2 full", plan) as group:
        ends = group.finish()
    assert [kind for kind, _ in ends] == ["failed", "failed"]
    assert all("LimitError" in why for _, why in ends)


def test_what_is_refused(tmp_path: Path) -> None:
    """Flat parameters, encodings of parts, other parameters: each with the way that works."""
    ckptstore.open(tmp_path / "ckpts", create=True).close()
    run_ranks(trainers.refusals, 2, str(tmp_path / "ckpts"))
    run_ranks(trainers.refusal_of_flat_parameters, 2, str(tmp_path / "ckpts"))
    with ckptstore.open(tmp_path / "ckpts") as store:
        assert [version.step for version in store.versions("gpt")] == [1]
    with pytest.raises(AssertionError, match="ModelParallelStrategy writes files"):
        run_ranks(trainers.lightning, 1, str(tmp_path / "ckpts"), "files", {"epochs": 1})


@pytest.mark.parametrize("kind", ["parts", "full"])
def test_lightning_keeps_the_best_in_the_background(tmp_path: Path, kind: str) -> None:
    """``save_top_k`` deletes the other versions of parts by commits."""
    url = str(tmp_path / "ckpts")
    ckptstore.open(url, create=True).close()
    plan = {"epochs": 4, "saves": True, "background": True, "keep": 1}
    run_ranks(trainers.lightning, 2, url, kind, plan)
    with ckptstore.open(url) as store:
        steps = [version.step for version in store.run("gpt").versions()]
        assert len(steps) == 1
        assert store.undelete(["gpt@5"])[0].step == 5
