"""Where a load decodes to: memory for each tensor, existing tensors, devices, and the state again.

The order of calls, by the loader:

0. ``Restorer(skeleton, records, ...)`` checks everything that can be checked without data;
1. for each index of ``restorer.needed``, in any order and from any thread: ``destination(index)``;
2. decode the tensor's bytes into ``destination.view``;
3. ``destination.finish()``;
4. once all are finished, in one thread: ``restorer.build()``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch

from ckptstore.errors import (
    CorruptObjectError,
    InvalidInputError,
    LimitError,
    StateError,
    TensorNotFoundError,
)
from ckptstore.format.blocks import Blocks, gather
from ckptstore.format.dtypes import ITEM_BYTES, bytes_of, strides_of
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Leaf, Node, iter_leaves
from ckptstore.tensors.adapters import TypeAdapter, adapters_by_name
from ckptstore.tensors.memory import (
    dtype_named,
    dtype_text,
    memory_of,
    offset_of,
    tensor_over,
)
from ckptstore.tensors.rebuild import Builder, adapter_names

__all__ = ["Destination", "MapLocation", "Record", "Restorer"]

MapLocation: TypeAlias = (
    "str | torch.device | Mapping[str, str | torch.device] | Callable[..., Any] | None"
)

_CPU: Final = torch.device("cpu")
# Leaves that torch.device does not apply to: they are read back on the CPU.
_ON_CPU: Final = frozenset({"numpy", "bytes", "generator"})


class Record(Protocol):
    """What the manifest says of one tensor."""

    @property
    def dtype(self) -> str:
        """Torch's name of the element type, without ``torch.``."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes by dimension."""

    @property
    def order(self) -> Sequence[int] | None:
        """Dimensions from the outermost in memory to the innermost; None is 0, 1, 2, ..."""

    @property
    def role(self) -> str:
        """One of :data:`ckptstore.format.roles.ROLES`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""

    @property
    def blocks(self) -> Blocks | None:
        """Return the boxes that it is stored in; None where it is stored as one."""


class Destination:
    """Memory for one tensor. One thread at a time may finish it; several may write into `view`.

    Parameters
    ----------
    record
        Its dtype, shape and order.
    device
        Where the tensor is to be; other devices than the CPU are reached through host memory
        (pinned for CUDA) of the tensor's size.
    into
        A tensor on the CPU whose memory has exactly the record's layout: decode right into it.
        Not for one in blocks: these are put in order when all are there, which for that moment
        takes the tensor's memory twice.

    Raises
    ------
    LimitError
        The memory cannot be had.
    CorruptObjectError
        The record's size is not that of its dtype and shape, or its order is no order.
    """

    def __init__(
        self, record: Record, device: torch.device = _CPU, into: torch.Tensor | None = None
    ) -> None:
        _check_record(record)
        self._record = record
        self._device = device
        self._into = into
        self._done: torch.Tensor | None = None
        self.view: memoryview
        """Writable CPU memory for the tensor's bytes, in stored order."""
        if into is not None:
            self._storage, start = into.untyped_storage(), offset_of(into)
            self.view = memory_of(self._storage, start * into.element_size(), record.nbytes)
            return
        try:
            memory = torch.empty(
                record.nbytes, dtype=torch.uint8, device=_CPU, pin_memory=device.type == "cuda"
            )
        except RuntimeError as error:
            raise LimitError(f"no memory for a tensor of {record.nbytes} bytes") from error
        self._storage = memory.untyped_storage()
        self.view = memory_of(self._storage, 0, record.nbytes)

    def finish(self) -> torch.Tensor:
        """Return the tensor, moved to its device. `view` must have been filled.

        May be called again; the host memory of other devices is given back at the first call.
        """
        if self._done is None:
            self._done = self._into if self._into is not None else self._tensor()
            del self.view, self._storage
        return self._done

    def _tensor(self) -> torch.Tensor:
        record, storage = self._record, self._storage
        if record.blocks is not None:
            storage = _gathered(record, record.blocks, self.view)
        if self._device.type != "cpu":
            memory = tensor_over(storage, torch.uint8, 0, (record.nbytes,), (1,))
            storage = memory.to(self._device).untyped_storage()
        strides = strides_of(record.shape, record.order)
        return tensor_over(storage, dtype_named(record.dtype), 0, record.shape, strides)


def _gathered(record: Record, blocks: Blocks, stored: memoryview) -> torch.UntypedStorage:
    """Return new memory with a tensor's bytes row by row, out of those of its blocks."""
    try:
        memory = torch.empty(record.nbytes, dtype=torch.uint8, device=_CPU)
    except RuntimeError as error:
        raise LimitError(f"no memory for a tensor of {record.nbytes} bytes") from error
    storage = memory.untyped_storage()
    out = memory_of(storage, 0, record.nbytes)
    gather(blocks, record.shape, ITEM_BYTES[record.dtype], stored, out)
    return storage


