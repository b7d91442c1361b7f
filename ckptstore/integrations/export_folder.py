"""Folders of exports: the files of an export become a folder's content, an earlier one's leave.

A record names the files of an export with their digests: a file counts as exported while it has
its digest. All others are foreign: they stay, and those that readers would take for a part of the
model are refused.

Files are written and synced in a hidden folder, then renamed one by one. Readers take an adapter
before ``model.safetensors``, and that before an index, so each switch of the weights is one call:

- Shards go under names that no index in the folder has, before the index that names them.
- A single file replaces one, or appears beside an index, which then wins no more.
- An index appears beside a single file, which wins until it is removed.

A configuration that changes would for a moment describe the weights of another export: it leaves
before the switch and comes last. Without it, ``from_pretrained`` refuses the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final

from ckptstore.backends.oserrors import translate
from ckptstore.backends.posix_publish import FOLDER, sync_folder
from ckptstore.config import SYSTEM
from ckptstore.errors import ConflictError, FormatError, InvalidInputError, LimitError
from ckptstore.hashing import blake3_of
from ckptstore.integrations.pretrained_files import read_json
from ckptstore.jobs.job_outputs import keep_access, replace_file

RECORD: Final = ".ckptstore-export.json"
_STAGED: Final = ".ckptstore-export-"
_READ_BYTES: Final = 1 << 20
_SHARD: Final = re.compile(r"(.+)(-\d{5}-of-\d{5}\.(?:safetensors|bin))")
_INDEX: Final = ".index.json"
_SINGLE: Final = (".safetensors", ".bin")
_CONFIGS: Final = frozenset({"config.json", "adapter_config.json"})
_WOULD_WIN: Final = re.compile(
    r".+\.safetensors(\.index\.json)?|adapter_config\.json|\.metadata", re.IGNORECASE
)
"""Foreign files that ``from_pretrained``, the import or a server reads beside or before others."""
_HINT: Final = "move it out of the folder, or name a new folder"


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder whose files become the content of `folder` if the block succeeds.

    Raises
    ------
    InvalidInputError
        It is a file; or a link or foreign file in it is in the way. It is unchanged.
    ConflictError
        Another process exports to the folder.
    StorageError
        It cannot be written. If the folder is new it does not appear.
    """
    target = Path(os.path.realpath(folder))
    new = not os.path.lexists(target)
    place = target.parent if new else target
    try:
        if not new and not target.is_dir():
            raise InvalidInputError(f"{folder} is no folder", hint="name a new folder")
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if not new:
                _lock(target, stack)
            beside = stack.enter_context(TemporaryDirectory(prefix=_STAGED, dir=place))
            made = Path(beside, target.name)
            made.mkdir()
            yield made
            digests = _finished(made)
            if new:
                _record(made, made, digests.items())
                made.rename(target)
                sync_folder(str(place))
            else:
                _switch(made, target, digests)
    except OSError as error:
        raise translate(error, f"{folder} cannot be written", writing=True) from error


def _lock(folder: Path, stack: ExitStack) -> None:
    """Exclude other exports to a folder, and remove what an interrupted one left."""
    descriptor = os.open(folder, FOLDER)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        msg = f"another export to {folder} is going on"
        raise ConflictError(msg, hint="wait for its end, or name a new folder") from error
    except OSError:  # a file system without locks
        return
    for left in folder.glob(f"{_STAGED}*"):
        shutil.rmtree(left)


def _finished(made: Path) -> dict[str, str]:
    """Give the files of an export the mode by the umask; make them durable, return the digests."""
    mode = made.stat().st_mode & 0o666
    found: dict[str, str] = {}
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        path.chmod(mode)  # safetensors keeps its files from all others
        found[path.relative_to(made).as_posix()] = _digest(path)
    return found


