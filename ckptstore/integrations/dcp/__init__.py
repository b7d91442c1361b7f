"""``torch.distributed.checkpoint`` on a store, and import of its directories as versions.

``dcp.save(state, storage_writer=CkptStoreWriter(run, step=100))`` and
``dcp.load(state, storage_reader=CkptStoreReader(run))``. Imported on first use:
:mod:`ckptstore.integrations.dcp.directory`, which reads directories, needs no torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.integrations.libraries import on_first_use

if TYPE_CHECKING:
    from ckptstore.integrations.dcp.directory import import_directory
    from ckptstore.integrations.dcp.reader import CkptStoreReader
    from ckptstore.integrations.dcp.writer import CkptStoreWriter

__all__ = ["CkptStoreReader", "CkptStoreWriter", "import_directory"]

_LAZY = {
    "CkptStoreReader": "ckptstore.integrations.dcp.reader",
    "CkptStoreWriter": "ckptstore.integrations.dcp.writer",
    "import_directory": "ckptstore.integrations.dcp.directory",
}

if not TYPE_CHECKING:  # so that type checkers still report misspelled names
    __getattr__ = on_first_use(__name__, _LAZY)
