"""Adapters of PEFT on a store: saved by Trainer, exported alone, merged, and imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from ckptstore.errors import InvalidInputError, MissingDependencyError, StateError
from ckptstore.integrations.files import import_file
from ckptstore.integrations.pretrained import describe_model
from ckptstore.integrations.transformers import StoreTrainerMixin, export_pretrained
from ckptstore.store import Store

WORDS = torch.arange(6)[None]
ALONE = {".ckptstore-export.json", "README.md", "adapter_config.json", "adapter_model.safetensors"}


class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
    """A trainer on a store."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder of a model with tied weights."""
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _adapted(base: Path, *more: str) -> Any:
    """Return a model with an adapter that does something, and others of these names."""
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, init_lora_weights=False,
        fan_in_fan_out=True, modules_to_save=["ln_f"],
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name in more:
        model.add_adapter(name, LoraConfig(target_modules=["c_proj"], fan_in_fan_out=True))
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(WORDS).logits
    return found


def _read(base: Path, folder: Path) -> Any:
    """Return what PEFT makes of a base model and an exported folder."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


def _near(folder: Path, model: Any) -> bool:
    """Return whether an exported whole model computes what one with an adapter does."""
    loaded, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return not any(about.values()) and torch.allclose(_logits(loaded), _logits(model), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_a_training_of_an_adapter_is_resumed_and_exported(
    store: Store, base: Path, tmp_path: Path, *, alone: bool
) -> None:
    """The configuration is stored; by default the folder is what PEFT writes for the adapter.

    With ``trained_only`` the version has no weights of the base model.
    """
    run = store.run("lora")
    rows = [{"input_ids": WORDS[0], "labels": WORDS[0]}] * 4

    def trainer(steps: int) -> Stored:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], disable_tqdm=True,
            max_steps=steps, save_steps=1, learning_rate=0.1, label_names=["labels"],
        )  # fmt: skip
        model = _adapted(base)
        return Stored(model, arguments, train_dataset=rows, run=run, trained_only=alone)

    trainer(1).train()
    again = trainer(2)
    again.train(resume_from_checkpoint=True)
    about = run.load()["pretrained"]
    again.model.save_pretrained(tmp_path / "own")

    folder = export_pretrained(store, "lora@2", tmp_path / "alone")

    names = run.load()["model"].keys()
    assert any("base_layer" in name for name in names) is not alone
    assert about["adapter_config"]["default"]["r"] == 2
    assert about["config"]["architectures"] == ["GPT2LMHeadModel"]
    assert {path.name for path in folder.iterdir()} == ALONE
    own, found = (
        load_file(place / "adapter_model.safetensors") for place in (tmp_path / "own", folder)
    )
    assert own.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in own.items())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert torch.equal(_logits(_read(base, folder)), _logits(again.model))
    merged = export_pretrained(store, "lora@2", tmp_path / "merged", merge=True)
    assert {path.name for path in merged.iterdir()} == {
        ".ckptstore-export.json", "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert _near(merged, again.model)
    adapted = store.from_pretrained("lora@2")
    assert type(adapted).__name__ == "PeftModelForCausalLM"
    assert torch.allclose(_logits(adapted), _logits(again.model), atol=1e-6)
    assert not any(tensor.is_meta for tensor in (*adapted.parameters(), *adapted.buffers()))


def test_several_adapters_are_where_peft_looks(store: Store, base: Path, tmp_path: Path) -> None:
    """The default one in the folder, others below their names; which to merge is not guessed."""
    model = _adapted(base, "other")
    state = {"model": model.state_dict(), "pretrained": describe_model(model)}
    store.run("lora").save(state, step=1)

    folder = export_pretrained(store, "lora", tmp_path / "alone")

    other = load_file(folder / "other" / "adapter_model.safetensors")
    wanted = get_peft_model_state_dict(model, adapter_name="other")
    assert other.keys() == wanted.keys()
    assert all(torch.equal(other[name], value) for name, value in wanted.items())
    assert torch.equal(_logits(_read(base, folder)), _logits(model))
    with pytest.raises(InvalidInputError, match=r"several adapters \(default, other\)"):
        export_pretrained(store, "lora", tmp_path / "merged", merge=True)


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_of_another_name_has_its_folder(
    store: Store, base: Path, tmp_path: Path, *, alone: bool
) -> None:
    """As PEFT writes it, whether the version holds the weights of the base model or not."""
    config = LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, "mine")
    weights = get_peft_model_state_dict(model, adapter_name="mine") if alone else model.state_dict()
    store.run("lora").save({"model": weights, "pretrained": describe_model(model)}, step=1)

    folder = export_pretrained(store, "lora", tmp_path / "out")

    assert torch.equal(_logits(_read(base, folder / "mine")), _logits(model))
    assert _near(export_pretrained(store, "lora", tmp_path / "merged", merge=True), model)


@pytest.mark.parametrize("how", ["imported", "saved", "as trained"])
def test_an_adapter_without_its_base_model(
    store: Store, base: Path, tmp_path: Path, how: str
) -> None:
    """It is exported alone; merged with the base model that is given, or that it names."""
    model = _adapted(base)
    if how == "imported":
        model.save_pretrained(tmp_path / "adapter")
        assert import_file(store, tmp_path / "adapter", run="lora").step == 0
    else:
        weights = get_peft_model_state_dict(model)
        if how == "as trained":
            wanted = ("lora", "modules_to_save")
            weights = {k: v for k, v in model.state_dict().items() if any(w in k for w in wanted)}
        state = {"model": weights, "pretrained": describe_model(model)}
        store.run("lora").save(state, step=0)

    folder = export_pretrained(store, "lora", tmp_path / "alone")
    assert {path.name for path in folder.iterdir()} - {"README.md"} == ALONE - {"README.md"}
    assert torch.equal(_logits(_read(base, folder)), _logits(model))
    assert _near(export_pretrained(store, "lora", tmp_path / "named", merge=True), model)

    assert torch.allclose(_logits(store.from_pretrained("lora")), _logits(model), atol=1e-6)

    given = AutoModelForCausalLM.from_pretrained(base)
    for mine in (given, model):
        before = {name: value.clone() for name, value in mine.state_dict().items()}
        for merge in (True, False):
            export_pretrained(store, "lora", tmp_path / f"{merge}", merge=merge, model=mine)
            after = mine.state_dict()
            assert before.keys() == after.keys()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert given.lm_head.weight.requires_grad
    base.rename(tmp_path / "moved")
    folder = export_pretrained(store, "lora", tmp_path / "given", merge=True, model=given)
    assert _near(folder, model)
    with pytest.raises(InvalidInputError, match="without the weights of its base model") as told:
        export_pretrained(store, "lora", tmp_path / "none", merge=True)
    assert str(base) in told.value.message
    assert "model=base_model" in told.value.hint


def test_what_cannot_be_exported_is_told(
    store: Store, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No adapter, weights that are missing, a kind that is not merged, and no PEFT."""
    model, run = _adapted(base), store.run("lora")
    about, weights = describe_model(model), model.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base)
    run.save({"model": plain.state_dict(), "pretrained": describe_model(plain)}, step=1)
    with pytest.raises(InvalidInputError, match="no adapter to merge"):
        export_pretrained(store, "lora@1", tmp_path / "a", merge=True)
    less = {name: value for name, value in weights.items() if "lora_B" not in name}
    run.save({"model": less, "pretrained": about}, step=2)
    with pytest.raises(StateError, match=r"missing \['base_model.*lora_B.weight'\]"):
        export_pretrained(store, "lora@2", tmp_path / "a")
    prompts = get_peft_model(plain, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    run.save({"model": prompts.state_dict(), "pretrained": describe_model(prompts)}, step=3)
    with pytest.raises(InvalidInputError, match="of the kind PROMPT_TUNING"):
        export_pretrained(store, "lora@3", tmp_path / "a", merge=True)
    read = _read(base, export_pretrained(store, "lora@3", tmp_path / "prompts"))
    assert torch.equal(_logits(read), _logits(prompts))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match="pip install peft"):
        export_pretrained(store, "lora@2", tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("../escaped", {}, "an adapter of the name"),
        ("..", {}, "an adapter of the name"),
        ("default", {"peft_type": "NOTHING"}, "PEFT makes no adapter"),
    ],
)
def test_a_hostile_adapter_writes_nothing(
    store: Store, base: Path, tmp_path: Path, name: str, config: dict[str, object], message: str
) -> None:
    """Names of adapters are folders, and their configurations are of others."""
    model = _adapted(base)
    about = describe_model(model)
    hostile = {**about["adapter_config"]["default"], **config}
    state = {
        "model": model.state_dict(),
        "pretrained": {**about, "adapter_config": {name: hostile}},
    }
    store.run("lora").save(state, step=1)
    with pytest.raises(InvalidInputError, match=message):
        export_pretrained(store, "lora", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "ckpts"]
