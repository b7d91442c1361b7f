"""The ``.metadata`` of a directory that torch.distributed.checkpoint wrote, read without executing.

It is a pickle, and a pickle is a program: the reader follows only the instructions that build
plain values, and allows only the names of the classes that describe a checkpoint. It looks up none
of these names: each has a stand-in here that keeps its arguments. The result is checked field by
field. Imports no torch.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NoReturn

from ckptstore import errors, limits
from ckptstore.format.blocks import Box
from ckptstore.format.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlace:
    """Location of one item."""

    file: str
    """Relative to the directory; leads out of it nowhere."""
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    """Names of the extensions that transformed the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, ArchivePlace], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Content of a directory, by name, in the order of its metadata."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, ArchivePlace]
    paths: Mapping[str, tuple[str | int, ...]]
    """Path in the state of each name."""


class _Kept:
    """An object of a class that describes a checkpoint: only the values in its pickle."""

    def __init__(self, *_: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        # Nothing is copied: an object shared by many exists once.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            if state[0]:
                raise pickle.UnpicklingError("an object with two states")
            state = state[1]
        self.state = state if isinstance(state, dict) else {"": state}


class _Metadata(_Kept):
    """Of the whole checkpoint."""


class _Tensor(_Kept):
    """Of a tensor."""


class _Bytes(_Kept):
    """Of a value that is no tensor."""


class _Index(_Kept):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class _Info(_Kept):
    """Of the place of an item."""


class _Dtype:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("a dtype with a state")


def _size(values: object = ()) -> tuple[int, ...]:
    """Stand in for torch.Size."""
    try:
        return _numbers(values)
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error


def _nothing(*_: object) -> None:
    """Stand in for objects that are not needed: layouts, memory formats, paths."""


class _Call:
    """A function that a pickle may call, and cannot modify."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("a function with a state")


_CHECKPOINT: Final = "torch.distributed.checkpoint"
_NAMES: Final[Mapping[tuple[str, str], Callable[..., object]]] = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): _Metadata,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _Kept,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Kept,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _Kept,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _Call(_nothing),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _Info,
    # Names of torch before 2.3.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Kept,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Call(_nothing),
    ("torch", "Size"): _Call(_size),
    ("torch.serialization", "_get_layout"): _Call(_nothing),
    ("pathlib", "PosixPath"): _Call(_nothing),
    ("pathlib", "PurePosixPath"): _Call(_nothing),
    ("pathlib._local", "PosixPath"): _Call(_nothing),
}


class _Reader(pickle.Unpickler):
    """Unpickler that knows the names above and those of dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a name.

        Raises
        ------
        PolicyError
            It is not a name that describes a checkpoint.
        """
        found = _NAMES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in ITEM_BYTES:
            return _Dtype(name)
        msg = f"the metadata names {module:.100}.{name:.100}, which describes no checkpoint"
        hint = "nothing of it was run; do not load it with torch either"
        raise errors.PolicyError(msg, hint=hint)

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse references to objects outside of the pickle."""
        raise pickle.UnpicklingError(f"a {type(pid).__name__} refers outside of the metadata")


def read_metadata(data: bytes, *, where: str) -> Described:
    """Return the content of a ``.metadata``; nothing in it is executed.

    Raises
    ------
    PolicyError
        It names an object that is no part of a description; names it.
    FormatError
        It is no metadata, or of an unknown kind.
    CorruptObjectError
        It contradicts itself.
    LimitError
        It is too large.
    """
    if len(data) > limits.DCP_METADATA_BYTES_MAX:
        raise errors.LimitError(f"{where} has more than {limits.DCP_METADATA_BYTES_MAX} bytes")
    try:
        _check_instructions(data)
        found = _Reader(io.BytesIO(data)).load()
    except errors.LimitError as error:
        raise errors.LimitError(f"{where} has {error.message}") from error
    except errors.PolicyError:
        raise
    except Exception as error:  # the unpickler may raise any error on a hostile pickle
        msg = f"{where} is not a sound description of a checkpoint: {error}"
        raise errors.FormatError(msg) from error
    if not isinstance(found, _Metadata):
        raise errors.FormatError(f"{where} does not describe a checkpoint")
    try:
        return _described(found.state, where)
    except errors.CkptStoreError:
        raise
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError),
        *(RecursionError, MemoryError),
    ) as error:
        raise errors.CorruptObjectError(f"{where} is incomplete: {error!r}") from error


