"""A version as the planners of torch see it: a flat dict of names.

Planners take dicts apart, with keys as text, and lists that hold tensors or dicts; everything else
is one value. Here the same is done with a skeleton, so that a version has the names that planners
give the state it is loaded into, whoever saved it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptstore.checkpoint.content import Content
from ckptstore.errors import InvalidInputError
from ckptstore.format.skeleton import MAPS, Node, decode_key, pairs
from ckptstore.model import Version
from ckptstore.tensors.tensor_bytes import dtype_named

__all__ = ["Entry", "entries_of", "metadata_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a planner has one name for."""

    path: tuple[str | int, ...]
    """As planners write it: keys as text, positions of lists as ints."""
    node: Node
    dtype: str = ""
    """Of a tensor; empty for other values."""
    shape: tuple[int, ...] = ()
    index: int | None = None
    """The record that is this tensor; None for values, and for views of a part of a record."""

    @property
    def is_tensor(self) -> bool:
        """Whether planners take it for a tensor."""
        return bool(self.dtype)


def entries_of(content: Content) -> dict[str, Entry]:
    """Return what a version holds, by the names of planners.

    Raises
    ------
    InvalidInputError
        Two things would have one name, as the keys ``1`` and ``"1"`` of one dict would.
    """
    found: dict[str, Entry] = {}
    for entry in _walk(content.node, (), content):
        name = ".".join(map(str, entry.path))
        if name in found:
            msg = f"planners would have the name {name!r} for two things of this version"
            raise InvalidInputError(msg, hint="load it with store.load")
        found[name] = entry
    return found


def _walk(node: Node, path: tuple[str | int, ...], content: Content) -> Iterator[Entry]:
    tag = node[0] if isinstance(node, list) else None
    if isinstance(node, list) and tag in MAPS:
        for key, value in pairs(node):
            yield from _walk(value, (*path, str(decode_key(key))), content)
    elif isinstance(node, list) and tag == "l" and not _is_value(node):
        for place, item in enumerate(node[1:]):
            yield from _walk(item, (*path, place), content)
    elif isinstance(node, list) and tag == "T" and isinstance(node[1], int):
        record = content.manifest.tensors[node[1]]
        yield Entry(path=path, node=node, dtype=record.dtype, shape=record.shape, index=node[1])
    elif isinstance(node, list) and tag == "V" and isinstance(node[4], list):
        shape = tuple(size for size in node[4] if isinstance(size, int))
        yield Entry(path=path, node=node, dtype=str(node[2]), shape=shape)
    else:
        yield Entry(path=path, node=node)


def _is_value(node: list[Node]) -> bool:
    """Return whether planners leave a list whole: it holds no tensor and no dict, however deep."""
    for item in node[1:]:
        if not isinstance(item, list):
            continue
        if item[0] in MAPS or item[0] in ("T", "V", "Q"):
            return False
        if item[0] == "l" and not _is_value(item):
            return False
    return True


def metadata_of(version: Version, entries: Mapping[str, Entry]) -> Metadata:
    """Return what torch wants to know of a version.

    Each tensor is one chunk, whatever boxes it is stored in: which pieces a rank needs is decided
    from the manifest when it reads.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in entries.items():
        if not entry.is_tensor:
            described[name] = BytesStorageMetadata()
            continue
        size = torch.Size(entry.shape)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype_named(entry.dtype)), size=size, chunks=[whole]
        )
    return Metadata(
        state_dict_metadata=described,
        planner_data={name: entry.path for name, entry in entries.items()},
        storage_meta=StorageMeta(checkpoint_id=f"{version.run}@{version.step}", save_id=version.id),
    )
