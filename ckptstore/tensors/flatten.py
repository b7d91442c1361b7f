"""From a nested state to a skeleton and a list of tensors, without pickling or guessing.

Kept: values, order, types of containers, which tensors share memory and which are one
object, dtype, shape, memory order, Parameter and Buffer, ``requires_grad``. Lost: the
autograd graph, ``.grad``, hooks and attributes set on tensors; that one plain container occurs
twice; that a NumPy array shares memory with anything but itself; gaps between elements (stored
densely); that a NumPy array is read-only or a memory map.
"""

from __future__ import annotations

import datetime as dt
import enum
import logging
import pathlib
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from ckptstore import limits
from ckptstore.errors import CkptStoreError, LimitError, StateError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Node, text_node
from ckptstore.format.skeleton_check import validate
from ckptstore.shown import plain_value, shown
from ckptstore.tensors.adapters import TypeAdapter, adapters_by_type
from ckptstore.tensors.aliasing import Occurrence, Pending, memory_order, resolve_storage
from ckptstore.tensors.arrays import TWINS, describe_dtype, scalar_bytes
from ckptstore.tensors.builtin import SPARSE, builtin_for
from ckptstore.tensors.composed import SPARSE_LAYOUTS, flags_of
from ckptstore.tensors.foreign import ForeignTensor
from ckptstore.tensors.quantized import describe_quantized
from ckptstore.tensors.refusals import fields_of, is_record, refusal, storage_of
from ckptstore.tensors.tensor_bytes import ArrayBytes, SourceTensor, TensorPayload, dtype_text

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatState:
    """A flattened state: skeleton and tensors."""

    skeleton: Node
    """Everything but the bytes of tensors; see :mod:`ckptstore.format.skeleton`."""
    tensors: tuple[SourceTensor, ...]
    """The tensors that its leaves refer to, by position. They read the caller's memory."""


def flatten(
    state: object, adapters: Sequence[TypeAdapter] = (), *, plain: bool = False
) -> FlatState:
    """Flatten a state without copying a tensor.

    Parameters
    ----------
    state
        Nested dicts, lists, tuples and so on; see ``docs/concepts/state.md``.
    adapters
        Represent objects of other types; also override the representation of known types.
    plain
        Take dataclasses and namespaces for dicts of their fields, and enums for their values.

    Returns
    -------
    FlatState
        It refers to the memory of `state`, which must not be changed before the tensors are read.

    Raises
    ------
    StateError
        A value cannot be represented; the message names its path and type, and the remedy.
    LimitError
        The state is nested too deep or has too many values.
    """
    walker = _Walker(adapters, plain=plain)
    skeleton = walker.walk(state, (), 0)
    tensors = walker.resolve()
    validate(skeleton, [tensor.nbytes for tensor in tensors])
    return FlatState(skeleton=skeleton, tensors=tensors)