def _described(state: Mapping[str, Any], where: str) -> Described:
    places = _places(state.get("storage_data"), where)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, ArchivePlace] = {}
    chunks = 0
    for name, kept in state["state_dict_metadata"].items():
        if type(name) is not str:
            raise errors.CorruptObjectError(f"{where} has a {type(name).__name__} as a name")
        if isinstance(kept, _Bytes):
            values[name] = _place(places, name, None, where)
        elif isinstance(kept, _Tensor):
            chunks += len(kept.state["chunks"])  # many tensors can share one list
            if chunks > limits.BLOCKS_MAX:
                raise errors.LimitError(f"{where} has more than {limits.BLOCKS_MAX} chunks")
            tensors[name] = _tensor(name, kept.state, places, where)
        else:
            raise errors.FormatError(f"{where}: {name!r} is neither tensor nor bytes")
    mapping = state.get("planner_data")
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in mapping.items() if isinstance(mapping, dict) else ():
        if name in tensors or name in values:
            short = isinstance(path, tuple | list) and len(path) <= limits.STATE_DEPTH_MAX
            keys = tuple(path) if short else ()
            if not keys or not all(type(key) in (str, int) for key in keys):
                raise errors.CorruptObjectError(f"{where}: {name!r} belongs to no place")
            paths[name] = keys
    for name in (*tensors, *values):
        paths.setdefault(name, (name,))
    return Described(tensors=tensors, values=values, paths=paths)


_Places = Mapping[tuple[str, "tuple[int, ...] | None"], ArchivePlace]


def _places(storage: object, where: str) -> _Places:
    if not isinstance(storage, dict):
        msg = f"{where} does not say where the data is"
        raise errors.FormatError(msg, hint="only torch's own file writer is supported")
    found: dict[tuple[str, tuple[int, ...] | None], ArchivePlace] = {}
    for index, info in storage.items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise errors.FormatError(f"{where}: places of a kind that is not known")
        offset = index.state.get("offset")
        key = (_text(index.state["fqn"]), None if offset is None else _numbers(offset))
        file = _text(info.state["relative_path"])
        if len(file) > limits.DCP_FILE_CHARS_MAX:
            raise errors.LimitError(f"{where} names a file with {len(file)} characters")
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in file:
            msg = f"{where} names the file {file!r}, which is not in the directory"
            raise errors.FormatError(msg)
        start, length = _numbers((info.state["offset"], info.state["length"]))
        transforms = info.state.get("transform_descriptors") or ()
        if not isinstance(transforms, tuple | list) or len(transforms) > limits.DCP_TRANSFORMS_MAX:
            raise errors.FormatError(f"{where}: {key[0]!r} has more extensions than allowed")
        found[key] = ArchivePlace(
            file=file, offset=start, length=length, transforms=tuple(map(_text, transforms))
        )
    return found


def _place(places: _Places, name: str, offset: tuple[int, ...] | None, where: str) -> ArchivePlace:
    found = places.get((name, offset))
    if found is None:
        raise errors.CorruptObjectError(f"{where} does not say where {name!r} is")
    return found


def _tensor(name: str, state: Mapping[str, Any], places: _Places, where: str) -> StoredTensor:
    properties = state["properties"].state
    dtype = properties[""][0] if "" in properties else properties["dtype"]
    if not isinstance(dtype, _Dtype):
        raise errors.CorruptObjectError(f"{where}: {name!r} has no dtype")
    shape = _numbers(state["size"])
    chunks: list[tuple[Box, ArchivePlace]] = []
    for chunk in state["chunks"]:
        box = (_numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"]))
        if not len(box[0]) == len(box[1]) == len(shape):
            raise errors.CorruptObjectError(f"{where}: a chunk of {name!r} has other dimensions")
        chunks.append((box, places.get((name, box[0])) or _place(places, name, None, where)))
    return StoredTensor(dtype=dtype.name, shape=shape, chunks=tuple(chunks))


def _text(value: object) -> str:
    """Return a string.

    Raises
    ------
    ValueError
        `value` is none. The message does not print it: its text may exceed its size in memory.
    """
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} is no text")
    return value