def _digest(path: Path) -> str:
    """Return the digest of a file, which is durable then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return blake3_of(iter(lambda: file.read(_READ_BYTES), b"")).hex()


def _switch(made: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Replace the files of an earlier export, in the order that the top of the module explains."""
    known = _recorded(folder)
    there = {entry.name for entry in folder.iterdir()}
    stale = {name for name, digest in known if name not in digests and _is(folder / name, digest)}
    if not known:  # an older export; save_pretrained itself removes files of these names
        shards = {name for name in there - digests.keys() if _SHARD.fullmatch(name)}
        stale |= {name for name in shards if _is(folder / name, None)}
    for name in digests:
        path = folder / name
        if path.resolve() != path or (path.exists() and not path.is_file()):
            raise InvalidInputError(f"{path} is a link, or no file", hint=_HINT)
    for name in sorted(there - digests.keys() - stale):
        if _WOULD_WIN.fullmatch(name):
            msg = f"{folder / name} is not of an export, and readers would use it beside this one"
            raise InvalidInputError(msg, hint=_HINT)
    shards = {name for name in digests if _SHARD.fullmatch(name) and name in there}
    mark = SYSTEM.random_hex(4)
    apart = {name: _SHARD.sub(rf"\1-{mark}\2", name) for name in shards}
    indexes = {name: (made / name).read_bytes() for name in digests if name.endswith(_INDEX)}
    pairs = {*known, *digests.items(), *((other, digests[name]) for name, other in apart.items())}
    for name in indexes if apart else ():
        found = json.loads(indexes[name])
        files = {key: apart.get(file, file) for key, file in found["weight_map"].items()}
        replace_file(made / name, json.dumps({**found, "weight_map": files}, indent=2).encode())
        pairs.add((name, _digest(made / name)))
    _record(made, folder, pairs)
    read = "" if "adapter_config.json" in there else "config.json"  # without it nothing is read
    configs = [name for name in digests if _rank(name) == 3 and (folder / name).exists()]
    changed = [x for x in {*configs, read} & digests.keys() if not _is(folder / x, digests[x])]
    for rank in range(4):
        for name in digests:
            if _rank(name) == rank and name not in changed:
                _place(made / name, folder / apart.get(name, name))
        if rank == 0:
            sync_folder(str(folder))
            for name in changed:
                (folder / name).unlink(missing_ok=True)
    for name in sorted({*stale, *apart}, key=_rank, reverse=True):
        (folder / name).unlink()
        with suppress(OSError):
            (folder / name).parent.rmdir()
    for name in changed:
        _place(made / name, folder / name)
    sync_folder(str(folder))
    if _settled(made, folder, apart, indexes):
        _record(made, folder, digests.items())


def _rank(name: str) -> int:
    """Return the place of a file in the order of an export; the last ones say what is read."""
    path = PurePosixPath(name)
    if path.name in _CONFIGS:
        return 3
    if path.suffix in _SINGLE and not _SHARD.fullmatch(path.name):
        return 2
    return int(name.endswith(_INDEX))


def _place(source: Path, target: Path) -> None:
    """Rename a file; it keeps owner and mode of the one that it replaces."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        keep_access(source, target.stat())
    source.replace(target)


def _settled(
    made: Path, folder: Path, apart: Mapping[str, str], indexes: Mapping[str, bytes]
) -> bool:
    """Give shards their usual names; return False on a file system without hard links."""
    try:
        for name, other in apart.items():
            os.link(folder / other, folder / name)
    except OSError:
        for name in apart:
            (folder / name).unlink(missing_ok=True)
        return False
    for name, data in indexes.items() if apart else ():
        replace_file(made / name, data)
        _place(made / name, folder / name)
    for other in apart.values():
        (folder / other).unlink()
    return True


def _is(path: Path, digest: str | None) -> bool:
    """Return whether a path is a file, reached without links, of a digest if one is given."""
    return path.is_file() and path.resolve() == path and digest in (None, _digest(path))


def _record(made: Path, folder: Path, files: Iterable[tuple[str, str]]) -> None:
    replace_file(made / RECORD, json.dumps({"files": sorted(files)}, indent=1).encode())
    _place(made / RECORD, folder / RECORD)


def _recorded(folder: Path) -> set[tuple[str, str]]:
    """Return the files by the record of a folder; none that would lie outside."""
    try:
        found = read_json(folder / RECORD, dict[str, list[tuple[str, str]]]).get("files", [])
    except (FileNotFoundError, FormatError, LimitError):
        return set()
    return {one for one in found if "\0" not in one[0] and folder in (folder / one[0]).parents}
