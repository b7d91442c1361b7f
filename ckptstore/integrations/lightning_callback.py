"""State of a Lightning loop besides its checkpoints; does not import Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.errors import InvalidInputError
from ckptstore.integrations.lightning_loop import LoopIO
from ckptstore.integrations.preemption import Preemption
from ckptstore.integrations.randomness import (
    capture,
    capture_all,
    restore,
    restore_mine,
    resume_random,
)
from ckptstore.resuming.witness import Witness

__all__ = ["LoopState"]


class LoopState:
    """The methods of a Lightning ``Callback`` that complete a :class:`LoopIO`.

    It gives each version the metrics of its step, and not those of an earlier validation; saves the
    random number generators of every rank and restores them when a fit is resumed; saves and
    stops on preemption.

    Parameters
    ----------
    io
        The trainer's plugin for saving.
    rng
        Save and restore the generators of Python, NumPy and torch.
    witness
        Compare a resumed training with the saved one (:class:`ckptstore.Witness`): module,
        optimizers, schedulers, generators, and each step's batch, loss and gradients. The report is
        logged, and kept with the version.
    preemption
        Checked after every batch. When all ranks agree to stop, the state is saved, and SystemExit
        is raised with ``preemption.exit_code``. Replaces Lightning's handler of SIGTERM.
    """

    def __init__(
        self,
        io: LoopIO,
        *,
        rng: bool = True,
        preemption: Preemption | None = None,
        witness: bool = False,
    ) -> None:
        self._io = io
        self._rng = rng
        self._preemption = preemption
        self._watches = witness
        self._witness: Witness | None = None
        self._restored: Mapping[str, Any] | None = None
        self._asked = 0
        self._began = False
        self._before: dict[str, object] = {}

    @property
    def state_key(self) -> str:
        """Key of its state among those of the callbacks."""
        return "ckptstore"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the plugin the trainer.

        Raises
        ------
        InvalidInputError
            The trainer does not save with the plugin, so that nothing would reach the store; or a
            callback wants links to files.
        """
        owner = trainer.strategy.save_checkpoint.__qualname__.partition(".")[0]
        if owner in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
            msg = f"{owner} writes files, and does not ask the CkptStoreIO"
            raise InvalidInputError(msg, hint="use CkptStoreModelParallel")
        used = trainer.strategy.checkpoint_io
        while used is not None and used is not self._io:  # other plugins may wrap it
            used = getattr(used, "checkpoint_io", None)
        if used is None:
            msg = "the trainer does not save with the CkptStoreIO of its CkptStoreCallback"
            hint = "pass both: Trainer(plugins=[io], callbacks=[CkptStoreCallback(io), ...])"
            raise InvalidInputError(msg, hint=hint)
        self._io.attach(trainer)
        for one in trainer.checkpoint_callbacks:
            if getattr(one, "save_last", None) == "link":
                msg = "ModelCheckpoint(save_last='link') links to a file, and there is none"
                raise InvalidInputError(msg, hint="use save_last=True")
            one.file_exists = self._io.has_saved  # Lightning looks for files

    def state_dict(self) -> dict[str, Any]:
        """Return the generators of all ranks. All ranks call it."""
        return {"rng": capture_all()} if self._rng else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the generators for the fit that follows, or set those of the fit that has begun."""
        self._restored = state_dict.get("rng")
        if self._began:
            self._set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators: after all setup, before the first batch is drawn.

        Strategies for sharded models load later than this.
        """
        self._began = True
        self._set()

    def _set(self) -> None:
        if self._rng and self._restored is not None:
            resume_random(self._restored)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics from before the validation."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass the new metrics to the plugin, before ModelCheckpoint saves."""
        for name, value in trainer.callback_metrics.items():
            if self._before.get(name) is not value:
                self._io.validated(name, trainer.global_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators of a fit that resumes in the middle of an epoch; take signals back.

        At this point the loader has restarted and has drawn from the generators, which it had not
        when the version was saved. As to signals: Lightning's handler would start a collective
        inside of a handler.
        """
        restored, self._restored, self._began = self._restored, None, False
        progress = trainer.fit_loop.epoch_loop.batch_progress
        within_epoch = progress.current.ready > 0 and not progress.is_last_batch
        if self._rng and restored is not None and within_epoch:
            restore_mine(restored)
        if self._preemption is not None:
            self._preemption.take_back()
        if self._watches:
            self._watch(trainer, pl_module, None if within_epoch else restored)

    def _watch(self, trainer: Any, module: Any, restored: Mapping[str, Any] | None) -> None:
        """Make the witness, which compares what was restored. All ranks call it.

        The loader of an epoch that begins has drawn since the generators were restored, which it
        had not at the save: they are put back for the comparison.
        """
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        named = {
            "module": module,
            **{f"optimizer_{at}": one for at, one in enumerate(trainer.optimizers)},
            **{f"schedule_{at}": one for at, one in enumerate(schedules)},
            "global_step": lambda: trainer.global_step,
        }
        now = capture()
        if self._rng and restored is not None:
            restore_mine(restored)
        try:
            self._witness = Witness(self._io.run, **named)
        finally:
            restore(now)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Give the version the witness of this moment. All ranks call it."""
        if self._witness is not None:
            self._io.noted = self._witness.metadata()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait until what the witness noted is kept with its version."""
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.close()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Show the step to the witness; save and stop if the end was announced."""
        if self._witness is not None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            self._witness.step(loss=loss, batch=batch)
        preemption, step = self._preemption, trainer.global_step
        if preemption is None or step == self._asked:  # gradients are still accumulating
            return
        self._asked = step
        if not preemption.should_stop(step):
            return
        trainer.save_checkpoint(f"preempted-step={step}")
        self._io.teardown()
        raise SystemExit(preemption.exit_code)
