"""Hugging Face Trainer on a store: resume, best model, early stopping, limits, export."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ckptstore
from ckptstore import errors
from ckptstore.integrations.preemption import Preemption
from ckptstore.integrations.pretrained import describe_model
from ckptstore.integrations.transformers import StoreTrainerMixin, export_pretrained
from ckptstore.store import Run, Store

WORDS = 16


class Stored(StoreTrainerMixin, Trainer):  # type: ignore[misc]  # not followed by mypy
    """What a user writes."""


class Watch(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
    """Keeps the losses, and calls a function after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.after: Callable[[int], object] = lambda _: None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after(state.global_step + 1)


def _model() -> GPT2LMHeadModel:
    """Return a model with dropout and tied weights."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _rows(count: int = 48) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, WORDS, (8,), generator=drawn) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(
    run: Run, folder: Path, *callbacks: TrainerCallback, extra: Any = None, **options: Any
) -> Stored:
    """Return a trainer of 12 steps an epoch that saves every 4."""
    wanted = {
        "output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "cosine",
        "learning_rate": 1e-2, "seed": 5, "logging_strategy": "steps", **options,
    }  # fmt: skip
    return Stored(
        _model(), TrainingArguments(**wanted), train_dataset=_rows(), eval_dataset=_rows(8),
        run=run, callbacks=[*callbacks], **(extra or {}),
    )  # fmt: skip


@pytest.fixture
def run(store: Store) -> Run:
    """Return a run of the test's store."""
    return store.run("gpt", metrics={"eval_loss": "min"})


