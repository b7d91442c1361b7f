"""The ``.metadata`` of a directory that torch.distributed.checkpoint wrote, read without executing.

It is a pickle, and a pickle is a program: the reader follows only the instructions that build
plain values, and allows only the names of the classes that describe a checkpoint. It looks up none
of these names: each has a stand-in here that keeps its arguments. The result is checked field by
field. Imports no torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NoReturn

from ckptstore import limits
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    FormatError,
    LimitError,
    PolicyError,
)
from ckptstore.format.blocks import Box
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.integrations.dcp.pickle_instructions import check_instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    chunks: tuple[tuple[Box, Place], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Content of a directory, by name, in the order of its metadata."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Place]
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
    pass


class _Tensor(_Kept):
    pass


class _Bytes(_Kept):
    pass


class _Chunk(_Kept):
    pass


class _Properties(_Kept):
    pass


class _Index(_Kept):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class _Info(_Kept):
    pass


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
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Properties,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _Kept,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _Call(_nothing),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _Info,
    # Names of torch before 2.3.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Call(_nothing),
    ("torch", "Size"): _Call(_size),
    ("torch.serialization", "_get_layout"): _Call(_nothing),
    ("pathlib", "PosixPath"): _Call(_nothing),
    ("pathlib", "PurePosixPath"): _Call(_nothing),
    ("pathlib._local", "PosixPath"): _Call(_nothing),
}


class _Reader(pickle.Unpickler):
    """Unpickler that knows the names above and those of dtypes."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
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
        raise PolicyError(msg, hint="nothing of it was run; do not load it with torch either")

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
        raise LimitError(f"{where} has more than {limits.DCP_METADATA_BYTES_MAX} bytes")
    try:
        check_instructions(data)
        found = _Reader(io.BytesIO(data)).load()
    except LimitError as error:
        raise LimitError(f"{where} has {error.message}") from error
    except PolicyError:
        raise
    except Exception as error:  # the unpickler may raise any error on a hostile pickle
        raise FormatError(f"{where} is not a sound description of a checkpoint: {error}") from error
    if not isinstance(found, _Metadata):
        raise FormatError(f"{where} does not describe a checkpoint")
    try:
        return _described(found.state, where)
    except CkptStoreError:
        raise
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError),
        *(RecursionError, MemoryError),
    ) as error:
        raise CorruptObjectError(f"{where} is incomplete: {error!r}") from error


def _described(state: Mapping[str, Any], where: str) -> Described:
    places = _places(state.get("storage_data"), where)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Place] = {}
    chunks = 0
    for name, kept in state["state_dict_metadata"].items():
        if type(name) is not str:
            raise CorruptObjectError(f"{where} has a {type(name).__name__} as a name")
        if isinstance(kept, _Bytes):
            values[name] = _place(places, name, None, where)
        elif isinstance(kept, _Tensor):
            chunks += len(kept.state["chunks"])  # many tensors can share one list
            if chunks > limits.BLOCKS_MAX:
                raise LimitError(f"{where} has more than {limits.BLOCKS_MAX} chunks")
            tensors[name] = _tensor(name, kept.state, places, where)
        else:
            raise FormatError(f"{where}: {name!r} is neither tensor nor bytes")
    mapping = state.get("planner_data")
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in mapping.items() if isinstance(mapping, dict) else ():
        if name in tensors or name in values:
            short = isinstance(path, tuple | list) and len(path) <= limits.STATE_DEPTH_MAX
            keys = tuple(path) if short else ()
            if not keys or not all(type(key) in (str, int) for key in keys):
                raise CorruptObjectError(f"{where}: {name!r} belongs to no place")
            paths[name] = keys
    for name in (*tensors, *values):
        paths.setdefault(name, (name,))
    return Described(tensors=tensors, values=values, paths=paths)


_Places = Mapping[tuple[str, "tuple[int, ...] | None"], Place]


def _places(storage: object, where: str) -> _Places:
    if not isinstance(storage, dict):
        raise FormatError(
            f"{where} does not say where the data is",
            hint="only torch's own file writer is supported",
        )
    found: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in storage.items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise FormatError(f"{where}: places of a kind that is not known")
        offset = index.state.get("offset")
        key = (_text(index.state["fqn"]), None if offset is None else _numbers(offset))
        file = _text(info.state["relative_path"])
        if len(file) > limits.DCP_FILE_CHARS_MAX:
            raise LimitError(f"{where} names a file with {len(file)} characters")
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in file:
            raise FormatError(f"{where} names the file {file!r}, which is not in the directory")
        start, length = _numbers((info.state["offset"], info.state["length"]))
        transforms = info.state.get("transform_descriptors") or ()
        if not isinstance(transforms, tuple | list) or len(transforms) > limits.DCP_TRANSFORMS_MAX:
            raise FormatError(f"{where}: {key[0]!r} has more extensions than allowed")
        found[key] = Place(
            file=file, offset=start, length=length, transforms=tuple(map(_text, transforms))
        )
    return found


def _place(places: _Places, name: str, offset: tuple[int, ...] | None, where: str) -> Place:
    found = places.get((name, offset))
    if found is None:
        raise CorruptObjectError(f"{where} does not say where {name!r} is")
    return found


def _tensor(name: str, state: Mapping[str, Any], places: _Places, where: str) -> StoredTensor:
    properties = state["properties"].state
    dtype = properties[""][0] if "" in properties else properties["dtype"]
    if not isinstance(dtype, _Dtype):
        raise CorruptObjectError(f"{where}: {name!r} has no dtype")
    shape = _numbers(state["size"])
    chunks: list[tuple[Box, Place]] = []
    for chunk in state["chunks"]:
        box = (_numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"]))
        if not len(box[0]) == len(box[1]) == len(shape):
            raise CorruptObjectError(f"{where}: a chunk of {name!r} has other dimensions")
        place = places.get((name, box[0])) or _place(places, name, None, where)
        chunks.append((box, place))
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
