"""torchtitan: its ``CheckpointManager`` on a run of a store; see docs/howto/torchtitan.md.

::

    trainer = Trainer(job_config)
    store_checkpoints(trainer, store.run("llama"))
    trainer.train()  # resumes from the run's newest version, if there is one
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from ckptstore.errors import InvalidInputError, MissingDependencyError
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.dcp.reader import CkptStoreReader
from ckptstore.integrations.dcp.writer import CkptStoreWriter
from ckptstore.integrations.ranks import from_first, place
from ckptstore.integrations.sharded_states import raised
from ckptstore.store import Run
from ckptstore.store.version_lookup import named_version

try:
    from torchtitan.components import checkpoint as titan
except ModuleNotFoundError as error:
    msg = f"torchtitan 0.2 cannot be imported: {error}"
    hint = "pip install 'ckptstore[torchtitan]'; it needs Triton, which PyTorch for CPUs lacks"
    raise MissingDependencyError(msg, hint=hint) from error

if TYPE_CHECKING:
    from torchtitan.config import Checkpoint


class CkptStoreManager(titan.CheckpointManager):  # type: ignore[misc]  # not followed by mypy
    """A ``CheckpointManager`` that saves to a run, and loads from it.

    The section ``checkpoint`` of the job's config applies: ``interval``, ``load_step``,
    ``async_mode``, ``exclude_from_loading``, ``last_save_model_only`` ... Each rank writes its
    part; one commit makes the version. While the run has no version, ``initial_load_path`` and
    folders ``step-N`` are loaded as torchtitan does; the path may also be a ref of the store, such
    as ``pretrained@best:loss``. ``keep_latest_k`` deletes older versions by a commit, unless a
    retention policy holds for the run, which then decides.

    Parameters
    ----------
    run
        The run, of a store that every rank has opened.
    checkpoint_config, ft_manager, words
        As of ``CheckpointManager``.

    Raises
    ------
    InvalidInputError
        ``last_save_in_hf`` is set, or torchft replicates the training: both write folders. Or `run`
        is no run of a store.
    """

    def __init__(
        self, run: Run, *, checkpoint_config: Checkpoint, ft_manager: Any = None, **words: Any
    ) -> None:
        check_run(run)
        if checkpoint_config.last_save_in_hf:
            msg = "checkpoint.last_save_in_hf writes a folder, and not a version"
            raise InvalidInputError(msg, hint="turn it off, and export the last version")
        if ft_manager is not None and ft_manager.enabled:
            msg = "torchft saves the position of each replica in a folder of its own"
            raise InvalidInputError(msg, hint="use torchtitan's own CheckpointManager with torchft")
        self._run = run
        super().__init__(checkpoint_config=checkpoint_config, ft_manager=ft_manager, **words)
        if self.enable:
            titan.logger.info("Checkpoints are versions of the run %s, and no folders.", run.name)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | Any | None:
        """Save a version; its step is the number in `checkpoint_id`, ``.../step-100``.

        Raises
        ------
        CkptStoreError
            A rank failed, with the error of the first one that did; no version appeared. In
            the background, the next save raises it.
        """
        del to_hf  # refused at the beginning
        writer = CkptStoreWriter(self._run, step=int(checkpoint_id.rpartition("step-")[2]))
        words: dict[str, Any] = {"state_dict": state_dict, "storage_writer": writer}
        saving = None
        if async_mode == titan.AsyncMode.DISABLED:
            raised(lambda: state_dict_saver.save(**words))
        else:
            if async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
                words["async_checkpointer_type"] = state_dict_saver.AsyncCheckpointerType.PROCESS
                words["async_stager"] = self.stager
            saving = raised(lambda: state_dict_saver.async_save(**words, process_group=self.pg))
        if enable_garbage_collection:
            titan.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saving

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a version by its ref; or a folder, as torchtitan does.

        Raises
        ------
        CkptStoreError
            A rank could not read the version.
        """
        if from_hf or Path(checkpoint_id).is_dir():
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        session = self._run._session
        version = named_version(session.repo, checkpoint_id)
        reader = CkptStoreReader(Run(session, version.run, {}), f"#{version.id}")
        raised(lambda: state_dict_loader.load(state_dict, storage_reader=reader))
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the version of a step, or the newest one; return whether anything was loaded.

        All ranks call it. Of a version of step 0, a seed, only the model is loaded.

        Raises
        ------
        RunNotFoundError, VersionNotFoundError
            The run has no version of this step.
        CkptStoreError
            A rank could not read it.
        """
        if not self.enable:
            return False
        found = from_first(lambda: self._chosen(step))
        if found is None:
            return bool(super().load(step))
        ref, model_only = found
        titan.logger.info("Loading the version %s of the run %s.", ref, self._run.name)
        self.dcp_load(self._states_to_load(model_only), ref, from_hf=False, from_quantized=False)
        titan.GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _chosen(self, step: int) -> tuple[str, bool] | None:
        """Return the ref to load, and whether only the model is; None if the store has nothing."""
        if step >= 0 or self._run.head is not None:
            version = self._run.resolve(step if step >= 0 else "latest")
            return f"#{version.id}", version.step == 0
        path = self.initial_load_path or ""
        if "@" not in path or Path(path).exists() or Path(self.folder).exists():
            return None
        version = named_version(self._run._session.repo, path)
        return f"#{version.id}", self.initial_load_model_only

    def _purge_stale_checkpoints(self) -> None:
        """Delete versions by the run's policy, or all but the latest ``keep_latest_k``."""
        if self.keep_latest_k > 0 and place()[0] == 0:
            self._run._retain_after_save(f"last {self.keep_latest_k}")


def store_checkpoints(trainer: Any, run: Run) -> CkptStoreManager:  # a Trainer
    """Replace the ``CheckpointManager`` of a torchtitan ``Trainer``; call it before ``train``.

    All ranks call it.

    Parameters
    ----------
    trainer
        A ``torchtitan.train.Trainer``, or an object of a class derived from it.
    run
        The run, of a store that every rank has opened.

    Raises
    ------
    InvalidInputError
        ``checkpoint.enable`` is not set; or as of :class:`CkptStoreManager`.
    """
    config, before = trainer.job_config.checkpoint, trainer.checkpointer
    if not config.enable:
        msg = "checkpoint.enable is not set, so torchtitan would neither save nor load"
        raise InvalidInputError(msg, hint="--checkpoint.enable")
    names = ("dataloader", "model_parts", "optimizers", "lr_schedulers")
    manager = CkptStoreManager(
        run,
        **{name: getattr(trainer, name) for name in names},
        states=before.states,
        checkpoint_config=config,
        sd_adapter=before.sd_adapter,
        base_folder=trainer.job_config.job.dump_folder,
        ft_manager=getattr(trainer, "ft_manager", None),
    )
    before.close()
    trainer.checkpointer = manager
    return manager
