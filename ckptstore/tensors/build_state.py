"""Builds the state from a skeleton and finished tensors."""

from __future__ import annotations

import datetime as dt
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from ckptstore.errors import CkptStoreError, CorruptObjectError, StateError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Node, decode_key, pairs
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.arrays import TWINS, array_over, build_dtype, build_scalar
from ckptstore.tensors.composed import dressed
from ckptstore.tensors.parts import Part
from ckptstore.tensors.quantized import build_quantized
from ckptstore.tensors.tensor_bytes import (
    as_integers,
    dtype_named,
    memory_of,
    offset_of,
    tensor_over,
)

T = TypeVar("T")


class Missing:
    """The type of :data:`MISSING`, which stands for a list element that a load left out."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()
"""Stands for the elements that a load of a part left out of a list, tuple or deque."""

_FACTORIES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (int, float, str, bool, bytes, list, dict, set, tuple)
}


def adapter_names(node: Node, path: Path = ()) -> list[tuple[Path, str]]:
    """Return the path and adapter name of every object in a skeleton."""
    found: list[tuple[Path, str]] = []
    if not isinstance(node, list):
        return found
    tag = str(node[0])
    if tag in MAPS:
        for key, value in pairs(node):
            if isinstance(value, list):
                found += adapter_names(value, (*path, decode_key(key)))
        if tag == "o":
            found += adapter_names(node[1], path)
    elif tag in SEQUENCES:
        for at, item in enumerate(node[SEQUENCES[tag] :]):
            if isinstance(item, list):
                found += adapter_names(item, (*path, at))
    elif tag == "x":
        found.append((path, str(node[1])))
        found += adapter_names(node[2], path)
    return found


@dataclass(slots=True)
class Builder:
    """Rebuilds one state.

    Parameters
    ----------
    tensors
        The finished tensor of each record that the skeleton refers to.
    records
        All records, by index.
    adapters
        Adapters by name.
    targets
        Existing tensors, by path, that hold the leaf's values and are returned in its place.
    parts
        By the id of a ``V`` node whose base is not read: the part that it is in, and its bytes.
    alone
        Records of one leaf: its tensor is the finished one, and no other object is over its memory.
    """

    _tensors: Mapping[int, torch.Tensor]
    _records: Sequence[TensorRecord]
    _adapters: Mapping[str, TypeAdapter]
    _targets: Mapping[Path, torch.Tensor]
    _parts: Mapping[int, tuple[Part, torch.Tensor]]
    _alone: Collection[int] = ()
    _objects: dict[str, Any] = field(default_factory=dict, init=False)

    def build(self, node: Node) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state of `node`.

        Raises
        ------
        CorruptObjectError
            A value cannot be built; names the path.
        StateError
            An adapter failed; names the path.
        """
        return self._build(node, ())

    def _build(self, node: Any, path: Path) -> Any:  # noqa: ANN401 - validated before
        if type(node) is not list:
            return node
        tag = node[0]
        if tag in MAPS:
            return self._map(tag, node, path)
        if tag in SEQUENCES:
            build = self._build
            items = [build(v, (*path, at)) for at, v in enumerate(node[SEQUENCES[tag] :])]
            if tag == "l":
                return items
            return tuple(items) if tag == "t" else deque(items, node[1])
        if tag == "x":
            return self._object(node, path)
        try:
            return self._leaf(tag, node, path)
        except CkptStoreError:
            raise
        except (RuntimeError, ValueError, TypeError, OverflowError, KeyError) as error:
            raise CorruptObjectError(f"{path_text(path)!r} cannot be rebuilt: {error}") from error

    def _map(self, tag: str, node: list[Any], path: Path) -> Any:  # noqa: ANN401
        build = self._build
        entries: list[tuple[Any, Any]] = []
        for key_node, value in pairs(node):
            key = key_node if type(key_node) is str else decode_key(key_node)
            entries.append((key, build(value, (*path, key))))
        if tag == "d":
            return dict(entries)
        if tag == "o":
            ordered = OrderedDict(entries)
            if node[1] is not None:
                vars(ordered).update(build(node[1], path))
            return ordered
        if tag == "ct":
            return Counter(dict(entries))
        return defaultdict(None if node[1] is None else _FACTORIES[node[1]], entries)

    def _object(self, node: list[Any], path: Path) -> Any:  # noqa: ANN401
        adapter = self._adapters[node[1]]
        payload = self._build(node[2], path)
        try:
            return adapter.from_state(payload)
        except Exception as error:
            msg = f"the adapter {adapter.name!r} failed at {path_text(path)!r}: {error}"
            raise StateError(msg) from error

    def _leaf(self, tag: str, node: list[Any], path: Path) -> Any:  # noqa: ANN401
        plain = _PLAIN.get(tag)
        if plain is not None:
            return plain(*node[1:])
        if tag in ("r", "sl"):
            parts = [self._build(part, path) for part in node[1:]]
            return range(*parts) if tag == "r" else slice(*parts)
        if tag in ("s", "fs"):
            items = [decode_key(item) for item in node[1:]]
            return set(items) if tag == "s" else frozenset(items)
        if tag == "p":
            return _PATHS[node[1]](self._build(node[2], path))
        if tag in ("i", "u"):
            return decode_key(node)
        if tag in ("T", "V"):
            return self._tensor(node, path)
        return {"Q": self._quantized, "N": self._array, "B": self._blob, "G": self._generator}[tag](
            node, path
        )

    def _tensor(self, node: list[Any], path: Path) -> torch.Tensor:
        target = self._targets.get(path)
        if target is not None:
            if node[0] == "T" and self._tensors[node[1]] is target:
                return target  # its bytes were read straight into it
            source = self._plain_tensor(node)
            mine, theirs = as_integers(target), as_integers(source)
            if target.is_conj() or target.is_neg():
                target.detach().copy_(source)
            elif mine.data_ptr() != theirs.data_ptr() or mine.stride() != theirs.stride():
                mine.copy_(theirs)
            return target
        if node[0] == "T" and node[1] in self._alone:
            return dressed(self._tensors[node[1]], _flags(node))
        return self._once(repr(node), lambda: dressed(self._plain_tensor(node), _flags(node)))

    def _plain_tensor(self, node: list[Any]) -> torch.Tensor:
        """Return a new tensor of a ``T`` or ``V`` node, without flags, on the base's memory."""
        if found := self._parts.get(id(node)):
            part, memory = found
            return part.tensor(memory.untyped_storage(), node)
        base = self._tensors[node[1]]
        storage = base.untyped_storage()
        if node[0] == "T":
            return tensor_over(storage, base.dtype, offset_of(base), base.shape, base.stride())
        dtype, start, shape, strides = node[2:6]
        return tensor_over(storage, dtype_named(dtype), start // ITEM_BYTES[dtype], shape, strides)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """Return the object of a name, made when it is asked for first."""
        if name not in self._objects:
            self._objects[name] = make()
        found: T = self._objects[name]
        return found

    def _quantized(self, node: list[Any], path: Path) -> torch.Tensor:
        inner, dtype, shape, scheme, parameters = node[1:]

        def make() -> torch.Tensor:
            """Return the tensor, over the memory of its integers."""
            sizes = None if shape is None else tuple(shape)
            below = self._build(parameters, (*path, "quantizer"))
            quantized = build_quantized(self._plain_tensor(inner), dtype, sizes, scheme, below)
            return dressed(quantized, _flags(inner))

        return self._once(repr(inner) + dtype, make)

    def _bytes_of(self, index: int) -> memoryview:
        base = self._tensors[index]
        return memory_of(base.untyped_storage(), 0, self._records[index].nbytes)

    def _array(self, node: list[Any], _path: Path) -> Any:  # noqa: ANN401
        return self._once(f"N{node[1]}", lambda: self._new_array(node))

    def _new_array(self, node: list[Any]) -> Any:  # noqa: ANN401
        record = self._records[node[1]]
        shape, order = tuple(record.shape), record.order
        if len(node) == 2 or node[2] is None:
            dtype = _TWIN_TYPES.get(record.dtype)
            if dtype is None:
                raise CorruptObjectError(f"a NumPy array has a record of {record.dtype}")
        else:
            dtype = build_dtype(node[2])
            if record.dtype != "uint8" or not shape or shape[-1] != dtype.itemsize:
                raise CorruptObjectError(f"a NumPy array of {dtype} does not fit its record")
            shape = shape[:-1]
            order = None if order is None else tuple([dim for dim in order if dim < len(shape)])
        return array_over(self._bytes_of(node[1]), dtype, shape, order)

    def _blob(self, node: list[Any], _path: Path) -> bytes | bytearray | str:
        data = self._bytes_of(node[1])
        if node[2] == "bytearray":
            return bytearray(data)
        return bytes(data) if node[2] == "bytes" else str(data, "utf-8", "surrogatepass")

    def _generator(self, node: list[Any], _path: Path) -> torch.Generator:
        state = self._plain_tensor(node[2])
        return self._once(f"G{node!r}", lambda: torch.Generator(device=node[1]).set_state(state))


def _flags(node: list[Any]) -> int:
    """Return the flags of a ``T`` or ``V`` node, which may be left out."""
    at = 2 if node[0] == "T" else 6
    return int(node[at]) if len(node) > at else 0


_TWIN_TYPES: Final = {name: dtype for dtype, name in TWINS.items()}
_PATHS: Final[Mapping[str, type[pathlib.PurePath]]] = {
    "path": pathlib.Path,
    "pureposix": pathlib.PurePosixPath,
    "purewindows": pathlib.PureWindowsPath,
}
_PLAIN: Final[Mapping[str, Callable[..., Any]]] = {
    "c": complex,
    "ba": bytearray,
    "da": dt.date.fromisoformat,
    "dm": lambda text, fold: dt.datetime.fromisoformat(text).replace(fold=fold),
    "td": dt.timedelta,
    "dt": dtype_named,
    "dv": torch.device,
    "sz": lambda *sizes: torch.Size(sizes),
    "nd": build_dtype,
    "ns": lambda dtype, data: build_scalar(build_dtype(dtype), data),
    "m": lambda: MISSING,
}