@pytest.mark.usefixtures("_nothing_pickled")
@pytest.mark.parametrize(
    "ref", [True, "gpt@12", 8], ids=["newest", "end of an epoch", "in an epoch"]
)
@pytest.mark.short(sample=1)
def test_a_resumed_training_has_the_same_losses(
    store: Store, run: Run, tmp_path: Path, ref: Any
) -> None:
    """Other seeds, new objects: from then on all is as in the training before, bit for bit."""
    first = Watch()
    whole = _trainer(run, tmp_path, first)
    whole.train()
    step = 24 - 4 if ref is True else store.resolve(f"gpt@{str(ref).removeprefix('gpt@')}").step
    if ref is True:
        store.rollback(f"gpt@{step}")  # as if it had ended there
    torch.manual_seed(77)

    watch = Watch()
    resumed = _trainer(run, tmp_path, watch, save_strategy="no")
    resumed.train(resume_from_checkpoint=ref if ref is True else str(ref))

    assert watch.losses == first.losses[step:]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.state.log_history[0] == whole.state.log_history[0]


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("forgotten", [False, True], ids=["whole", "forgotten"])
@pytest.mark.parametrize("ref", ["gpt@12", 8], ids=["end of an epoch", "in an epoch"])
def test_a_witness_proves_a_resume(
    run: Run, tmp_path: Path, ref: Any, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an epoch and at its end: exact; without its scheduler, that is said."""
    _trainer(run, tmp_path / "first", extra={"witness": True}).train()
    if forgotten:
        monkeypatch.setattr(LambdaLR, "load_state_dict", lambda *_: None)
    again = _trainer(run, tmp_path / "second", extra={"witness": True})
    again.train(resume_from_checkpoint=ref)
    (told,) = [one.metadata["resumed"] for one in run if "resumed" in one.metadata]
    if forgotten:
        assert told["verdict"] == "differs"
        assert told["names"][0].startswith("scheduler.")
    else:
        assert told == {"verdict": "exact", "steps": 3, "names": []}


def test_versions_hold_metrics_and_nothing_is_written_elsewhere(
    store: Store, run: Run, tmp_path: Path
) -> None:
    """Versions are where the arguments say, with what was logged; no folder is left on the disk."""
    trainer = _trainer(run, tmp_path, eval_strategy="steps", eval_steps=8, max_steps=8)
    began = trainer.has_version
    trainer.train()

    versions = run.versions()
    assert (began, trainer.has_version) == (False, True)
    assert [version.step for version in versions] == [4, 8]
    assert sorted(versions[1].metrics) == ["eval_loss", "grad_norm", "learning_rate", "loss"]
    assert "eval_loss" not in versions[0].metrics
    assert versions[1].roles["optimizer"].logical > versions[1].roles["weights"].logical
    assert not list(tmp_path.glob("out/checkpoint-*"))


@pytest.mark.usefixtures("_nothing_pickled")
@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(store: Store, run: Run, tmp_path: Path) -> None:
    """``load_best_model_at_end`` takes the weights from the store; so does a resumed training."""
    options = {
        "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True,  # the first one, then
        "learning_rate": 3e-2,
    }  # fmt: skip
    trainer = _trainer(run, tmp_path, **options, max_steps=12)
    trainer.train()

    best = max(run.versions(), key=lambda version: version.metrics["eval_loss"])
    assert trainer.state.best_model_checkpoint == f"gpt@{best.step}"
    wanted = run.load(best.step)["model"]
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    again = _trainer(run, tmp_path, **options, max_steps=16)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step is not None
    kept = run.load(again.state.best_global_step)["model"]
    assert torch.equal(again.model.transformer.wte.weight, kept["transformer.wte.weight"])


@pytest.mark.slow
def test_early_stopping_works_as_ever(store: Store, run: Run, tmp_path: Path) -> None:
    """The library's own callback stops, and the store has the version to go back to."""
    trainer = _trainer(
        run, tmp_path, EarlyStoppingCallback(early_stopping_patience=2),
        eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=False, learning_rate=5.0,
    )  # fmt: skip
    trainer.train()

    assert trainer.state.global_step < 24
    best = store.resolve("gpt@best:eval_loss")
    assert trainer.state.best_global_step == best.step
    assert best.step < run.resolve("latest").step


def test_the_limit_deletes_by_commits(store: Store, run: Run, tmp_path: Path) -> None:
    """``save_total_limit`` keeps the newest and the best; the others can be undeleted."""
    trainer = _trainer(
        run, tmp_path, save_total_limit=2, eval_strategy="steps", eval_steps=4,
        metric_for_best_model="eval_loss", greater_is_better=True, learning_rate=3e-2,
    )  # fmt: skip
    trainer.train()

    best = trainer.state.best_global_step
    assert [version.step for version in run.versions()] == sorted({best, 24})
    other = next(step for step in (8, 12, 16) if step != best)
    assert store.undelete([f"gpt@{other}"])[0].step == other


class Better(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
    """Has the metric of an evaluation go by a list, and keeps something of its own in the state."""

    def __init__(self, *losses: float) -> None:
        self.losses = [*losses]

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        metrics["eval_loss"] = self.losses.pop(0)
        state.note = torch.ones(1)


def test_the_limit_spares_a_best_version_that_a_better_step_has_no_version_beside(
    run: Run, tmp_path: Path
) -> None:
    """A later step was better and was not saved: the version to load at the end is there still.

    What a callback puts on the trainer's state is no part of a version.
    """
    options: Any = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": False, "save_total_limit": 1,
    }  # fmt: skip
    losses = Better(4, 3, 2, 4, 4, 4)
    trainer = _trainer(run, tmp_path, losses, **options, max_steps=12)
    trainer.train()
    assert trainer.state.best_model_checkpoint == "gpt@4"
    assert [version.step for version in run.versions()] == [4, 12]
    again = _trainer(run, tmp_path, Better(5, 5), **options, max_steps=16)
    again.train(resume_from_checkpoint=True)
    assert run.resolve("latest").step == 16


def test_a_best_version_that_was_removed_fails_no_training(
    store: Store, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody removes it before the end: the model stays as it is, and the log says so."""

    class Removing(Better):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 8:
                store.remove(["gpt@4"], force=True)

    options: Any = {
        "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": False, "max_steps": 8,
    }  # fmt: skip
    trainer = _trainer(run, tmp_path, Removing(1, 2), **options)
    trainer.train()
    assert "the best version, gpt@4, was removed" in caplog.text
    saved = run.load("latest")["model"]
    assert all(torch.equal(saved[name], one) for name, one in trainer.model.state_dict().items())


def test_a_best_version_of_another_store_fails_no_training(
    store: Store, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork goes on elsewhere, where the run of the best version so far does not exist."""
    options: Any = {
        "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": False, "save_total_limit": 2,
    }  # fmt: skip
    _trainer(run, tmp_path, Better(1, 2), **options, max_steps=8).train()
    with ckptstore.open(tmp_path / "other", create=True) as other:
        store.fork("gpt@8", "tuned", store=other)
        fork = other.run("tuned")
        trainer = _trainer(fork, tmp_path, Better(3, 4), **options, max_steps=12)
        trainer.train(resume_from_checkpoint=True)
        assert "the best version, gpt@4, was removed" in caplog.text
        assert fork.resolve("latest").step == 12


@pytest.mark.parametrize("background", [True, False])
def test_folders_of_trainer_stay_and_names_of_refs_mean_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Who changes over in the middle: `Trainer` would compare its old folders with the best one."""
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "out" / "checkpoint-2"
    old.mkdir(parents=True)
    Path("latest").mkdir()
    options: Any = {
        "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": False, "save_total_limit": 1,
        "extra": {"background": background},
    }  # fmt: skip
    _trainer(run, tmp_path, Better(2), **options, max_steps=4).train()
    trainer = _trainer(run, tmp_path, Better(1), **options, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    assert [version.step for version in run.versions()] == [8]
    assert trainer.args.save_total_limit == 1
    assert old.is_dir()


def test_a_deletion_that_fails_ends_no_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save before it is durable; the next one deletes what is over the limit."""
    remove, left = Store.remove, [errors.TransientStorageError("slow down")]

    def failing(self: Store, *args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return remove(self, *args, **options)

    monkeypatch.setattr(Store, "remove", failing)
    _trainer(run, tmp_path, save_total_limit=1, max_steps=12).train()
    assert caplog.text.count("versions over save_total_limit stay for now: slow down") == 1
    assert [version.step for version in run.versions()] == [12]


@pytest.mark.slow
def test_saves_in_the_background(store: Store, run: Run, tmp_path: Path) -> None:
    """When ``train`` returns, all versions are durable; the limit holds as well."""
    trainer = _trainer(run, tmp_path, extra={"background": True}, save_total_limit=1, max_steps=8)
    trainer.train()

    assert [version.step for version in run.versions()] == [8]
    saved = run.load("latest")["model"]
    assert all(
        torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items()
    )


@pytest.mark.slow
def test_only_the_model(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``save_only_model`` leaves the rest out; a training that goes on there says what is new."""
    trainer = _trainer(run, tmp_path, save_only_model=True, max_steps=4)
    trainer.train()

    assert sorted(run.load("latest")) == ["model", "pretrained", "trainer_state"]
    again = _trainer(run, tmp_path, max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert "latest has only the model: the optimizer and scheduler begin anew" in caplog.text
    assert run.resolve("latest").step == 8
    caplog.clear()
    _trainer(run, tmp_path, max_steps=12).train(resume_from_checkpoint=True)
    assert "begin anew" not in caplog.text


@pytest.mark.slow
def test_a_folder_of_trainer_is_resumed_from_as_ever(run: Run, tmp_path: Path) -> None:
    """Who changes over in the middle goes on from the files that there are."""
    watch, second = Watch(), Watch()
    plain = Trainer(
        _model(), _trainer(run, tmp_path).args, train_dataset=_rows(), callbacks=[watch]
    )
    plain.train()
    folder = tmp_path / "out" / "checkpoint-20"

    _trainer(run, tmp_path, second).train(resume_from_checkpoint=str(folder))

    assert second.losses == watch.losses[20:]
    assert [version.step for version in run.versions()] == [24]


def test_a_ref_that_names_nothing_is_told(run: Run, tmp_path: Path) -> None:
    """No training begins anew in silence because a version was not found."""
    trainer = _trainer(run, tmp_path)
    with pytest.raises(errors.RunNotFoundError):
        trainer.train(resume_from_checkpoint=True)
    run.save({"model": trainer.model.state_dict()}, step=1)
    with pytest.raises(errors.StateError, match="not saved by a Trainer"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(errors.VersionNotFoundError):
        trainer.train(resume_from_checkpoint="gpt@99")


def test_from_pretrained_reads_an_export(store: Store, run: Run, tmp_path: Path) -> None:
    """Weights, tied ones too, configuration, tokenizer: also of a version aged to its weights."""
    tokens = {f"w{number}": number for number in range(WORDS)}
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="w0")),
        unk_token="w0",
        pad_token="w0",
    )
    trainer = _trainer(run, tmp_path, extra={"processing_class": tokenizer}, max_steps=4)
    trainer.model.generation_config.max_new_tokens = 3
    trainer.train()

    run.save({"model": {}}, step=9)
    store.age(["gpt@4"], "weights")

    folder = export_pretrained(store, "gpt@4", tmp_path / "exported")

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    words = torch.arange(6)[None]
    trainer.model.eval()
    assert type(loaded) is GPT2LMHeadModel
    assert torch.equal(loaded.eval()(words).logits, trainer.model(words).logits)
    assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    assert loaded.generation_config.max_new_tokens == 3
    again = PreTrainedTokenizerFast.from_pretrained(folder)
    assert again("w3 w4")["input_ids"] == tokenizer("w3 w4")["input_ids"]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


def test_an_export_of_a_version_without_configuration_needs_the_model(
    store: Store, run: Run, tmp_path: Path
) -> None:
    """A state that another loop saved can be exported too, given the model; else it is told."""
    model = _model()
    run.save({"model": model.state_dict()}, step=1)
    with pytest.raises(errors.InvalidInputError, match="no configuration"):
        export_pretrained(store, "gpt", tmp_path / "a")

    export_pretrained(store, "gpt", tmp_path / "b", model=_model())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)

    run.save({"model": {"other": torch.ones(1)}}, step=2)
    with pytest.raises(errors.StateError, match="do not fit GPT2LMHeadModel"):
        export_pretrained(store, "gpt", tmp_path / "c", model=_model())


def test_an_export_without_transformers_says_what_to_install(
    store: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of the model is transformers' own: without it there is none to make."""
    model = _model()
    about = describe_model(model)
    run.save({"model": model.state_dict(), "pretrained": about}, step=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(errors.MissingDependencyError, match="pip install"):
        export_pretrained(store, "gpt", tmp_path / "a")


@pytest.mark.parametrize("name", ["../escaped.txt", "x/../../escaped.txt"])
def test_a_hostile_version_writes_nothing_outside(
    store: Store, run: Run, tmp_path: Path, name: str
) -> None:
    """Names of files are taken from a version that anyone may have written."""
    model = _model()
    about = {**describe_model(model), "processing": {name: b"x"}}
    run.save({"model": model.state_dict(), "pretrained": about}, step=1)
    with pytest.raises(errors.InvalidInputError, match="outside of the folder"):
        export_pretrained(store, "gpt", tmp_path / "a")
    assert not (tmp_path / "escaped.txt").exists()


def test_preemption_saves_and_returns(store: Store, run: Run, tmp_path: Path) -> None:
    """SIGTERM: the step is saved although none was due, and a restart goes on with it."""
    first, second = Watch(), Watch()
    torch.manual_seed(11)
    _trainer(run, tmp_path, first, save_strategy="no").train()
    torch.manual_seed(11)  # the same weights at the beginning
    watch = Watch()
    watch.after = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None
    with Preemption() as preemption:
        trainer = _trainer(run, tmp_path, watch, extra={"preemption": preemption})
        trainer.train()

        assert preemption.stop_at == 6
        assert preemption.exit_code == 143
    assert [version.step for version in run.versions()] == [4, 6]
    _trainer(run, tmp_path, second).train(resume_from_checkpoint=True)
    assert second.losses == first.losses[6:]


def test_what_is_not_supported_is_told(run: Run, tmp_path: Path) -> None:
    """A training whose saves would not be what they seem does not begin."""
    with pytest.raises(errors.InvalidInputError, match="push_to_hub"):
        _trainer(run, tmp_path, push_to_hub=True, hub_model_id="me/gpt", hub_token="no")


def test_what_is_no_run_is_refused(store: Store, tmp_path: Path) -> None:
    """A name or a store in place of a run is told before the training begins."""
    wrong: Any
    for wrong, name in (("small", "small"), (store, "gpt")):
        with pytest.raises(errors.InvalidInputError, match="run of a store") as told:
            _trainer(wrong, tmp_path)
        assert told.value.hint == f"give store.run({name!r})"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_stop_together_and_resume(
    tmp_path: Path, ranks: Callable[[str, int], list[int]]
) -> None:
    """SIGTERM to one rank: one version; resumed, each draws and learns as if nothing had been."""
    ckptstore.open(tmp_path / "ckpts", create=True).close()

    assert ranks("transformers_ranks.py", 2) == [0, 0]

    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    for each in said:
        assert (len(each["ended"]), each["code"], each["same"]) == (5, 143, True)
        assert each["whole"] == each["ended"] + each["resumed"]
    with ckptstore.open(tmp_path / "ckpts") as opened:
        assert [version.step for version in opened.versions("gpt")] == [5]
