"""Folders of Transformers through a store: imported, forked, trained, and written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import ckptstore
from ckptstore.cli.main import run
from ckptstore.errors import InvalidInputError, StateError, TensorNotFoundError
from ckptstore.integrations.files import import_file
from ckptstore.integrations.transformers import StoreTrainerMixin, export_pretrained
from ckptstore.store import Store

KEPT = {
    ".ckptstore-export.json", "README.md", "additional_chat_templates", "chat_template.jinja",
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
WORDS = torch.arange(6)[None]


class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
    """A trainer on a store."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder of a model with tied weights, settings and a tokenizer with templates."""
    folder = tmp_path / "base"
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(16)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        unk_token="w0",
        pad_token="w0",
        chat_template={"default": "{{ messages }}", "tools": "{{ tools }}"},
    )
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("a card")
    return folder


def _logits(model: GPT2LMHeadModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(WORDS).logits
    return found


def _check(folder: Path, model: GPT2LMHeadModel, base: Path) -> None:
    """Compare what Transformers reads out of a folder with a model and the files it began with."""
    assert {path.name for path in folder.iterdir()} == KEPT
    loaded, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values())
    assert type(loaded) is GPT2LMHeadModel
    assert torch.equal(_logits(loaded), _logits(model))
    assert loaded.generation_config.max_new_tokens == 3
    assert AutoTokenizer.from_pretrained(folder)("w3")["input_ids"] == [3]
    for name in ("README.md", "tokenizer.json", "additional_chat_templates/tools.jinja"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()


def test_an_imported_folder_is_written_again_with_its_files(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """Configuration, generation settings, tokenizer, templates and card are those of the folder."""
    version = import_file(store, base, run="llama")

    folder = export_pretrained(store, "llama", tmp_path / "out")

    assert version.step == 0
    assert version.roles["weights"].logical > 1000
    assert set(version.roles) == {"weights"}
    _check(folder, AutoModelForCausalLM.from_pretrained(base), base)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    model = GPT2LMHeadModel.from_pretrained(base)
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    report = store.load_into("llama@0", model, rename={"model": ""}, strict=False)
    assert report.missing == ()
    assert torch.equal(_logits(model), _logits(AutoModelForCausalLM.from_pretrained(base)))


def test_the_command_writes_the_same_folder(store: Store, base: Path, tmp_path: Path) -> None:
    """``export --pretrained``: whole or not there, never over other files unless told so."""
    import_file(store, base, run="llama")
    folder, blocked = tmp_path / "new" / "out", tmp_path / "blocked"
    blocked.write_text("a file")

    def export(*arguments: object) -> int:
        place = str(tmp_path / "ckpts")
        return run(["export", "llama", *map(str, arguments), "--pretrained", "-s", place])

    assert export(folder) == 0
    _check(folder, AutoModelForCausalLM.from_pretrained(base), base)
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    files = [path for path in folder.iterdir() if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # readable by colleagues
    (folder / "config.json").write_text("{}")
    assert export(folder) == 4
    assert (folder / "config.json").read_text() == "{}"
    assert export(folder, "--force") == 0
    _check(folder, AutoModelForCausalLM.from_pretrained(base), base)
    for wrong in (("--include", "model.*"), ("--merge",)):
        assert export(tmp_path / "none", *wrong) == 2
    assert export(blocked) != 0
    assert not (tmp_path / "none").exists()
    assert blocked.read_text() == "a file"


def test_a_model_comes_out_of_the_store(store: Store, base: Path) -> None:
    """``from_pretrained`` of a ref gives the model of the folder: weights, ties, settings, mode."""
    import_file(store, base, run="llama")
    expected = AutoModelForCausalLM.from_pretrained(base)

    model = store.from_pretrained("llama")

    assert type(model) is GPT2LMHeadModel
    assert not model.training
    assert torch.equal(_logits(model), _logits(expected))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.generation_config.max_new_tokens == 3
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    own = GPT2LMHeadModel(expected.config)
    assert store.from_pretrained("llama", model=own) is own
    assert torch.equal(_logits(own), _logits(expected))
    for name in ("llama@7", "lama"):
        with pytest.raises(ckptstore.errors.NotFoundError):
            store.from_pretrained(name)
    with pytest.raises(InvalidInputError, match="instance"):
        store.from_pretrained("llama", model=GPT2LMHeadModel)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["include", "roles", "elsewhere", "without"])
def test_a_fork_of_the_weights_has_the_files_too(
    store: Store, base: Path, tmp_path: Path, how: str
) -> None:
    """However the weights are chosen, here and in another store; those left out are looked up."""
    import_file(store, base, run="llama")
    target = store
    if how == "elsewhere":
        target = ckptstore.open(tmp_path / "other", create=True)
        store.fork("llama", "ft", include=["model.*"], store=target)
    elif how == "without":
        store.fork("llama", "ft", exclude=["pretrained"])
    else:
        include, roles = (["model.*"], None) if how == "include" else (None, ["weights"])
        store.fork("llama", "ft", include=include, roles=roles)

    assert ("pretrained" in target.load("ft")) == (how != "without")
    _check(
        export_pretrained(target, "ft", tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(base),
        base,
    )
    target.close()


def test_a_fork_of_a_part_is_not_taken_for_the_model(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """A folder that lacks weights would be filled with random ones by whoever reads it."""
    import_file(store, base, run="llama")
    store.fork("llama", "part", include=["model.transformer.h.*"])
    with pytest.raises(StateError, match=r"missing \['transformer.wte.weight'"):
        export_pretrained(store, "part", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_training_of_ones_own_keeps_the_files_of_its_fork(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """State dicts alone are exported with what the run, or one before it, began with."""
    import_file(store, base, run="llama")
    run = store.fork("llama", "ft")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.transformer.wte.weight.add_(1)
    run.save({"model": model.state_dict()}, step=1)
    run.save({"model": model.state_dict()}, step=2)
    store.remove(["ft@0"])

    _check(export_pretrained(store, "ft@2", tmp_path / "out"), model, base)


@pytest.mark.slow
def test_a_trainer_keeps_the_files_of_its_fork(store: Store, base: Path, tmp_path: Path) -> None:
    """Import, fork, training without the tokenizer, export: the tokenizer is the imported one."""
    import_file(store, base, run="llama")
    rows = [{"input_ids": WORDS[0], "labels": WORDS[0]}] * 4
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], disable_tqdm=True,
        max_steps=1, save_steps=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = Stored(model, arguments, train_dataset=rows, run=store.fork("llama", "ft"))
    before = trainer.has_version
    assert not before  # there are weights, and nothing to resume from
    trainer.train(resume_from_checkpoint=before)
    assert bool(trainer.has_version)

    _check(export_pretrained(store, "ft@1", tmp_path / "exported"), trainer.model, base)


def test_names_of_the_folder_stay_where_the_model_has_others(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """Weights without the prefix of a head, in shards: Transformers reads what it read before."""
    model = AutoModelForCausalLM.from_pretrained(base)
    save_file(
        {name: value.clone() for name, value in model.transformer.state_dict().items()},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    import_file(store, base, run="llama")

    _check(export_pretrained(store, "llama", tmp_path / "out"), model, base)

    folder = export_pretrained(store, "llama", tmp_path / "shards", max_shard_size="5KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(load_file(base / "model.safetensors"))
    assert len(set(index.values())) > 1
    import_file(store, folder, run="again")
    _check(export_pretrained(store, "again", tmp_path / "out2"), model, base)


def test_weights_that_do_not_lie_below_model_are_told(
    store: Store, base: Path, tmp_path: Path
) -> None:
    """The hint is a fork that can be exported."""
    import_file(store, base / "model.safetensors", run="flat", step=1)
    with pytest.raises(TensorNotFoundError, match="no state dict at 'model'") as told:
        export_pretrained(store, "flat", tmp_path / "out")

    assert "rename={'': 'model'}" in told.value.hint
    store.fork("flat", "moved", rename={"": "model"})
    given = GPT2LMHeadModel(GPT2Config.from_pretrained(base))
    folder = export_pretrained(store, "moved", tmp_path / "out", model=given)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(_logits(loaded), _logits(AutoModelForCausalLM.from_pretrained(base)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["os"]}, "no model class 'os'"),
        ({"architectures": 3}, "no model class ''"),
        ({"architectures": ["GPT2LMHeadModel"], "n_head": 5}, "makes no GPT2LMHeadModel"),
        ("text", "something else at 'pretrained'"),
    ],
)
def test_a_configuration_that_makes_no_model_is_told(
    store: Store, base: Path, tmp_path: Path, config: object, message: str
) -> None:
    """Versions of others hold anything; what Transformers raises does not come through."""
    state = load_file(base / "model.safetensors")
    store.run("r").save({"model": state, "pretrained": {"config": config}}, step=1)
    with pytest.raises(InvalidInputError, match=message):
        export_pretrained(store, "r", tmp_path / "out")


def test_shapes_that_do_not_fit_are_told(store: Store, base: Path, tmp_path: Path) -> None:
    """An error of the tree, and not torch's own."""
    config = json.loads((base / "config.json").read_text())
    state = load_file(base / "model.safetensors")
    about = {"config": {**config, "n_embd": 32}}
    store.run("r").save({"model": state, "pretrained": about}, step=1)
    with pytest.raises(StateError, match="size mismatch"):
        export_pretrained(store, "r", tmp_path / "out")


def test_an_export_says_what_it_cannot_take(store: Store, base: Path, tmp_path: Path) -> None:
    """A file in place of a folder, a class or a name in place of a model: told at the call."""
    import_file(store, base, run="llama")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="/file is no folder"):
        export_pretrained(store, "llama", tmp_path / "file")
    for wrong in (GPT2LMHeadModel, str(base)):
        with pytest.raises(InvalidInputError, match="model must be an instance of a model, not"):
            export_pretrained(store, "llama", tmp_path / "out", model=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
