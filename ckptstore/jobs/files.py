"""Files that others read while a job writes them: reports and metrics."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ckptstore.errors import StorageError

__all__ = ["replace_file"]


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in the place of another: readers see the old one or the new one, whole.

    Raises
    ------
    StorageError
        It cannot be written; the old one is as it was.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        written = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            written.chmod(0o644)
            written.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                written.unlink()
            raise
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}"
        raise StorageError(msg, hint="name a file in a folder that is there") from error
