"""Files of other programs: import into a run, export from a version.

The two directions are :mod:`ckptstore.integrations.file_import` (needs torch) and
:mod:`ckptstore.integrations.safetensors_export` (does not), and are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptstore.integrations.file_import import import_file
    from ckptstore.integrations.safetensors_export import Exported, export_safetensors

__all__ = ["Exported", "export_safetensors", "import_file"]

_LAZY = {
    "Exported": "ckptstore.integrations.safetensors_export",
    "export_safetensors": "ckptstore.integrations.safetensors_export",
    "import_file": "ckptstore.integrations.file_import",
}

if not TYPE_CHECKING:  # so that type checkers still report misspelled names

    def __getattr__(name: str) -> object:
        """Import the module behind a name (PEP 562)."""
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
