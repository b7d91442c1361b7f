"""A version in the form that torch's planners use: a flat dict of names.

Planners flatten dicts, with keys as text, and lists that hold tensors or dicts; any other
value is a leaf. This module does the same with a skeleton, so that any version has the names that
planners give the state to load into. A planner with ``flatten_state_dict=False`` has
one name for each container at the top: such a name is found, but not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from ckptstore.checkpoint.content import Content
from ckptstore.errors import CorruptObjectError, InvalidInputError
from ckptstore.format.manifest import Manifest
from ckptstore.format.paths import path_text
from ckptstore.format.skeleton import MAPS, Node, decode_key, pairs
from ckptstore.model import Version
from ckptstore.tensors.adapters import TypeAdapter, adapters_by_name
from ckptstore.tensors.builtin import SPARSE, SUBCLASSES
from ckptstore.tensors.composed import describe_subclass
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text

PLANNERS_OWN: Final = "torch.distributed.checkpoint"
"""Key of a version's metadata for a planner's own entries in torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The item behind one name of a planner."""

    path: tuple[str | int, ...]
    """As planners write it: keys as text, positions of lists as ints."""
    node: Node
    dtype: str = ""
    """Of a tensor; empty for other values."""
    shape: tuple[int, ...] = ()
    index: int | None = None
    """The record that is this tensor; None for values, for views of a part of a record, and for
    tensors that are made of others."""
    is_container: bool = False
    """A container at the top, which holds other entries."""

    @property
    def is_tensor(self) -> bool:
        """True if planners treat it as a tensor."""
        return bool(self.dtype)


class Adapted:
    """The things in skeletons, as planners see them; knows tensors represented by adapters.

    Parameters
    ----------
    adapters
        Those that the caller passes; the built-in ones are known.
    build
        Returns the object of a node. Called for tensors of an adapter that the caller wrote,
        whose state does not give dtype and shape.
    """

    def __init__(
        self, adapters: Sequence[TypeAdapter], build: Callable[[Node], torch.Tensor]
    ) -> None:
        given = adapters_by_name(adapters)
        tensors = {n: one for n, one in given.items() if issubclass(one.type, torch.Tensor)}
        others = given.keys() - tensors.keys()
        described = {n for n, one in tensors.items() if one.to_state is describe_subclass}
        self._built = tensors.keys() - described
        self._tensors = (({*SUBCLASSES, SPARSE.name} | described) - others) | self._built
        self._build = build

    def describe(self, node: list[Node], path: tuple[str | int, ...]) -> Entry:
        """Return the entry of a tensor.

        Raises
        ------
        CorruptObjectError
            Its state does not give dtype and shape.
        """
        if node[1] in self._built:
            tensor = self._build(node)
            dtype, shape = dtype_text(tensor.dtype) or "", tuple(tensor.shape)
            return Entry(path=path, node=node, dtype=dtype, shape=shape)
        state = node[2]
        fields = pairs(state) if isinstance(state, list) and state[0] == "d" else ()
        found = {key: value for key, value in fields if isinstance(key, str)}
        match (found.get("dtype"), found.get("shape")):
            case (["dt", str(dtype)], ["sz", *sizes]):
                shape = tuple([size for size in sizes if isinstance(size, int)])
                return Entry(path=path, node=node, dtype=dtype, shape=shape)
        raise CorruptObjectError(f"{path_text(path)!r} is a tensor without dtype or shape")

    def walk(self, node: Node, manifest: Manifest, path: tuple[str | int, ...]) -> Iterator[Entry]:
        """Yield the entries of a node and all below it."""
        tag = node[0] if isinstance(node, list) else None
        if isinstance(node, list) and tag in MAPS:
            for key, value in pairs(node):
                yield from self.walk(value, manifest, (*path, str(decode_key(key))))
        elif isinstance(node, list) and tag == "l" and not self._is_value(node):
            for place, item in enumerate(node[1:]):
                yield from self.walk(item, manifest, (*path, place))
        elif isinstance(node, list) and self._is_tensor(node):
            yield self._tensor(node, manifest, path)
        else:
            yield Entry(path=path, node=node)

    def _tensor(self, node: list[Any], manifest: Manifest, path: tuple[str | int, ...]) -> Entry:
        tag = node[0]
        if tag == "x":
            return self.describe(node, path)
        if tag == "T":
            about = manifest.tensors[node[1]]
            return Entry(path=path, node=node, dtype=about.dtype, shape=about.shape, index=node[1])
        if tag == "V":
            return Entry(path=path, node=node, dtype=node[2], shape=tuple(node[4]))
        shape = self._tensor(node[1], manifest, path).shape if node[3] is None else tuple(node[3])
        return Entry(path=path, node=node, dtype=node[2], shape=shape)

    def _is_tensor(self, node: list[Node]) -> bool:
        return node[0] in ("T", "V", "Q") or (node[0] == "x" and node[1] in self._tensors)

    def _is_value(self, node: list[Node]) -> bool:
        """Return whether planners keep a list whole: it has no tensor and no dict at any depth."""
        items = [item for item in node[1:] if isinstance(item, list)]
        if any(item[0] in MAPS or self._is_tensor(item) for item in items):
            return False
        return all(self._is_value(item) for item in items if item[0] == "l")


def entries_of(content: Content, adapted: Adapted) -> dict[str, Entry]:
    """Return the content of a version, by the names of planners.

    Raises
    ------
    InvalidInputError
        Two items would have one name, as the keys ``1`` and ``"1"`` of one dict would.
    """
    found: dict[str, Entry] = {}
    for entry in adapted.walk(content.node, content.manifest, ()):
        name = ".".join(map(str, entry.path))
        if name in found:
            msg = f"planners would have the name {name!r} for two things of this version"
            raise InvalidInputError(msg, hint="load it with store.load")
        found[name] = entry
    return {**_containers(content.node, found), **found}


def _containers(root: Node, found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the containers at the top; not those whose keys are one text, ``1`` and ``"1"``."""
    if not isinstance(root, list) or root[0] not in MAPS:
        return {}
    named = [(str(decode_key(key)), value) for key, value in pairs(root)]
    often = Counter(name for name, _ in named)
    return {
        name: Entry(path=(name,), node=value, is_container=True)
        for name, value in named
        if name not in found and often[name] == 1
    }


