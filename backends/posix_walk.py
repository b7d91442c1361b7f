"""Sorted listing of a folder tree as keys, reading only the folders that can matter."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo, check_key
from ckptstore.backends.oserrors import ABSENT, translate
from ckptstore.backends.posix_relist import forget_listing, is_listed
from ckptstore.errors import InvalidKeyError


def walk(root: str, prefix: str, after: str, *, relist: bool = False) -> Iterator[ObjectInfo]:
    """Yield the objects under `root` whose key begins with `prefix` and sorts after `after`.

    Each folder is read in one go when the walk reaches it. Symbolic links, special files, names
    that break the key rules, and entries that vanish during the walk are left out.

    Parameters
    ----------
    relist
        Trust no cached listing and no cached absence of a folder (see posix_relist).

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
        if name.endswith("/"):
            # All keys below begin with `key`: skip it when none can qualify.
            wanted = key.startswith(prefix) or prefix.startswith(key)
            if wanted and (after < key or after.startswith(key)):
                yield from _folder(root, key, prefix, after, relist)
        elif key > after and key.startswith(prefix):
            info = _info(entry, key)
            if info is not None:
                yield info


def _fresh_entries(path: str, base: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return the entries that the server has now, not those that this client has cached."""
    for _ in range(limits.STALE_TRIES):
        try:
            forget_listing(path)
            break
        except OSError as error:
            if error.errno not in ABSENT:
                raise translate(error, f"list {base}") from error
            if not is_listed(path):
                return []
    return _entries(path, base)


def _entries(path: str, base: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return the entries of one folder in the order of their keys; folders end in ``/``."""
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not _is_name(entry.name):
                    continue
                folder = entry.is_dir(follow_symlinks=False)
                found.append((entry.name + "/" if folder else entry.name, entry))
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise translate(error, f"list {base}") from error
    found.sort(key=lambda item: item[0])
    return found


def _is_name(name: str) -> bool:
    try:
        return check_key(name) is not None
    except InvalidKeyError:
        return False


def _info(entry: os.DirEntry[str], key: str) -> ObjectInfo | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise translate(error, f"list {key}") from error
    if not stat.S_ISREG(found.st_mode):
        return None
    return ObjectInfo(key=key, size_bytes=found.st_size, modified_at=found.st_mtime)
