"""Temporary files that writers left behind when they died."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ckptstore.backends.base import Leftovers, check_key
from ckptstore.backends.oserrors import ABSENT, translate
from ckptstore.errors import InvalidKeyError

_TEMP: Final = re.compile(r"\.tmp-[0-9a-f]{32}\Z")  # as posix_publish.TempFile names them
# Other files below the root of a store are not ckptstore's.
_FOLDERS: Final = ("commits", "snapshots", "manifests", "packs", "probe")


def remove_temp_files(root: str, *, modified_before: float, dry_run: bool) -> Leftovers:
    """Unlink the temporary files below `root` last written before a time; return their count.

    Parameters
    ----------
    modified_before
        Seconds since 1970, by the clock of the file system.
    dry_run
        Only count.

    Raises
    ------
    StorageError
        A folder could not be read, or a file not removed.
    """
    count = size = 0
    for path, info in _temp_files(root, ""):
        if info.st_mtime >= modified_before:
            continue
        if not dry_run:
            try:
                os.unlink(path)  # noqa: PTH108 - plain strings, as in all of this backend
            except FileNotFoundError:
                continue  # another collection was faster
            except OSError as error:
                raise translate(error, f"remove {path}") from error
        count += 1
        size += info.st_size
    return Leftovers(count=count, size_bytes=size)


def _temp_files(root: str, base: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and state of the temporary files in a folder and those below it."""
    path = f"{root}/{base}".rstrip("/")
    folders = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if _is_name(entry.name) and (base or entry.name in _FOLDERS):
                        folders.append(entry.name)
                elif _TEMP.match(entry.name):
                    with suppress(FileNotFoundError):  # its writer lives, and has just finished
                        yield entry.path, entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in ABSENT:
            return
        raise translate(error, f"list {base}") from error
    for name in folders:
        yield from _temp_files(root, f"{base}{name}/")


def _is_name(name: str) -> bool:
    try:
        return check_key(name) is not None
    except InvalidKeyError:
        return False