class _Names(dict[str, Any]):
    """The names in torch's metadata; it also finds the containers that are not listed."""

    def __init__(self, listed: Mapping[str, Any], containers: AbstractSet[str]) -> None:
        super().__init__(listed)
        self._containers = containers

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._containers

    def __missing__(self, name: str) -> dcp.BytesStorageMetadata:
        if name in self._containers:
            return dcp.BytesStorageMetadata()
        raise KeyError(name)


def metadata_of(version: Version, entries: Mapping[str, Entry]) -> dcp.Metadata:
    """Return torch's metadata of a version.

    Each tensor is one chunk, whatever boxes it is stored in: a rank selects the pieces that it
    needs from the manifest when it reads.
    """
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    listed = {name: entry for name, entry in entries.items() if not entry.is_container}
    for name, entry in listed.items():
        if not entry.is_tensor:
            described[name] = dcp.BytesStorageMetadata()
            continue
        size = torch.Size(entry.shape)
        whole = dcp.ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        dtype = dcp.TensorProperties(dtype=dtype_named(entry.dtype))
        described[name] = dcp.TensorStorageMetadata(properties=dtype, size=size, chunks=[whole])
    metadata = dcp.Metadata(
        state_dict_metadata=_Names(described, entries.keys() - listed.keys()),
        planner_data={name: entry.path for name, entry in listed.items()},
        storage_meta=dcp.StorageMeta(f"{version.run}@{version.step}", save_id=version.id),
    )
    set_version(metadata)
    _add_planners_own(metadata, version.metadata.get(PLANNERS_OWN))
    return metadata


def set_version(metadata: dcp.Metadata) -> None:
    """Set the version of torch's metadata to that of the installed torch."""
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)


def _add_planners_own(metadata: dcp.Metadata, own: object) -> None:
    """Add a planner's own entries of the metadata on save; torch's own fields stay unchanged."""
    for name, value in own.items() if isinstance(own, dict) else ():
        if name == "planner_data":
            merged = {**metadata.planner_data, **value} if isinstance(value, dict) else value
            metadata.planner_data = merged
        elif not name.startswith("_") and not hasattr(metadata, name):
            setattr(metadata, name, value)