class _Walker:
    """One pass over one state."""

    def __init__(self, adapters: Sequence[TypeAdapter], *, plain: bool) -> None:
        self._adapters = adapters_by_type(adapters)
        self._plain = plain
        self._open: set[int] = set()
        self._leaves = 0
        self._storages: dict[tuple[str, int], list[Occurrence]] = {}
        self._pending: list[Pending] = []
        self._arrays: dict[int, Pending] = {}
        self._kept: list[object] = []  # objects identified by id() must outlive the walk

    def walk(self, value: Any, path: Path, depth: int) -> Node:  # noqa: ANN401 - anything at all
        """Return the node of a value of any type."""
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if self._adapters and kind in self._adapters:
            return self._adapted(self._adapters[kind], value, path, depth)
        handler = _HANDLERS.get(kind)
        if handler is None:
            adapter = builtin_for(kind)
            if adapter is not None:
                return self._adapted(adapter, value, path, depth)
            handler = _family(value)
            if handler is None and self._plain and is_record(value):
                handler = _Walker.on_record
            if handler is None:
                return self.walk(_plain(value, path), path, depth)
        return handler(self, value, path, depth)

    def resolve(self) -> tuple[SourceTensor, ...]:
        """Choose the tensors to store, and fill the nodes of all leaves."""
        for occurrences in self._storages.values():
            self._pending += resolve_storage(occurrences)
        self._pending.sort(key=lambda pending: pending.position)
        return tuple([pending.fill(index) for index, pending in enumerate(self._pending)])

    # --- containers -------------------------------------------------------------------------

    def _enter(self, value: object, path: Path, depth: int) -> None:
        if depth >= limits.STATE_DEPTH_MAX:
            msg = f"{path_text(path)!r} is nested deeper than {limits.STATE_DEPTH_MAX} levels"
            raise LimitError(msg)
        if id(value) in self._open:
            raise StateError(f"{path_text(path)!r} holds itself: cycles cannot be stored")
        self._open.add(id(value))

    def _items(self, value: Iterable[object], path: Path, depth: int) -> list[Node]:
        self._enter(value, path, depth)
        walk, deeper = self.walk, depth + 1
        items = [walk(item, (*path, at), deeper) for at, item in enumerate(value)]
        self._open.discard(id(value))
        return items

    def _entries(self, value: dict[Any, Any], path: Path, depth: int) -> list[Node]:
        self._enter(value, path, depth)
        entries: list[Node] = []
        for key, item in value.items():
            entries.append(key if type(key) is str and key.isascii() else _key_node(key, path))
            entries.append(self.walk(item, (*path, key), depth + 1))
        self._open.discard(id(value))
        return entries

    def on_ordered(self, value: OrderedDict[Any, Any], path: Path, depth: int) -> Node:
        attributes = vars(value)
        extra = self.walk(attributes, path, depth + 1) if attributes else None
        return ["o", extra, *self._entries(value, path, depth)]

    def on_default(self, value: defaultdict[Any, Any], path: Path, depth: int) -> Node:
        """Represent a defaultdict, whose factory must be a plain type."""
        factory = value.default_factory
        if factory is not None and not any(factory is one for one in _FACTORIES):
            msg = f"{path_text(path)!r} is a defaultdict with the factory {shown(factory)}"
            hint = "only int, float, str, bool, bytes, list, dict, set and tuple can be stored"
            raise StateError(msg, hint=hint)
        name = None if factory is None else getattr(factory, "__name__", "")
        return ["dd", name, *self._entries(value, path, depth)]

    def on_set(self, value: Iterable[Any], path: Path, _depth: int) -> Node:
        """Represent a set or frozenset, in an order that does not depend on the process."""
        tag = "s" if isinstance(value, set) else "fs"
        nodes = [_key_node(item, path, "the set") for item in value]
        nodes.sort(key=repr)  # sets have no order; equal sets get equal bytes
        return [tag, *nodes]

    def _adapted(self, adapter: TypeAdapter, value: object, path: Path, depth: int) -> Node:
        self._enter(value, path, depth)
        try:
            payload = adapter.to_state(value)
        except Exception as error:
            said = str(error) if isinstance(error, CkptStoreError) else shown(error, 200)
            msg = f"the adapter {adapter.name!r} failed at {path_text(path)!r}: {said}"
            raise StateError(msg) from error
        self._kept.append(payload)
        if payload is value:
            raise StateError(f"the adapter {adapter.name!r} returned the object itself")
        node = self.walk(payload, path, depth + 1)
        self._open.discard(id(value))
        return ["x", adapter.name, node]

    def on_record(self, value: Any, path: Path, depth: int) -> Node:  # noqa: ANN401 - of any class
        """Represent a dataclass, an enum or a namespace by its plain value, without its class."""
        self._enter(value, path, depth)
        try:
            plain = value.value if isinstance(value, enum.Enum) else fields_of(value)
        except Exception as error:
            msg = f"{path_text(path)!r}: a field of it cannot be read: {shown(error, 200)}"
            raise StateError(msg, hint="save a dict of the fields") from error
        self._kept.append(plain)
        node = self.walk(plain, path, depth + 1)
        self._open.discard(id(value))
        return node

    # --- plain values -----------------------------------------------------------------------

    def on_str(self, value: str, path: Path, _depth: int) -> Node:
        """Represent a text; a long one becomes a leaf of its own."""
        if len(value) < limits.INLINE_BYTES_MAX // 4:
            return text_node(value)
        raw = value.encode("utf-8", "surrogatepass")
        short = len(raw) < limits.INLINE_BYTES_MAX
        return text_node(value) if short else self._blob(raw, "str", path)

    def on_bytes(self, value: bytes, path: Path, _depth: int) -> Node:
        return value if len(value) < limits.INLINE_BYTES_MAX else self._blob(value, "bytes", path)

    def on_bytearray(self, value: bytearray, path: Path, _depth: int) -> Node:
        if len(value) < limits.INLINE_BYTES_MAX:
            return ["ba", bytes(value)]
        return self._blob(value, "bytearray", path)

    def _blob(self, data: bytes | bytearray, kind: str, path: Path) -> Node:
        node: list[Node] = ["B", 0, kind]
        payload = ArrayBytes(np.frombuffer(data, np.uint8))
        self._add(node, "uint8", (len(data),), None, payload, path)
        return node

    def _add(
        self,
        node: list[Node],
        dtype: str,
        shape: tuple[int, ...],
        order: tuple[int, ...] | None,
        payload: TensorPayload,
        path: Path,
    ) -> Pending:
        pending = Pending(
            position=self._leaves, dtype=dtype, shape=shape, order=order, payload=payload,
            paths=[path], raw=node,
        )  # fmt: skip
        self._leaves += 1
        self._pending.append(pending)
        return pending

    def on_numbers(self, value: range | slice, path: Path, depth: int) -> Node:
        """Represent a range, or a slice of numbers."""
        tag = "r" if isinstance(value, range) else "sl"
        before, parts = self._leaves, (value.start, value.stop, value.step)
        nodes = [self.walk(part, path, depth + 1) for part in parts]
        if self._leaves > before:  # no path leads there
            msg = f"{path_text(path)!r} is a slice that holds a tensor, an array or a long text"
            raise StateError(msg, hint="keep its bounds as numbers: int(...)")
        return [tag, *nodes]

    # --- tensors ----------------------------------------------------------------------------

    def on_tensor(self, value: torch.Tensor, path: Path, depth: int) -> Node:
        """Represent a tensor; ``resolve`` finds later with which others it shares memory."""
        self._kept.append(value)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
        if plain and value.layout in SPARSE_LAYOUTS:
            return self._adapted(SPARSE, value, path, depth)
        flags = _flags(value, path)
        if value.is_quantized:
            return self._quantized(value, flags, path, depth)
        return self._occurrence(value, id(value), flags, path)

    def _occurrence(self, tensor: torch.Tensor, identity: int, flags: int, path: Path) -> Node:
        device = "" if tensor.is_cpu else str(tensor.device)
        if dtype_text(tensor.dtype) is None:
            msg = f"{path_text(path)!r} has the dtype {tensor.dtype}, which cannot be stored"
            raise StateError(msg)
        node: list[Node] = []
        occurrence = Occurrence(
            tensor=tensor, path=path, position=self._leaves, node=node, flags=flags,
            identity=identity, device=device,
        )  # fmt: skip
        self._leaves += 1
        key = (device, _at(path, storage_of, tensor)._cdata)  # the storage itself
        self._storages.setdefault(key, []).append(occurrence)
        return node

    def _quantized(self, value: torch.Tensor, flags: int, path: Path, depth: int) -> Node:
        parts = _at(path, describe_quantized, value)
        self._kept.append(parts)
        inner = self._occurrence(parts.integers, id(value), flags, path)
        shape: Node = None if parts.shape is None else [*parts.shape]
        parameters = self.walk(parts.parameters, (*path, "quantizer"), depth + 1)
        return ["Q", inner, parts.dtype, shape, parts.scheme, parameters]

    def on_generator(self, value: torch.Generator, path: Path, _depth: int) -> Node:
        state = value.get_state()
        self._kept.append(state)
        return ["G", str(value.device), self._occurrence(state, id(state), 0, path)]

    def on_foreign(self, value: ForeignTensor, path: Path, _depth: int) -> Node:
        """Represent a tensor of another library; one that occurs twice is stored once."""
        known = self._arrays.get(id(value))
        if known is not None and known.raw is not None:
            known.paths.append(path)
            return known.raw
        if value.dtype not in ITEM_BYTES:
            msg = f"{path_text(path)!r} has the dtype {value.dtype}, which cannot be stored"
            raise StateError(msg, hint="convert it to one that torch has, such as float8_e4m3fn")
        node: list[Node] = ["T", 0]
        self._kept.append(value)
        made = self._add(node, value.dtype, value.shape, None, value.payload, path)
        self._arrays[id(value)] = made
        return node

    # --- NumPy ------------------------------------------------------------------------------

    def on_array(self, value: np.ndarray[Any, Any], path: Path, _depth: int) -> Node:
        """Represent a NumPy array; one that occurs twice is stored once."""
        if type(value) not in (np.ndarray, np.memmap):
            raise refusal(value, path)
        known = self._arrays.get(id(value))
        if known is not None and known.raw is not None:
            known.paths.append(path)
            return known.raw
        order = memory_order(value.shape, [abs(step) for step in value.strides])
        ordered = value if order is None else value.transpose(order)
        twin = TWINS.get(value.dtype)
        node: list[Node] = ["N", 0]
        shape = value.shape
        if twin is None:
            node.append(_numpy_dtype(value.dtype, path))
            order = None if order is None else (*order, len(shape))
            shape = (*shape, value.dtype.itemsize)
        payload = ArrayBytes(ordered)
        self._kept.append(value)
        self._arrays[id(value)] = self._add(node, twin or "uint8", shape, order, payload, path)
        return node


