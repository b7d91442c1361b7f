"""Files of other programs: import into a run, export from a version.

The two directions are :mod:`ckptstore.integrations.file_import` (needs torch) and
:mod:`ckptstore.integrations.safetensors_stream` (does not), and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.integrations.libraries import on_first_use

if TYPE_CHECKING:
    from ckptstore.integrations.deepspeed import export_universal
    from ckptstore.integrations.file_import import import_file
    from ckptstore.integrations.folder_import import import_folder
    from ckptstore.integrations.safetensors_stream import Exported, export_safetensors

__all__ = ["Exported", "export_safetensors", "export_universal", "import_file", "import_folder"]

_LAZY = {
    "Exported": "ckptstore.integrations.safetensors_stream",
    "export_safetensors": "ckptstore.integrations.safetensors_stream",
    "export_universal": "ckptstore.integrations.deepspeed",
    "import_file": "ckptstore.integrations.file_import",
    "import_folder": "ckptstore.integrations.folder_import",
}

if not TYPE_CHECKING:  # so that type checkers still report misspelled names
    __getattr__ = on_first_use(__name__, _LAZY)
