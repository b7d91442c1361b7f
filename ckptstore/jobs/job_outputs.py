"""Files for people and other programs: exports, reports and metrics. They appear whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import NEW_FILE, sync_folder
from ckptstore.config import SYSTEM
from ckptstore.errors import CkptStoreError, ConflictError, StorageError

_HINT: Final = "name a file in a folder that exists, can be written to and has space"


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before the job that writes it at its end.

    Raises
    ------
    StorageError
        It is no regular file, or its folder is missing or cannot be written to.
    """
    folder = Path(os.path.realpath(path)).parent
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} cannot be written: it is no regular file", hint=_HINT)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{path} cannot be written: no file can be made in {folder}", hint=_HINT)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file: readers see either the old one or the new one, whole.

    Raises
    ------
    StorageError
        It cannot be written; the old one is unchanged.
    """
    with new_file(path) as file:
        file.write(data)


@contextmanager
def new_file(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that gets its name, durably, if the block succeeds, and is removed otherwise.

    It keeps owner, group and mode of a file that it replaces; else the umask decides. The target of
    a symbolic link is replaced, and the link stays. Between the last check and the rename another
    process could make the file, which is then replaced.

    Raises
    ------
    ConflictError
        The file exists, and `overwrite` is False.
    StorageError
        It cannot be written; an old one is unchanged.
    """
    final = Path(os.path.realpath(path))
    temporary = final.with_name(f".{final.name[:200]}.{SYSTEM.random_hex(8)}.tmp")
    try:
        _check_free(final, overwrite=overwrite)
        if final.exists() and not final.is_file():
            raise StorageError(f"{path} cannot be written: it is no regular file", hint=_HINT)
        old = final.stat() if os.path.lexists(final) else None
        mode = 0o666 if old is None else 0o600
        with os.fdopen(os.open(temporary, NEW_FILE, mode), "wb") as file:
            yield file
            file.flush()
            if old is not None:
                keep_access(temporary, old)
            os.fsync(file.fileno())
        _check_free(final, overwrite=overwrite)
        temporary.replace(final)
        sync_folder(str(final.parent))
    except CkptStoreError:
        raise
    except OSError as error:
        raise translate(error, f"{path} cannot be written", writing=True) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def keep_access(new: Path, old: os.stat_result) -> None:
    """Give a file the owner, group and mode of another; nobody gains a right."""
    made, mode = new.stat(), stat.S_IMODE(old.st_mode) & 0o777
    if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(new, -1, old.st_gid)
        except OSError:
            mode &= ~0o070
        with suppress(OSError):
            os.chown(new, old.st_uid, -1)
    new.chmod(mode)


def _check_free(path: Path, *, overwrite: bool) -> None:
    if not overwrite and path.exists():
        msg = f"{path} is there already"
        raise ConflictError(msg, hint="choose another name, or overwrite it (--force)")