# --- plain values that cannot be stored as they are -----------------------------------------------


def _int_node(value: int, path: Path) -> Node:
    """Return the node of an integer.

    Raises
    ------
    StateError
        It has more digits than the format allows.
    """
    if -(1 << 63) <= value < (1 << 63):
        return value
    if not -_INT_END < value < _INT_END:
        msg = f"{path_text(path)!r} is an integer of {value.bit_length()} bits"
        raise StateError(msg, hint="keep it as bytes (int.to_bytes)")
    return ["i", str(value)]


def _key_node(key: Any, path: Path, where: str = "a key of") -> Node:  # noqa: ANN401
    """Return the node of a dict key, or of an element of a set.

    Raises
    ------
    StateError
        It is not plain; names the path of the dict or set.
    """
    kind = type(key)
    if kind is str:
        return text_node(key)
    if kind is int:
        return _int_node(key, path)
    if (kind is float and key == key) or kind is bool or kind is bytes or key is None:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        return ["t", *(_key_node(item, path, where) for item in key)]
    if kind is not float:
        with suppress(TypeError):
            return _key_node(plain_value(key), path, where)
    told = f"{shown(key)}, a {kind.__module__}.{kind.__qualname__}"
    msg = f"{path_text(path)!r}: {where} it is {told}"
    hint = "keys and set elements are str, int, float (not NaN), bool, None, bytes or tuples"
    raise StateError(msg, hint=hint)


