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

_LAZY = {
    "DivergenceGuard": ("ckptstore.catalog.early_stopping", "DivergenceGuard"),
    "EarlyStopping": ("ckptstore.catalog.early_stopping", "EarlyStopping"),
    "Encoding": ("ckptstore.encodings.encoding", "Encoding"),
    "LazyTensor": ("ckptstore.states.lazy", "LazyTensor"),
    "LazyVersion": ("ckptstore.states.lazy", "LazyVersion"),
    "PendingSave": ("ckptstore.saver.pending", "PendingSave"),
    "Progress": ("ckptstore.events", "Progress"),
    "Receipt": ("ckptstore.model", "Receipt"),
    "ReplicaInfo": ("ckptstore.model", "ReplicaInfo"),
    "RoleBytes": ("ckptstore.model", "RoleBytes"),
    "Run": ("ckptstore.store", "Run"),
    "RunInfo": ("ckptstore.model", "RunInfo"),
    "Store": ("ckptstore.store", "Store"),
    "TypeAdapter": ("ckptstore.tensors.adapters", "TypeAdapter"),
    "Version": ("ckptstore.model", "Version"),
    "mend_keys": ("ckptstore.store", "mend_keys"),
    "mend_superblock": ("ckptstore.store", "mend_superblock"),
    "open": ("ckptstore.store", "open_store"),
    "rotate_key": ("ckptstore.store", "rotate_key"),
}

if not TYPE_CHECKING:  # so that type checkers still report misspelled names

    def __getattr__(name: str) -> object:
        """Import the module behind a lazily exported name (PEP 562)."""
        if name in _LAZY:
            module, attribute = _LAZY[name]
            return getattr(importlib.import_module(module), attribute)
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)


def __dir__() -> list[str]:
    """List the public names, lazy ones included."""
    return sorted(__all__)
