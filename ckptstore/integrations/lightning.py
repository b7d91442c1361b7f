"""Lightning, for programs that ``import lightning``; see docs/howto/lightning.md.

    io = CkptStoreIO(store, "gpt", metrics={"val_loss": "min"})
    trainer = Trainer(plugins=[io], callbacks=[CkptStoreCallback(io), ModelCheckpoint(...)])
    trainer.fit(model, ckpt_path=io.resume)
    trainer.test(model, ckpt_path="gpt@best:val_loss")

The packages ``lightning`` and ``pytorch_lightning`` hold the same classes twice, and refuse each
other's; for the other one there is :mod:`ckptstore.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from ckptstore.integrations.libraries import library
from ckptstore.integrations.lightning_callback import LoopState
from ckptstore.integrations.lightning_loop import LoopIO, ModelParallelParts

with library("lightning", "'ckptstore[lightning]'"):
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import ModelParallelStrategy


class CkptStoreIO(LoopIO, CheckpointIO):  # type: ignore[misc]  # not followed by mypy
    """A ``CheckpointIO`` plugin that saves to a run and loads by ref.

    For strategies that hold the whole state on rank 0 (one device, DDP), and for
    :class:`CkptStoreModelParallel`. FSDPStrategy, DeepSpeed's and ModelParallelStrategy itself
    write files of their own.
    """


class CkptStoreModelParallel(ModelParallelParts, ModelParallelStrategy):  # type: ignore[misc]
    """A ``ModelParallelStrategy`` (FSDP2, tensor parallel) that saves with the CkptStoreIO."""


class CkptStoreCallback(LoopState, Callback):  # type: ignore[misc]  # not followed by mypy
    """A ``Callback``: gives versions metrics and random state, and ends when preempted."""