def _file_path_node(value: pathlib.PurePath) -> Node:
    """Return the node of a file path."""
    kind = "purewindows" if isinstance(value, pathlib.PureWindowsPath) else "pureposix"
    return ["p", "path" if isinstance(value, pathlib.Path) else kind, text_node(str(value))]


def _datetime_node(value: dt.datetime, path: Path) -> Node:
    """Return the node of a datetime.

    Raises
    ------
    StateError
        Its zone is more than an offset from UTC.
    """
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        msg = f"{path_text(path)!r} is a datetime in the zone {shown(value.tzinfo)}"
        raise StateError(msg, hint="convert it to UTC: value.astimezone(datetime.timezone.utc)")
    return ["dm", value.isoformat(), value.fold]


# --- tensors and arrays ---------------------------------------------------------------------------


def _numpy_dtype(dtype: np.dtype[Any], path: Path) -> Node:
    return _at(path, describe_dtype, dtype)


def _at(path: Path, describe: Callable[[_T], _R], value: _T) -> _R:
    """Return the description of `value`; an error gets the path."""
    try:
        return describe(value)
    except StateError as error:
        raise StateError(f"{path_text(path)!r}: {error.message}", hint=error.hint) from error


def _flags(tensor: torch.Tensor, path: Path) -> int:
    """Return the flags of a tensor that can be stored."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        raise refusal(tensor, path)
    return flags_of(tensor)


def _family(value: object) -> Callable[[_Walker, Any, Path, int], Node] | None:
    """Return the handler of a value whose class is not listed, but has a listed base."""
    families = (item for item in _FAMILIES.items() if issubclass(type(value), item[0]))
    return next((handler for _, handler in families), None)


def _plain(value: object, path: Path) -> object:
    """Return the value of an object whose class adds nothing to it; logs each class once.

    Raises
    ------
    StateError
        Its class adds something, or is another one.
    """
    try:
        plain = plain_value(value)
    except TypeError:
        raise refusal(value, path) from None
    kind = type(value)
    if kind not in _TOLD:
        _TOLD.add(kind)
        name = f"{kind.__module__}.{kind.__qualname__}"
        _log.warning("%r is a %s: stored as %s", path_text(path), name, type(plain).__name__)
    return plain


_TOLD: Final[weakref.WeakSet[type]] = weakref.WeakSet()
_log = logging.getLogger("ckptstore")
_INT_END: Final = 10**limits.INT_DIGITS_MAX


_PLAIN: Final = frozenset({type(None), bool, float})
_FACTORIES: Final = (int, float, str, bool, bytes, list, dict, set, tuple)
_FAMILIES: Final[dict[type, Callable[[_Walker, Any, Path, int], Node]]] = {
    torch.Tensor: _Walker.on_tensor,
    np.ndarray: _Walker.on_array,
    np.generic: lambda _w, v, path, _d: ["ns", _numpy_dtype(v.dtype, path), scalar_bytes(v)],
    np.dtype: lambda _w, v, path, _d: ["nd", _numpy_dtype(v, path)],
}
_HANDLERS: Final[dict[type, Callable[[_Walker, Any, Path, int], Node]]] = {
    torch.Tensor: _Walker.on_tensor,
    torch.nn.Parameter: _Walker.on_tensor,
    dict: lambda walker, v, path, depth: ["d", *walker._entries(v, path, depth)],
    int: lambda _w, v, path, _d: _int_node(v, path),
    str: _Walker.on_str,
    list: lambda walker, v, path, depth: ["l", *walker._items(v, path, depth)],
    tuple: lambda walker, v, path, depth: ["t", *walker._items(v, path, depth)],
    bytes: _Walker.on_bytes,
    OrderedDict: _Walker.on_ordered,
    defaultdict: _Walker.on_default,
    Counter: lambda walker, v, path, depth: ["ct", *walker._entries(v, path, depth)],
    deque: lambda walker, v, path, depth: ["q", v.maxlen, *walker._items(v, path, depth)],
    set: _Walker.on_set,
    frozenset: _Walker.on_set,
    bytearray: _Walker.on_bytearray,
    complex: lambda _w, v, _p, _d: ["c", v.real, v.imag],
    range: _Walker.on_numbers,
    slice: _Walker.on_numbers,
    np.ndarray: _Walker.on_array,
    torch.Generator: _Walker.on_generator,
    ForeignTensor: _Walker.on_foreign,
    torch.dtype: lambda _w, v, _p, _d: ["dt", str(v).removeprefix("torch.")],
    torch.device: lambda _w, v, _p, _d: ["dv", str(v)],
    torch.Size: lambda _w, v, _p, _d: ["sz", *v],
    pathlib.PosixPath: lambda _w, v, _p, _d: _file_path_node(v),
    pathlib.WindowsPath: lambda _w, v, _p, _d: _file_path_node(v),
    pathlib.PurePosixPath: lambda _w, v, _p, _d: _file_path_node(v),
    pathlib.PureWindowsPath: lambda _w, v, _p, _d: _file_path_node(v),
    dt.datetime: lambda _w, v, path, _d: _datetime_node(v, path),
    dt.date: lambda _w, v, _p, _d: ["da", v.isoformat()],
    dt.timedelta: lambda _w, v, _p, _d: ["td", v.days, v.seconds, v.microseconds],
}
