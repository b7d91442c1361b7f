"""Hugging Face ``Trainer`` on a run of a store; see docs/howto/hugging-face.md.

::

    class StoredTrainer(StoreTrainerMixin, Trainer): ...

    trainer = StoredTrainer(model, args, ..., run=store.run("gpt", metrics={"eval_loss": "min"}))
    trainer.train(resume_from_checkpoint=trainer.has_version)
    export_pretrained(store, "gpt@best:eval_loss", "exported")

A callback alone is not enough: a ``Trainer`` saves to and resumes from files of a
folder, by its own methods. The mixin replaces those methods: no folder
``checkpoint-100`` is written, and a resumed training gets its whole state from the store. It
is put in front of any class derived from ``Trainer``.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptstore import errors
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.integrations import sharded_states as sharded
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.model_names import set_whole
from ckptstore.integrations.preemption import Preemption
from ckptstore.integrations.pretrained import describe_model, export_pretrained
from ckptstore.integrations.randomness import capture_all, resume_random
from ckptstore.integrations.ranks import from_first, on_all, place
from ckptstore.model import Version
from ckptstore.resuming.witness import Witness
from ckptstore.saver.pending import PendingSave
from ckptstore.store import Run, Store

__all__ = ["StoreTrainerMixin", "export_pretrained"]

_STATE_FILE: Final = "trainer_state.json"
_log = logging.getLogger("ckptstore")
_NOT_METRICS: Final = ("epoch", "step", "total_flos")
_ENDINGS: Final = ("_runtime", "_per_second")


class StoreTrainerMixin:
    """Makes a class derived from ``Trainer`` save to and resume from a run.

    The training arguments about saving apply: ``save_strategy``, ``save_steps``,
    ``save_total_limit`` (older versions are deleted by commits), ``save_only_model``,
    ``load_best_model_at_end``, and with it ``EarlyStoppingCallback``. A version holds the model,
    optimizer, scheduler, gradient scaler, random state of each rank, the trainer's state, and
    the files for ``from_pretrained``: configuration (of adapters of PEFT too) and tokenizer. Its
    metrics are those logged at its step, such as ``loss`` and ``eval_loss``.

    Parameters
    ----------
    run
        The run to save to and resume from. Its store must be open for writing on rank 0. Its
        ``encodings`` apply here.
    background
        Save with ``save_async``. Errors are raised by the next save, or when training ends.
    preemption
        Checked after every step: when all ranks agree to stop, a version is saved and ``train``
        returns. Exit with ``preemption.exit_code`` then.
    trained_only
        Versions leave out frozen parameters, except those of adapters of PEFT: the weights of a
        base model that is the same in each version. A resume begins with the same base model.
    witness
        Note what the training is after each save, and compare a resumed one with it; see
        :class:`ckptstore.Witness`. The report is logged, and kept with the version.
    args, kwargs
        For the trainer.

    Raises
    ------
    InvalidInputError
        The training uses DeepSpeed or XLA's FSDP, or pushes every save to the hub; or `run`
        is no run of a store.
    """

    if TYPE_CHECKING:  # attributes of the trainer
        args: Any
        model: Any
        state: Any
        control: Any
        optimizer: Any
        lr_scheduler: Any
        accelerator: Any
        is_fsdp_enabled: bool
        callback_handler: Any
        processing_class: Any

    def __init__(
        self,
        *args: Any,
        run: Run,
        background: bool = False,
        preemption: Preemption | None = None,
        trained_only: bool = False,
        witness: bool = False,
        **kwargs: Any,
    ) -> None:
        check_run(run)
        self._run = run
        self._store = Store(run._session)
        self._background = background
        self._preemption = preemption
        self._trained_only = trained_only
        self._watches = witness
        self._witness: Witness | None = None
        self._last: dict[str, Any] | None = None
        """Loss and batch of the step that was done last, until the witness has seen it."""
        self._resumed: dict[str, Any] | None = None
        self._pending: PendingSave | sharded.PendingShards | None = None
        _check_hub(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        self._check_sharding()
        if preemption is not None:
            self.callback_handler.add_callback(_stop_when_asked(preemption))

    def _check_sharding(self) -> None:
        other = [getattr(self, f"is_{name}_enabled", False) for name in ("deepspeed", "fsdp_xla")]
        if any(other):
            msg = "states of DeepSpeed and XLA's FSDP are not saved"
            hint = "use FSDP2: fsdp=True, fsdp_config={'version': 2}"
            if other[0]:
                hint += "; or its folders: deepspeed.checkpoint.ds_to_universal, ckptstore import"
            raise errors.InvalidInputError(msg, hint=hint)

    def _parts(self) -> dict[str, sharded.Part]:
        """Return model and optimizer by their paths in a version."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"model": self.model, "optimizer": (self.model, inner)}

    @property
    def has_version(self) -> bool:
        """True if the run has a version to resume from; the same on all ranks.

        A run that only begins with weights, as a fork of an imported folder does, has none yet:
        the training begins with the model that it was given.
        """
        return from_first(self._has_version)

    def _has_version(self) -> bool:
        head, repo = self._run.head, self._run._session.repo
        if head is None:
            return False
        if head.parent and repo.catalog.version(head.parent).run == head.run:
            return True
        try:
            self._run.load(f"#{head.id}", include=["trainer_state"])
        except errors.TensorNotFoundError:
            return False
        return True

    # --- resuming -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; see ``Trainer.train``. Returns when every version is durable.

        Parameters
        ----------
        resume_from_checkpoint
            A ref (``gpt@latest-valid``, or the part after the ``@``), or True for the newest
            version of the run. A folder that ``Trainer`` wrote is resumed from by ``Trainer``.

        Raises
        ------
        VersionNotFoundError
            The ref names nothing, or the run has no version yet.
        StateError
            Another training loop saved the version, or only its weights are left.
        CkptStoreError
            A version cannot be read or saved.
        """
        ref = "latest" if resume_from_checkpoint is True else resume_from_checkpoint
        if not ref or (ref is resume_from_checkpoint and Path(str(ref)).is_dir()):
            return self._train(ref or None, kwargs)
        one = from_first(lambda: self._named(str(ref)).id)
        will_be = self.is_fsdp_enabled and (self.accelerator.is_fsdp2 or place()[1] > 1)
        divided = will_be or sharded.is_sharded(self.model)
        parts = ["model", "optimizer.state"] if divided else []
        found = on_all(lambda: self._store.load(f"#{one}", exclude=parts))
        self._resumed = {"model": None, "version": f"#{one}", **found} if divided else found
        if not {"trainer_state", "model"} <= self._resumed.keys():
            self._resumed = None
            msg = f"{self._run.name}: {ref!r} was not saved by a Trainer: it has no trainer_state"
            raise errors.StateError(msg, hint="to begin with its weights, load them into the model")
        if "scheduler" not in self._resumed:
            _log.warning("%s has only the model: the optimizer and scheduler begin anew", ref)
        try:
            with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
                known = {one.name for one in fields(self.state)}
                saved = self._resumed["trainer_state"].items()
                state = {name: value for name, value in saved if name in known}
                state["best_model_checkpoint"] = None
                text = json.dumps(state, indent=2, sort_keys=True)
                Path(folder, _STATE_FILE).write_text(text + "\n", encoding="utf-8")
                return self._train(folder, kwargs)
        finally:
            self._resumed = None

    def _train(self, folder: object, kwargs: Mapping[str, Any]) -> Any:
        try:
            done = super().train(resume_from_checkpoint=folder, **kwargs)  # type: ignore[misc]
            self._watch()
        finally:
            witness, self._witness, self._last = self._witness, None, None
            if witness is not None:
                witness.close()
        self._settle()
        return done

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Do a step, as ``Trainer``; show the one before to the witness, which is complete now."""
        self._watch()
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self._watches:
            self._last = {"loss": loss, "batch": inputs}
        return loss

    def _watch(self) -> None:
        """Show the step that was done last to the witness; make that first. All ranks call it."""
        if not self._watches:
            return
        if self._witness is None:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            objects = {"model": self.model, "optimizer": inner, "scheduler": self.lr_scheduler}
            self._witness = Witness(self._run, **objects)
        last, self._last = self._last, None
        if last is not None:
            self._witness.step(**last)

    def _id_of(self, ref: str) -> str:
        try:
            return self._named(ref).id
        except errors.NotFoundError:
            return ""

    def _named(self, ref: str) -> Version:
        if "@" in ref or ref.startswith("#"):
            return self._store.resolve(ref)
        return self._run.resolve(ref)

    def _init_training_state(self, *args: Any) -> Any:  # as Trainer
        found = super()._init_training_state(*args)  # type: ignore[misc]
        if self._resumed is not None:
            saved = self._resumed["trainer_state"]
            self.state.best_model_checkpoint = saved.get("best_model_checkpoint")
        return found

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            again = self.args.auto_find_batch_size  # else not held for the whole training
            weights = self._resumed["model"] if again else self._resumed.pop("model")
            into = model if model is not None else self.model
            self._fill(into, weights, self._resumed.get("version", ""))

    def _fill(self, model: torch.nn.Module, weights: Any, ref: str) -> None:
        if sharded.is_sharded(model):
            sharded.fill(self._run, ref, {"model": model}, {})
            return
        self._issue_warnings_after_load(set_whole(model, weights))  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif "optimizer" in self._resumed:
            if sharded.is_sharded(self.model):
                part = {"optimizer": self._parts()["optimizer"]}
                sharded.fill(self._run, self._resumed["version"], part, self._resumed)
            else:
                self.optimizer.load_state_dict(self._resumed["optimizer"])
            self.lr_scheduler.load_state_dict(self._resumed["scheduler"])
            if not self.args.auto_find_batch_size:  # else a later try may need it again
                del self._resumed["optimizer"]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        elif "scaler" in self._resumed and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self._resumed["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif "rng" in self._resumed:
            resume_random(self._resumed["rng"])
            self._watch()  # all is restored, and nothing is drawn yet

    def _load_best_model(self) -> None:
        if from_first(lambda: self._preemption is not None and self._preemption.requested):
            return  # preempted: no time is left, and the training resumes elsewhere
        ref = str(self.state.best_model_checkpoint)
        if Path(ref).is_dir():
            super()._load_best_model()  # type: ignore[misc]
            return
        self._settle()
        one = from_first(lambda: self._id_of(ref))
        if not one:
            _log.warning("the best version, %s, was removed: the model stays as it is", ref)
            return
        wanted = ["trainer_state" if sharded.is_sharded(self.model) else "model"]
        state = on_all(lambda: self._store.load(f"#{one}", include=wanted))
        self._fill(self.model, state.get("model"), f"#{one}")

    # --- saving -------------------------------------------------------------------------------

    def _save_checkpoint(self, model: object, trial: object) -> None:
        if trial is not None:
            msg = "a hyper-parameter search needs a run for each trial"
            hint = "make one trainer for each, each with its own run"
            raise errors.InvalidInputError(msg, hint=hint)
        self.store_flos()  # type: ignore[attr-defined]
        self._settle()
        step = int(self.state.global_step)
        best = self.state.best_global_step
        if best and from_first(lambda: best == step or self._at(best) is not None):
            self.state.best_model_checkpoint = f"{self._run.name}@{best}"
        self._collect_callbacks()
        self._watch()
        noted = {} if self._witness is None else self._witness.metadata()
        state = self._whole_state()
        wanted: dict[str, Any] = {
            "step": step,
            "metrics": self._metrics(step),
            "metadata": {"transformers": {"epoch": self.state.epoch}, **noted},
            "roles": {BESIDE: "weights"},  # ageing keeps it with the weights
        }
        if sharded.is_sharded(self.model) and not sharded.wants_full(self.accelerator):
            keys, wanted["background"] = ("model", "optimizer"), self._background
            self._pending = sharded.save_parts(self._run, state, keys, **wanted)
            if not self._background:
                self._finish()
        elif not self._background:
            from_first(lambda: self._run.save(state, **wanted).id)  # all ranks raise its error
            self._rotate()
        else:
            from_first(lambda: self._begin(state, wanted))

    def _begin(self, state: dict[str, Any], wanted: Mapping[str, Any]) -> None:
        self._pending = self._run.save_async(state, **wanted)

    def _finalize_training(self, *args: Any) -> Any:  # as Trainer, which would delete folders
        self._settle()
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit

    def _whole_state(self) -> dict[str, Any]:
        """Return the state to save as a version. All ranks call it."""
        full = sharded.wants_full(self.accelerator)
        state: dict[str, Any] = {
            path: sharded.state_of(part, full=full, trained_only=self._trained_only)
            for path, part in self._parts().items()
            if path == "model" or not self.args.save_only_model
        }
        if not self.args.save_only_model:
            state["scheduler"] = self.lr_scheduler.state_dict()
            scaler = getattr(self.accelerator, "scaler", None)
            if scaler is not None:
                state["scaler"] = scaler.state_dict()
            state["rng"] = capture_all()
        named = {one.name: getattr(self.state, one.name) for one in fields(self.state)}
        state["trainer_state"] = json.loads(json.dumps(named))
        if place()[0] == 0:
            state[BESIDE] = describe_model(self.model, self.processing_class)
        return state

    def _collect_callbacks(self) -> None:
        """Put the states of callbacks into the trainer's state, as ``Trainer`` does."""
        from transformers.trainer_callback import ExportableState

        kept = self.state.stateful_callbacks
        again: dict[str, list[Any]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                again.setdefault(type(callback).__name__, []).append(callback.state())
        for name, states in again.items():
            kept[name] = states if isinstance(kept.get(name), list) else states[-1]

    def _metrics(self, step: int) -> dict[str, float]:
        """Return the numbers that were logged at a step."""
        logged = [entry.items() for entry in self.state.log_history if entry.get("step") == step]
        return {
            name: float(value)
            for name, value in chain(*logged)
            if isinstance(value, int | float)
            and name not in _NOT_METRICS
            and not name.endswith(_ENDINGS)
        }

    def _at(self, step: int) -> Version | None:
        try:
            return self._run.resolve(step)
        except (errors.RunNotFoundError, errors.VersionNotFoundError):
            return None

    def _settle(self) -> None:
        """Wait for the running save, and delete versions over the limit. All ranks call it."""
        if self._background:
            from_first(self._finish)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self._rotate()

    def _rotate(self) -> None:
        """Delete the oldest versions over ``save_total_limit``, never the newest or the best."""
        limit = self.args.save_total_limit
        if not limit or limit < 1 or place()[0] != 0:
            return
        try:
            self._delete_over(limit)
        except errors.CkptStoreError as error:  # the next save deletes them
            _log.warning("versions over save_total_limit stay for now: %s", error)

    def _delete_over(self, limit: int) -> None:
        mine = [
            version
            for version in self._run.versions()
            if "transformers" in version.metadata and not version.abandoned
        ]
        named = self.state.best_model_checkpoint  # of a version, or of a folder before a resume
        best = [one for one in mine if f"{self._run.name}@{one.step}" == named]
        safe = {version.id for version in (*mine[-1:], *best)}
        over = len(mine) - max(limit, len(safe))
        for version in [each for each in mine if each.id not in safe][: max(0, over)]:
            with suppress(errors.PolicyError):  # pinned, tagged, or the only verified one
                self._store.remove([f"#{version.id}"], reason="over save_total_limit")


def _check_hub(arguments: Any) -> None:  # TrainingArguments, or None for the default
    strategy = str(getattr(arguments, "hub_strategy", "")).rpartition(".")[2].lower()
    if getattr(arguments, "push_to_hub", False) and strategy != "end":
        msg = "push_to_hub needs a folder at every save"
        hint = "set hub_strategy='end', or push an exported folder"
        raise errors.InvalidInputError(msg, hint=hint)


def _stop_when_asked(preemption: Preemption) -> Any:  # a TrainerCallback
    """Return a callback that saves and stops at the step that all ranks agree on."""
    from transformers import TrainerCallback

    class StopWhenAsked(TrainerCallback):  # type: ignore[misc]  # not followed by mypy
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if preemption.should_stop(state.global_step):
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if preemption.stop_at is not None:  # on_step_end saved it
                control.should_save = control.should_evaluate = False

    return StopWhenAsked()
