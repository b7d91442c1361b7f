"""State of a Lightning loop besides its checkpoints; does not import Lightning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInputError
from ckptstore.integrations.randomness import capture_all, restore_mine

if TYPE_CHECKING:
    from ckptstore.integrations.lightning_loop import LoopIO
    from ckptstore.integrations.preemption import Preemption

__all__ = ["LoopState"]

_log = logging.getLogger("ckptstore")


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
    preemption
        Checked after every batch. When all ranks agree to stop, the trainer's state is saved, and
        SystemExit is raised with ``preemption.exit_code``. Lightning's own handler of SIGTERM is
        replaced during a fit.
    """

    def __init__(
        self, io: LoopIO, *, rng: bool = True, preemption: Preemption | None = None
    ) -> None:
        self._io = io
        self._rng = rng
        self._preemption = preemption
        self._restored: Mapping[str, Any] | None = None
        self._asked = 0
        self._before: dict[str, object] = {}

    @property
    def state_key(self) -> str:
        """Key of its state among those of the callbacks."""
        return "ckptstore"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ANN401
        """Give the plugin the trainer.

        Raises
        ------
        InvalidInputError
            The trainer does not save with the plugin, so that nothing would reach the store.
        """
        used = trainer.strategy.checkpoint_io
        while used is not None and used is not self._io:  # other plugins may wrap it
            used = getattr(used, "checkpoint_io", None)
        if used is None:
            msg = "the trainer does not save with the CkptStoreIO of its CkptStoreCallback"
            hint = "pass both: Trainer(plugins=[io], callbacks=[CkptStoreCallback(io), ...])"
            raise InvalidInputError(msg, hint=hint)
        self._io.attach(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators of all ranks. All ranks call it."""
        return {"rng": capture_all()} if self._rng else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the generators for the fit that follows."""
        self._restored = state_dict.get("rng")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Set the generators: after all setup, before the first batch is drawn."""
        if self._rng and self._restored is not None and not restore_mine(self._restored):
            _log.warning("the version has no random state of this rank: it goes on with another")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Record the metrics from before the validation."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Pass the new metrics to the plugin, before ModelCheckpoint saves."""
        for name, value in trainer.callback_metrics.items():
            if self._before.get(name) is not value:
                self._io.validated(name, trainer.global_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Set the generators of a fit that resumes in the middle of an epoch; take signals back.

        At this point the loader has restarted and has drawn from the generators, which it had not
        when the version was saved. As to signals: Lightning's handler would start a collective
        inside of a handler.
        """
        restored, self._restored = self._restored, None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        within_epoch = progress.current.ready > 0 and not progress.is_last_batch
        if self._rng and restored is not None and within_epoch:
            restore_mine(restored)
        if self._preemption is not None:
            self._preemption.take_back()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # noqa: ANN401
        """Save and stop if the end was announced."""
        preemption, step = self._preemption, trainer.global_step
        if preemption is None or step == self._asked:  # gradients are still accumulating
            return
        self._asked = step
        if not preemption.should_stop(step):
            return
        trainer.save_checkpoint(f"preempted-step={step}")
        self._io.teardown()
        raise SystemExit(preemption.exit_code)