def _numbers(values: object) -> tuple[int, ...]:
    """Return sizes or offsets.

    Raises
    ------
    ValueError
        `values` are none.
    """
    if not isinstance(values, tuple | list) or len(values) > limits.TENSOR_DIMS_MAX:
        raise ValueError(f"a {type(values).__name__} is no list of sizes")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"a {type(value).__name__} is no size, or out of range")
    return tuple(values)


# --- the instructions of a pickle, followed without making objects ---------------------------

_FLAT: Final = 0
_NESTED: Final = 1  # a tuple, or the result of a call: may hold others, and hashing visits all
_MARK: Final = 2

_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_INTS: Final = frozenset({"INT", "LONG", "LONG1", "LONG4"})
_VALUES: Final = _INTS | {
    *("BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "GLOBAL"),
}
# Instruction to the number of values it takes, down to the last mark (-1), and its result.
_EFFECTS: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(_VALUES, (0, _FLAT)),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), (0, None)),
    **dict.fromkeys(("POP", "APPEND", "BUILD"), (1, None)),
    **dict.fromkeys(("POP_MARK", "APPENDS", "SETITEMS"), (-1, None)),
    **dict.fromkeys(("LIST", "DICT"), (-1, _FLAT)),
    **dict.fromkeys(("STACK_GLOBAL", "NEWOBJ"), (2, _FLAT)),
    **dict.fromkeys(("TUPLE2", "REDUCE"), (2, _NESTED)),
    "MARK": (0, _MARK),
    "SETITEM": (2, None),
    "TUPLE": (-1, _NESTED),
    "TUPLE1": (1, _NESTED),
    "TUPLE3": (3, _NESTED),
}


def _check_instructions(data: bytes) -> None:
    """Follow the instructions of a pickle without making objects.

    The unpickler reserves memory for the highest place of its memo, even if unused, and objects in
    the memo can be named twice: some hundred bytes describe a tuple that takes years to hash.
    Both are refused here, like any instruction that no description of a checkpoint needs.

    Raises
    ------
    pickle.UnpicklingError, ValueError
        It is not the pickle of a description.
    LimitError
        There are too many instructions.
    """
    stack, memo = bytearray(), bytearray()
    for done, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if done >= limits.DCP_METADATA_OPCODES_MAX:
            raise errors.LimitError(f"more than {limits.DCP_METADATA_OPCODES_MAX} instructions")
        if name in _INTS and not -(1 << 64) < int(argument or 0) < 1 << 64:
            raise pickle.UnpicklingError("a number of more than 64 bits")
        if name == "MEMOIZE" or name in _PUTS:
            place = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if not 0 <= place <= len(memo) or not stack or stack[-1] == _MARK:
                raise pickle.UnpicklingError(f"a value for place {place} of the memo")
            memo[place : place + 1] = stack[-1:]
        elif name in _GETS:
            place = int(argument or 0)
            if not 0 <= place < len(memo):
                raise pickle.UnpicklingError(f"nothing is at place {place} of the memo")
            stack.append(memo[place])
        else:
            _apply(name, stack)


def _apply(name: str, stack: bytearray) -> None:
    """Apply an instruction's effect to the stack."""
    effect = _EFFECTS.get(name)
    if effect is None:
        raise pickle.UnpicklingError(f"the instruction {name} is in no description")
    count, left = effect
    start = stack.rfind(_MARK) if count < 0 else len(stack) - count
    if start < 0:
        raise pickle.UnpicklingError(f"nothing is there for {name}")
    taken = stack[start + (count < 0) :]
    if name in ("SETITEM", "SETITEMS", "DICT") and any(taken[::2]):
        raise pickle.UnpicklingError("the key of a dict is a tuple")
    del stack[start:]
    if left is not None:
        stack.append(left)
