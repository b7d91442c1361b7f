"""ckptstore: a content-addressed, verified checkpoint store for deep learning.

::

    store = ckptstore.open("ckpts", create=True)  # a path, s3://bucket/ckpts, gs://..., az://...
    run = store.run("gpt", metrics={"val_loss": "min"})
    run.save({"model": model.state_dict()}, step=100, metrics={"val_loss": 2.3})
    state = run.load("best:val_loss")  # or "latest", a step, a tag

Errors are names of the package (``ckptstore.RunNotFoundError``), types of results are in
:mod:`ckptstore.reports`, and files of other programs in :mod:`ckptstore.integrations.files`. Names
are loaded on first use, so that ``import ckptstore`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptstore import errors
from ckptstore.errors import *  # noqa: F403 - every class, by the list there

if TYPE_CHECKING:
    from ckptstore.catalog.early_stopping import DivergenceGuard, EarlyStopping
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.events import Progress
    from ckptstore.model import Receipt, ReplicaInfo, RoleBytes, RunInfo, Version
    from ckptstore.resuming.comparison import ResumeReport
    from ckptstore.resuming.witness import Witness
    from ckptstore.saver.pending import PendingSave
    from ckptstore.states.lazy import LazyTensor, LazyVersion
    from ckptstore.store import Run, Store, mend_keys, mend_superblock, rotate_key
    from ckptstore.store import open_store as open
    from ckptstore.tensors.adapters import TypeAdapter

__version__ = "0.2.0"

__all__ = [
    "DivergenceGuard", "EarlyStopping", "Encoding", "LazyTensor",
    "LazyVersion", "PendingSave", "Progress", "Receipt", "ReplicaInfo", "ResumeReport",
    "RoleBytes", "Run", "RunInfo", "Store", "TypeAdapter", "Version", "Witness", "mend_keys",
    "mend_superblock", "open", "rotate_key",
]  # fmt: skip
__all__ += errors.__all__

_MODULES = {
    "ckptstore.catalog.early_stopping": ("DivergenceGuard", "EarlyStopping"),
    "ckptstore.encodings.encoding": ("Encoding",),
    "ckptstore.events": ("Progress",),
    "ckptstore.model": ("Receipt", "ReplicaInfo", "RoleBytes", "RunInfo", "Version"),
    "ckptstore.resuming.comparison": ("ResumeReport",),
    "ckptstore.resuming.witness": ("Witness",),
    "ckptstore.saver.pending": ("PendingSave",),
    "ckptstore.states.lazy": ("LazyTensor", "LazyVersion"),
    "ckptstore.store": ("Run", "Store", "mend_keys", "mend_superblock", "open", "rotate_key"),
    "ckptstore.tensors.adapters": ("TypeAdapter",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # so that type checkers still report misspelled names

    def __getattr__(name: str) -> object:
        """Import the module behind a lazily exported name (PEP 562)."""
        if name in _LAZY:
            attribute = "open_store" if name == "open" else name
            return getattr(importlib.import_module(_LAZY[name]), attribute)
        msg = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(msg)
        from ckptstore.suggestions import meant

        raise errors.UnknownNameError(msg, hint=meant("ckptstore", name, __all__))


def __dir__() -> list[str]:
    """List the public names, lazy ones included."""
    return sorted(__all__)