def _check_record(record: Record) -> None:
    if bytes_of(record.dtype, record.shape) != record.nbytes:
        raise CorruptObjectError(
            f"a record of {record.dtype}{list(record.shape)} has {record.nbytes} bytes"
        )
    if record.order is not None and sorted(record.order) != list(range(len(record.shape))):
        raise CorruptObjectError(f"{record.order!r} is not an order of {len(record.shape)} dims")


class Restorer:
    """Plans and finishes one load.

    Parameters
    ----------
    skeleton
        Validated; pruned to what is wanted (:func:`ckptstore.format.skeleton.prune`), or the node
        of a single leaf.
    records
        All records of the version, by index.
    adapters
        For the objects in the skeleton.
    map_location
        As in ``torch.load``, but None is the CPU: a device for all; a dict from the device at
        save time to a device; or a callable that gets an empty storage and the saved device, and
        returns a storage on the device wanted. NumPy arrays, generators and tensors of role
        ``rng``, which torch itself wants on the CPU, stay there.
    into
        A state with tensors, which are filled in place and come back in the result; what it does
        not have is made new. Until the load is done, they may hold anything.
    leaves
        Those of the skeleton, where they are known.

    Raises
    ------
    StateError
        An adapter is missing; names the path.
    TensorNotFoundError
        `into` has a tensor at a path where the version has none.
    InvalidInputError
        A tensor of `into` differs in dtype or shape, or shares memory with another that is not
        shared in the version; or `map_location` is not valid.
    CorruptObjectError, UnsupportedFeatureError
        A record is not valid, or its dtype is unknown to this torch.
    """

    def __init__(
        self,
        skeleton: Node,
        records: Sequence[Record],
        *,
        adapters: Sequence[TypeAdapter] = (),
        map_location: MapLocation = None,
        into: object = None,
        leaves: Sequence[Leaf] | None = None,
    ) -> None:
        self._skeleton = skeleton
        self._records = records
        self._adapters = adapters_by_name(adapters)
        for path, name in adapter_names(skeleton):
            if name not in self._adapters:
                raise StateError(
                    f"{path_text(path)!r} was saved by the adapter {name!r}, which is not given",
                    hint="pass adapters=[TypeAdapter(...)] on load as on save",
                )
        self._leaves = iter_leaves(skeleton) if leaves is None else leaves
        self.needed: tuple[int, ...] = tuple(sorted({leaf.index for leaf in self._leaves}))
        """Indices of the records to read."""
        for index in self.needed:
            _check_record(records[index])
            dtype_named(records[index].dtype)
        self._devices = self._place(map_location)
        self._targets: dict[Path, torch.Tensor] = {}
        self._direct: dict[int, torch.Tensor] = {}
        if into is not None:
            self._plan_into(into)
        self._finished: dict[int, Destination] = {}

    def batches(self, host_bytes: int) -> Iterator[list[int]]:
        """Yield the needed indices in batches, to be read and finished one after another.

        Tensors for the CPU are decoded where they stay, and make one batch; those for other
        devices pass through host memory, `host_bytes` at a time (one tensor at least).
        """
        stay = [i for i in self.needed if self._devices.get(i, _CPU).type == "cpu"]
        if stay:
            yield stay
        batch: list[int] = []
        filled = 0
        for index in self.needed:
            if self._devices.get(index, _CPU).type == "cpu":
                continue
            if batch and filled + self._records[index].nbytes > host_bytes:
                yield batch
                batch, filled = [], 0
            batch.append(index)
            filled += self._records[index].nbytes
        if batch:
            yield batch

    def destination(self, index: int) -> Destination:
        """Return the memory for record `index`; call it once an index. Allocates."""
        into = self._direct.get(index)
        found = Destination(self._records[index], self._devices.get(index, _CPU), into)
        self._finished[index] = found
        return found

    def build(self) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state. Every needed destination must have been filled.

        Raises
        ------
        CorruptObjectError
            A leaf does not fit its record; names the path.
        StateError
            An adapter failed; names the path.
        """
        tensors = {index: self._finished[index].finish() for index in self.needed}
        self._finished.clear()
        return Builder(tensors, self._records, self._adapters, self._targets).build(self._skeleton)

    def _place(self, map_location: MapLocation) -> dict[int, torch.device]:
        devices: dict[int, torch.device] = {}
        choose = _chooser(map_location)
        known: dict[str, torch.device] = {}
        for leaf in self._leaves:
            saved = _saved_device(leaf.node)
            if saved not in known:
                known[saved] = choose(saved)
            if leaf.kind in _ON_CPU or self._records[leaf.index].role == "rng":
                devices[leaf.index] = _CPU
            else:
                devices.setdefault(leaf.index, known[saved])
        return devices

    def _plan_into(self, into: object) -> None:
        by_path = {leaf.path: leaf for leaf in self._leaves}
        viewed = {leaf.index for leaf in self._leaves if leaf.kind != "tensor" and _is_view(leaf)}
        for path, target in _tensors_of(into, (), 0):
            leaf = by_path.get(path)
            if leaf is None:
                raise TensorNotFoundError(
                    f"into has a tensor at {path_text(path)!r}, where the version has none"
                )
            record = self._records[leaf.index]
            _check_target(leaf, record, target)
            self._targets[path] = target
            direct = leaf.index not in viewed and leaf.index not in self._direct
            if direct and _decodable(record, target):
                self._direct[leaf.index] = target
        _check_apart(self._targets, by_path, self._direct)


def _chooser(map_location: MapLocation) -> Callable[[str], torch.device]:
    def choose(saved: str) -> torch.device:
        wanted: Any = map_location
        if isinstance(wanted, Mapping):
            wanted = wanted.get(saved, "cpu")
        elif callable(wanted):
            storage = wanted(torch.empty(0, device=_CPU).untyped_storage(), saved)
            wanted = "cpu" if storage is None else storage.device
        if wanted is None:
            return _CPU
        if not isinstance(wanted, str | torch.device):
            raise InvalidInputError(f"map_location gives {wanted!r}, which is not a device")
        try:
            device = torch.device(wanted)
        except RuntimeError as error:
            raise InvalidInputError(f"{wanted!r} is not a device: {error}") from error
        if device.type == "meta":
            raise InvalidInputError("a state cannot be loaded to the meta device")
        return device

    return choose


def _saved_device(node: Node) -> str:
    if isinstance(node, list):
        if node[0] == "Q":
            return _saved_device(node[1])
        at = {"T": 4, "V": 8}.get(str(node[0]))
        if at is not None and len(node) > at:
            return str(node[at])
    return "cpu"


def _is_view(leaf: Leaf) -> bool:
    node = leaf.node
    inner = node[1] if isinstance(node, list) and node[0] == "Q" else node
    return isinstance(inner, list) and inner[0] == "V"


def _tensors_of(value: object, path: Path, depth: int) -> list[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, torch.nn.Module):
        raise InvalidInputError(
            "into must be a state, not a module", hint="pass into=module.state_dict()"
        )
    if depth > 64:
        raise InvalidInputError("into is nested too deep")
    found: list[tuple[Path, torch.Tensor]] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            found += _tensors_of(item, (*path, key), depth + 1)
    elif isinstance(value, list | tuple | deque):
        for at, item in enumerate(value):
            found += _tensors_of(item, (*path, at), depth + 1)
    return found


def _check_target(leaf: Leaf, record: Record, target: torch.Tensor) -> None:
    if leaf.kind in _ON_CPU or leaf.kind == "quantized":
        where = repr(path_text(leaf.path))
        raise InvalidInputError(f"{where} is a {leaf.kind} leaf: it cannot be read into a tensor")
    if target.layout != torch.strided or target.is_meta or target.is_quantized:
        where = repr(path_text(leaf.path))
        raise InvalidInputError(f"the tensor of into at {where} is not a plain strided tensor")
    dtype, shape = record.dtype, tuple(record.shape)
    if _is_view(leaf) and isinstance(leaf.node, list):
        dtype, sizes = str(leaf.node[2]), leaf.node[4]
        shape = tuple(sizes) if isinstance(sizes, list) else ()  # type: ignore[arg-type]
    if dtype_text(target.dtype) != dtype or tuple(target.shape) != shape:
        where = repr(path_text(leaf.path))
        raise InvalidInputError(
            f"{where} is {dtype}{list(shape)} in the version, but {target.dtype}"
            f"{list(target.shape)} in into",
            hint="leave it out of into, or of the load (exclude=)",
        )


def _decodable(record: Record, target: torch.Tensor) -> bool:
    """Return whether the bytes can be decoded straight into the target's memory."""
    if record.order is None and target.is_contiguous():
        same = True
    else:
        strides = strides_of(record.shape, record.order)
        pairs = zip(record.shape, target.stride(), strides, strict=True)
        same = all(size == 1 or mine == theirs for size, mine, theirs in pairs)
    same = same and record.blocks is None
    return same and target.is_cpu and not target.is_conj() and not target.is_neg()


def _reach(target: torch.Tensor) -> int:
    """Return from where to where in memory a tensor has elements, in elements."""
    if target.is_contiguous():
        return target.numel()
    return 1 + sum(
        (size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True)
    )


def _check_apart(
    targets: Mapping[Path, torch.Tensor],
    leaves: Mapping[Path, Leaf],
    direct: Mapping[int, torch.Tensor],
) -> None:
    """Refuse memory that two different tensors of the version would be read into."""
    spans: list[tuple[str, int, int, int, Path]] = []
    for path, target in targets.items():
        leaf = leaves[path]
        if leaf.index in direct and target.numel():
            start = target.data_ptr()
            stop = start + _reach(target) * target.element_size()
            spans.append((str(target.device), start, stop, leaf.index, path))
    spans.sort(key=lambda span: span[:3])
    for before, after in itertools.pairwise(spans):
        if before[0] == after[0] and after[1] < before[2] and before[3] != after[3]:
            a, b = path_text(before[4]), path_text(after[4])
            raise InvalidInputError(
                f"{a!r} and {b!r} share memory in into, but are two tensors in the version",
                hint="leave one of them out of into",
            )
