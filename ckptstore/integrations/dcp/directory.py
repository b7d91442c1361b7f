"""Import: a directory that torch.distributed.checkpoint wrote becomes a version.

Nothing in it is executed: its metadata is read by :mod:`.metadata_pickle`, tensors and plain values
with ``weights_only=True``. Needs no torch.distributed, and no more host memory than one batch of
chunks, however large the checkpoint and however many ranks wrote it.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ckptstore import errors, limits
from ckptstore.backends.oserrors import translate
from ckptstore.checkpoint.assemble import RankPart, commit_parts
from ckptstore.checkpoint.request import WriteRequest, check_wishes
from ckptstore.checkpoint.write import shareable
from ckptstore.chunking import in_batches
from ckptstore.config import check_choice
from ckptstore.events import Progress, ProgressCallback, silent
from ckptstore.format.blocks import Box
from ckptstore.format.dtypes import bytes_of
from ckptstore.format.paths import Pattern
from ckptstore.integrations.dcp.metadata_pickle import ArchivePlace, Described, read_metadata
from ckptstore.integrations.dcp.plain_bytes import check_archive, first_line, unpickled
from ckptstore.integrations.file_kinds import ARCHIVE, HEAD_BYTES, check_beside
from ckptstore.model import Version
from ckptstore.states.shards import Shard, write_part
from ckptstore.store import Store
from ckptstore.tensors.tensor_bytes import dtype_text

METADATA_FILE: Final = ".metadata"


class _Item(NamedTuple):
    """One chunk of a tensor, or one value."""

    name: str
    place: ArchivePlace
    nbytes: int
    dtype: str = ""
    """Of a tensor; empty for a value."""
    shape: tuple[int, ...] = ()
    box: Box = ((), ())


def import_directory(
    store: Store,
    path: str | os.PathLike[str],
    *,
    run: str,
    step: int,
    metrics: Mapping[str, float] | None = None,
    directions: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    roles: Mapping[Pattern, str] | None = None,
    under: str = "",
    codec: str | None = None,
    progress: ProgressCallback = silent,
) -> Version:
    """Save the content of a directory of torch.distributed.checkpoint as a new version of a run.

    Also called by :func:`ckptstore.integrations.files.import_file` for such a directory. Shards
    become whole tensors for every reader of the version; none is assembled in memory.

    Parameters
    ----------
    path
        A local directory with a ``.metadata``; it must not change during the import.
    run, step, metrics, directions, tags, metadata, roles, under, codec, progress
        As in :func:`ckptstore.integrations.files.import_file`.

    Raises
    ------
    ObjectNotFoundError
        The directory or a file of it is missing.
    PolicyError
        A pickle in it needs more than a checkpoint does; nothing of it was run.
    FormatError, CorruptObjectError
        It is damaged, or of an unsupported kind (extensions that compress, safetensors).
    LimitError
        It describes more items than allowed, or a value in it is too large.
    StateError
        The chunks do not cover a tensor, or a value cannot be represented; names it.
    StorageError
        A file or the store failed; no version appeared.
    """
    folder, repo = Path(path), store.repo
    repo.check_writable()
    origin = {"format": "torch.distributed.checkpoint", "files": [folder.name]}
    request = WriteRequest(
        run=run,
        step=step,
        directions=store.run(run, metrics=directions)._directions,
        metrics=metrics or {},
        tags=tags,
        metadata={"import": origin, **(metadata or {})},
        codec=check_choice(codec or repo.options.codec),
    )
    catalog = repo.refresh()
    check_wishes(repo.catalog, request)
    shared = shareable(repo, catalog.head(run) if catalog.has_run(run) else None)
    try:
        file = folder / METADATA_FILE
        with file.open("rb") as opened:
            data = opened.read(limits.DCP_METADATA_BYTES_MAX + 1)
        if not data.startswith(b"\x80"):
            check_beside(file, data)
        described = read_metadata(data, where=str(file))
        paths = {name: (under, *keys) if under else keys for name, keys in described.paths.items()}
        items = _items(described)
        total = sum(item.nbytes for item in items)
        parts: list[RankPart] = []
        done = 0
        batches = in_batches(items, lambda item: item.place.length, repo.options.host_bytes)
        for batch in [*batches] or [[]]:  # a directory without items makes one empty part
            part = write_part(
                repo,
                [_shard(folder, item) for item in batch if item.dtype],
                {item.name: _value(folder, item) for item in batch if not item.dtype},
                paths=paths,
                shared=[*shared, *(before.written.table for before in parts)],
                looked=catalog.number,
                codec=request.codec,
            )
            parts.append(part)
            done += sum(item.nbytes for item in batch)
            progress(Progress(stage="import", done=done, total=total))
    except OSError as error:
        raise translate(error, f"reading {error.filename or folder}") from error
    return commit_parts(repo, parts, paths, request, roles=roles or {})


def _items(described: Described) -> list[_Item]:
    """Return everything to read, in the order of the files."""
    items: list[_Item] = []
    for name, tensor in described.tensors.items():
        bytes_of(tensor.dtype, tensor.shape)  # refuses an invalid shape
        for box, place in tensor.chunks:
            nbytes = bytes_of(tensor.dtype, box[1])
            # A chunk is stored as a file of torch.save: it cannot exceed that, whatever it claims.
            if nbytes > place.length:
                msg = f"{name!r}: {nbytes} bytes cannot be in {place.length} of {place.file}"
                raise errors.FormatError(msg, hint="extensions that compress are not read")
            items.append(_Item(name, place, nbytes, tensor.dtype, tensor.shape, box))
    items += [_Item(name, place, place.length) for name, place in described.values.items()]
    for item in items:
        if names := ", ".join(item.place.transforms):
            msg = f"{item.name!r} was transformed by an extension: {names}"
            raise errors.FormatError(msg, hint="load it with torch, and save the state")
    return sorted(items, key=lambda item: (item.place.file, item.place.offset))


def _read(folder: Path, item: _Item) -> bytes:
    """Return the bytes of an item: a whole file of torch.save inside of a file."""
    place, root = item.place, folder.resolve()
    file = (root / place.file).resolve()
    if not file.is_relative_to(root):
        raise errors.FormatError(f"{place.file} is a link that leads out of {folder}")
    try:
        opened = file.open("rb")
    except FileNotFoundError as error:
        msg = f"{item.name!r} is in {place.file} by the metadata, and {folder} has no such file"
        raise errors.ObjectNotFoundError(msg, hint="the checkpoint is incomplete") from error
    with opened:
        size = os.fstat(opened.fileno()).st_size
        if place.offset + place.length > size:
            check_beside(file, opened.read(HEAD_BYTES), ARCHIVE)
            msg = f"{item.name!r} ends at byte {place.offset + place.length} of {file}, of {size}"
            raise errors.FormatError(msg, hint="the directory is incomplete")
        opened.seek(place.offset)
        data = opened.read(place.length)
    check_archive(io.BytesIO(data), len(data), f"{item.name!r} in {file}")
    return data


def _loaded(folder: Path, item: _Item) -> Any:  # a tensor or a plain value
    data = _read(folder, item)
    try:
        return unpickled(io.BytesIO(data))
    except pickle.UnpicklingError as error:
        msg = f"{item.name!r} in {item.place.file} needs more than weights_only=True allows"
        msg = f"{msg}: {first_line(error)}"
        hint = "in the program that wrote it, save plain values, or save with CkptStoreWriter"
        raise errors.PolicyError(msg, hint=hint) from error
    except Exception as error:  # torch may raise any error on a hostile pickle
        msg = f"{item.name!r} in {item.place.file} is not sound: {first_line(error)}"
        raise errors.FormatError(msg) from error


def _shard(folder: Path, item: _Item) -> Shard:
    tensor = _loaded(folder, item)
    if not isinstance(tensor, torch.Tensor):
        msg = f"{item.name!r} in {item.place.file} is a {type(tensor).__name__}, not a tensor"
        raise errors.FormatError(msg)
    said, sizes = (dtype_text(tensor.dtype), tuple(tensor.shape)), item.box[1]
    if said != (item.dtype, sizes):
        msg = f"{item.name!r} is {said[0]}{list(said[1])} in {item.place.file}, "
        raise errors.FormatError(f"{msg}but {item.dtype}{list(sizes)} by the metadata")
    return Shard(name=item.name, shape=item.shape, offsets=item.box[0], tensor=tensor)


def _value(folder: Path, item: _Item) -> object:
    value: object = _loaded(folder, item)
    _expanded(value, f"{item.name!r} in {item.place.file}", 0, {})
    return value


def _expanded(value: object, where: str, depth: int, known: dict[int, int]) -> int:
    """Return the number of values in a loaded one, each counted as often as it is referenced.

    A pickle of some hundred bytes can name one list 2**40 times; saving would visit them all.

    Raises
    ------
    LimitError
        There are more than ``STATE_NODES_MAX``, or they are nested deeper than
        ``STATE_DEPTH_MAX``.
    """
    if isinstance(value, Mapping):
        below = itertools.chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        below = itertools.chain(value)
    else:
        return 1
    if depth > limits.STATE_DEPTH_MAX:
        raise errors.LimitError(f"{where} is nested deeper than {limits.STATE_DEPTH_MAX} levels")
    count = known.get(id(value))
    if count is None:
        count = 1
        for one in below:
            count += _expanded(one, where, depth + 1, known)
            if count > limits.STATE_NODES_MAX:
                raise errors.LimitError(f"{where} has more than {limits.STATE_NODES_MAX} values")
        known[id(value)] = count
    return count
