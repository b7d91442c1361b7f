"""Reads a folder tree: its files as sorted keys, and the temporary files of dead writers.

Where the client caches lookups and listings (NFS), both are made fresh. Two caches were measured
between Linux clients and a Linux server:

* A failed lookup is cached for 30 s and more, of files and of *folders*. Opening the folder
  above asks the server, which drops the cached entries below it if that folder has changed.
* A listing is cached until the folder's modification time changes. On NFS 3 that time has the
  resolution of a clock tick (4 to 10 ms): a listing between two changes within one tick hides the
  second, not for a while but until the next change (still hidden after 70 s). Dropping the cached
  pages of the folder helps; `posix_fadvise` does that.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Leftovers, ObjectInfo, is_key
from ckptstore.backends.oserrors import ABSENT, translate
from ckptstore.backends.posix_publish import FOLDER

TEMP: Final = re.compile(r"\.tmp-[0-9a-f]{32}\Z")  # as posix_publish.TempFile names them
WITH_TEMPS: Final = ("commits", "snapshots", "manifests", "packs", "probe")
"""Folders of a store; other files below its root are not ckptstore's."""
_EXCLUSIVE: Final = "commits/"


def walk(root: str, prefix: str, after: str, *, relist: bool = False) -> Iterator[ObjectInfo]:
    """Yield the objects under `root` whose key begins with `prefix` and sorts after `after`.

    Each folder is read in one go when the walk reaches it. Symbolic links, special files, names
    that break the key rules, and entries that vanish during the walk are left out. Only among
    commits, whose next name decides, a folder or link that takes a name is told, with size -1.

    Parameters
    ----------
    relist
        Trust no cached listing and no cached absence of a folder.

    Raises
    ------
    StorageError
        A folder could not be read.
    """
    above = prefix.rpartition("/")[0]
    yield from _folder(root, f"{above}/" if above else "", prefix, after, relist)


def _folder(root: str, base: str, prefix: str, after: str, relist: bool) -> Iterator[ObjectInfo]:
    path = f"{root}/{base}".rstrip("/")
    for name, entry in _fresh_entries(path, base) if relist else _entries(path, base):
        key = base + name
        if name.endswith("/") and not (key.startswith(_EXCLUSIVE) and key.endswith(".json/")):
            # All keys below begin with `key`: skip it when none can qualify.
            wanted = key.startswith(prefix) or prefix.startswith(key)
            if wanted and (after < key or after.startswith(key)):
                yield from _folder(root, key, prefix, after, relist)
        elif (key := key.rstrip("/")) > after and key.startswith(prefix):
            found = _state(entry, key)
            if found is not None and stat.S_ISREG(found.st_mode):
                yield ObjectInfo(key=key, size_bytes=found.st_size, modified_at=found.st_mtime)
            elif found is not None and key.startswith(_EXCLUSIVE):
                yield ObjectInfo(key=key, size_bytes=-1, modified_at=found.st_mtime)


def _fresh_entries(path: str, base: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return the entries that the server has now, not those that this client has cached."""
    for _ in range(limits.STALE_TRIES):
        try:
            _forget_listing(path)
            break
        except OSError as error:
            if error.errno not in ABSENT:
                raise translate(error, f"list {base}") from error
            if not is_listed(path):
                return []
    return _entries(path, base)


def _entries(path: str, base: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return the entries of one folder in the order of their keys; folders end in ``/``."""
    found = [
        (f"{entry.name}/" if is_folder else entry.name, entry)
        for entry, is_folder in _scan(path, base, is_key)
    ]
    return sorted(found, key=lambda item: item[0])


def _scan(
    path: str, base: str, wanted: Callable[[str], object]
) -> list[tuple[os.DirEntry[str], bool]]:
    """Return entries of a folder, each with whether it is a folder; none if it is absent.

    Names that are not wanted are not looked at: what others put there may answer with errors.
    """
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if wanted(entry.name)]
            return [(entry, entry.is_dir(follow_symlinks=False)) for entry in found]
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise translate(error, f"list {base}") from error


def _state(entry: os.DirEntry[str], key: str) -> os.stat_result | None:
    """Return the state of a listed file; None if it has vanished since."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise translate(error, f"list {key}") from error


def _forget_listing(folder: str) -> None:
    """Make the next listing of `folder` come from the server; raises OSError if it is absent."""
    descriptor = os.open(folder, FOLDER)
    try:
        with suppress(OSError, AttributeError):  # a file system or a platform that caches none
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_listed(path: str) -> bool:
    """Return whether a fresh listing of `path`'s folder contains its name.

    A folder that cannot be opened is looked up in the folder above, and so on upwards, which
    makes the client ask the server for it again.
    """
    folder, name = os.path.split(path)
    if not name:
        return True
    try:
        return name in _names(folder)
    except OSError as error:
        if error.errno not in ABSENT or not is_listed(folder):
            return False
    try:
        return name in _names(folder)
    except OSError:
        return False


def _names(folder: str) -> list[str]:
    _forget_listing(folder)
    return os.listdir(folder)  # noqa: PTH208 - plain strings on the hot path


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
    folders = []
    for entry, is_folder in _scan(f"{root}/{base}".rstrip("/"), base, lambda _: True):
        if is_folder:
            if is_key(entry.name) and (base or entry.name in WITH_TEMPS):
                folders.append(entry.name)
        elif TEMP.match(entry.name):
            found = _state(entry, base + entry.name)
            if found is not None:  # otherwise its writer lives, and has just finished
                yield entry.path, found
    for name in folders:
        yield from _temp_files(root, f"{base}{name}/")
