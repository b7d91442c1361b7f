"""Lightning, for programs that ``import lightning``; see docs/howto/lightning.md.

    io = CkptStoreIO(store, "gpt", metrics={"val_loss": "min"})
    trainer = Trainer(plugins=[io], callbacks=[CkptStoreCallback(io), ModelCheckpoint(...)])
    trainer.fit(model, ckpt_path=io.resume)
    trainer.test(model, ckpt_path="gpt@best:val_loss")

The packages ``lightning`` and ``pytorch_lightning`` hold the same classes twice, and refuse each
other's; for the other one there is :mod:`ckptstore.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from ckptstore.errors import MissingDependencyError
from ckptstore.integrations.lightning_callback import LoopState
from ckptstore.integrations.lightning_loop import LoopIO

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "lightning is not installed", hint="pip install 'ckptstore[lightning]'"
    ) from error


class CkptStoreIO(LoopIO, CheckpointIO):  # type: ignore[misc]  # not followed by mypy
    """A ``CheckpointIO`` plugin that saves to a run and loads by ref.

    For strategies that hold the whole state on rank 0 (one device, DDP). FSDP, DeepSpeed and
    ModelParallel write files of their own and refuse such plugins.
    """


class CkptStoreCallback(LoopState, Callback):  # type: ignore[misc]  # not followed by mypy
    """A ``Callback``: gives versions metrics and random state, and ends when preempted."""
