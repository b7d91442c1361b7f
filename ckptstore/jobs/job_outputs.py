"""Files of a job, which other programs read while it writes them: reports and metrics."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ckptstore.errors import StorageError


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before the job that writes it at its end.

    Raises
    ------
    StorageError
        It is a folder, or its folder is missing or cannot be written to.
    """
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = "its folder is not there"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = "its folder cannot be written to"
    if why:
        msg = f"{path} cannot be written: {why}"
        raise StorageError(msg, hint="name a file in a folder that is there")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file: readers see either the old one or the new one, whole.

    Raises
    ------
    StorageError
        It cannot be written; the old one is unchanged.
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
        hint = "name a file in a folder that exists, can be written to and has space"
        raise StorageError(msg, hint=hint) from error
