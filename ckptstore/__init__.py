"""ckptstore: a content-addressed, verified checkpoint store for deep learning.

Names are loaded on first use, so that ``import ckptstore`` and the command line start quickly and
do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptstore.errors import CkptStoreError, StorageError

if TYPE_CHECKING:
    from ckptstore.catalog.early_stopping import DivergenceGuard, EarlyStopping
    from ckptstore.encodings.encoding import Encoding
    from ckptstore.events import Progress
    from ckptstore.model import Receipt, ReplicaInfo, RoleBytes, RunInfo, Version
    from ckptstore.saver.pending import PendingSave
    from ckptstore.states.lazy import LazyTensor, LazyVersion
    from ckptstore.store import Run, Store, mend_keys, mend_superblock, rotate_key
    from ckptstore.store import open_store as open
    from ckptstore.tensors.adapters import TypeAdapter

__version__ = "0.1.0"

__all__ = [
    "CkptStoreError",
    "DivergenceGuard",
    "EarlyStopping",
    "Encoding",
    "LazyTensor",
    "LazyVersion",
    "PendingSave",
    "Progress",
    "Receipt",
    "ReplicaInfo",
    "RoleBytes",
    "Run",
    "RunInfo",
    "StorageError",
    "Store",
    "TypeAdapter",
    "Version",
    "mend_keys",
    "mend_superblock",
    "open",
    "rotate_key",
]

_MODULES = {
    "ckptstore.catalog.early_stopping": ("DivergenceGuard", "EarlyStopping"),
    "ckptstore.encodings.encoding": ("Encoding",),
    "ckptstore.events": ("Progress",),
    "ckptstore.model": ("Receipt", "ReplicaInfo", "RoleBytes", "RunInfo", "Version"),
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
        raise AttributeError(msg)


def __dir__() -> list[str]:
    """List the public names, lazy ones included."""
    return sorted(__all__)
