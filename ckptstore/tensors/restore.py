"""Plans a load: memory for each tensor, existing tensors, devices; then rebuilds the state.

The order of calls, by the loader:

0. ``Restorer(skeleton, records, ...)`` checks everything that can be checked without data;
1. for each index of ``restorer.needed``, in any order and from any thread: ``destination(index)``;
2. decode the tensor's bytes into ``destination.view``;
3. ``destination.finish()``;
4. for each of ``restorer.parts``: fill its memory, then ``finish_part``;
5. once all are finished, in one thread: ``restorer.build()``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ckptstore.collector_pause import collector_paused
from ckptstore.errors import InvalidInputError, StateError, TensorNotFoundError
from ckptstore.format.dtypes import strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Leaf, Node, iter_leaves, kind_of
from ckptstore.tensors.adapters import TypeAdapter, adapters_by_name
from ckptstore.tensors.aliasing import same_strides
from ckptstore.tensors.build_state import Builder, adapter_names
from ckptstore.tensors.builtin import builtin_named
from ckptstore.tensors.destination import Destination, check_record, on_device
from ckptstore.tensors.overlaps import Fill, clashes, overlaps_itself
from ckptstore.tensors.parts import VIEWS, Part, plan_parts, view_node
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text, tensor_over

MapLocation: TypeAlias = (
    "str | torch.device | Mapping[str, str | torch.device] | Callable[..., Any] | None"
)

_CPU: Final = torch.device("cpu")
_ON_CPU: Final = frozenset({"numpy", "bytes", "generator"})
"""Kinds of leaves that torch.device does not apply to: they are read back on the CPU."""


class Restorer:
    """Plans and finishes one load.

    Parameters
    ----------
    skeleton
        Validated; pruned to the selection (:func:`ckptstore.format.skeleton.prune`), or the node
        of a single leaf.
    records
        All records of the version, by index.
    adapters
        For the objects in the skeleton.
    map_location
        As in ``torch.load``, but None is the CPU: a device for all; a dict from the device at
        save time to a device; or a callable that gets an empty storage and the saved device, and
        returns a storage on the target device. NumPy arrays, generators and tensors of role
        ``rng``, which torch itself needs on the CPU, stay there.
    into
        A state with tensors, which are filled in place and are part of the result; tensors that it
        lacks are new. Their contents are undefined until the load is done.
    leaves
        The leaves of the skeleton, if known.
    checked
        The tensors of `into` are known to fit, and to share no memory.

    Raises
    ------
    StateError
        An adapter is missing, or the library of a built-in one; names it.
    TensorNotFoundError
        `into` has a tensor at a path where the version has none.
    InvalidInputError
        A tensor of `into` differs in dtype or shape, or shares memory with another that is not
        shared in the version; or `map_location` names no device, or one that does not exist.
    CorruptObjectError, UnsupportedFeatureError
        A record is not valid, or the installed torch does not know its dtype.
    """

    def __init__(
        self,
        skeleton: Node,
        records: Sequence[TensorRecord],
        *,
        adapters: Sequence[TypeAdapter] = (),
        map_location: MapLocation = None,
        into: object = None,
        leaves: Sequence[Leaf] | None = None,
        checked: bool = False,
    ) -> None:
        self._skeleton = skeleton
        self._records = records
        self._adapters = adapters_by_name(adapters)
        for path, name in adapter_names(skeleton):
            if name in self._adapters:
                continue
            found = builtin_named(name)
            if found is None:
                msg = f"{path_text(path)!r} was saved by the adapter {name!r}, which is not given"
                raise StateError(msg, hint="pass adapters=[TypeAdapter(...)] on load as on save")
            self._adapters[name] = found
        self._leaves = iter_leaves(skeleton) if leaves is None else leaves
        used = {leaf.index for leaf in self._leaves}
        for index in used:
            check_record(records[index])
            dtype_named(records[index].dtype)
        self.parts: list[Part] = plan_parts(self._leaves, records)
        """Parts to read of records that only views of a part refer to."""
        used -= {part.index for part in self.parts}
        self.needed: tuple[int, ...] = tuple(sorted(used))
        """Indices of the records to read whole."""
        self._devices = self._place(map_location)
        self._targets: dict[Path, torch.Tensor] = {}
        self._direct: dict[int, torch.Tensor] = {}
        if into is not None:
            self._plan_into(into, checked=checked)
        self._finished: dict[int, Destination] = {}
        self._memory: dict[int, tuple[Part, torch.Tensor]] = {}

    def stays(self, index: int) -> bool:
        """Return whether a record is for the CPU, and decoded into its final memory."""
        return self._device(index).type == "cpu"

    def _device(self, index: int) -> torch.device:
        into = self._direct.get(index)
        return self._devices.get(index, _CPU) if into is None else into.device

    def destination(self, index: int) -> Destination:
        """Return the memory for record `index`; call it once an index. Allocates."""
        found = Destination(self._records[index], self._device(index), self._direct.get(index))
        self._finished[index] = found
        return found

    def finish_part(self, part: Part, storage: torch.UntypedStorage) -> None:
        """Take the memory of a part, which has been filled, and move it to its device."""
        memory = tensor_over(storage, torch.uint8, 0, (part.nbytes,), (1,))
        memory = on_device(memory, self._devices.get(part.index, _CPU))
        self._memory.update(dict.fromkeys(part.views, (part, memory)))

    @collector_paused()
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
        leaves = Counter([leaf.index for leaf in self._leaves])
        alone = {index for index, count in leaves.items() if count == 1}
        builder = Builder(
            tensors, self._records, self._adapters, self._targets, self._memory, alone
        )
        state = builder.build(self._skeleton)
        count_changes(self._targets.values())
        return state

    def _place(self, map_location: MapLocation) -> dict[int, torch.device]:
        devices: dict[int, torch.device] = {}
        if map_location is None:
            return devices
        known: dict[str, torch.device] = {}
        for leaf in self._leaves:
            if leaf.kind in _ON_CPU or self._records[leaf.index].role == "rng":
                devices[leaf.index] = _CPU
                continue
            saved = _saved_device(leaf.node)
            if saved not in known:
                known[saved] = _device_for(saved, map_location)
            devices.setdefault(leaf.index, known[saved])
        return devices

    def _plan_into(self, into: object, *, checked: bool) -> None:
        by_path = {leaf.path: leaf for leaf in self._leaves}
        viewed = {leaf.index for leaf in self._leaves if leaf.kind in VIEWS and view_node(leaf)}
        here = {leaf.index for leaf in self._leaves if leaf.kind in _ON_CPU}
        for path, target in _tensors_of(into, (), 0):
            leaf = by_path.get(path)
            if leaf is None and any(found[: len(path)] == path for found in by_path):
                msg = f"{path_text(path)!r} is made of several tensors, which into cannot fill"
                raise InvalidInputError(msg, hint="load it without into, or leave it out of into")
            if leaf is None:
                end = f".{path_text(path)}"
                near = next(filter(lambda text: text.endswith(end), map(path_text, by_path)), "")
                raise TensorNotFoundError(
                    f"into has a tensor at {path_text(path)!r}, where the version has none",
                    hint=f"the version has {near!r}: nest into as the state that was saved"
                    if near
                    else "leave it out of into; Store.load_into fills what fits and lists the rest",
                )
            record = self._records[leaf.index]
            if not checked:
                _check_target(leaf, record, target)
            self._targets[path] = target
            direct = leaf.index not in viewed and leaf.index not in self._direct
            direct &= not target.is_conj() and not target.is_neg()
            direct &= target.is_cpu or leaf.index not in here
            if direct and (not target.is_cpu or _has_layout(target, record)):
                self._direct[leaf.index] = target
        if checked:
            return
        fills = [
            Fill(path_text(path), target, by_path[path], self._records[by_path[path].index])
            for path, target in self._targets.items()
        ]
        for one, other in clashes(fills):
            msg = f"{one.name!r} and {other.name!r} share memory in into, but not in the version"
            raise InvalidInputError(msg, hint="leave one of them out of into")


def _device_for(saved: str, map_location: MapLocation) -> torch.device:
    """Return the device of a tensor saved from `saved`, according to `map_location`."""
    wanted: Any = map_location
    if isinstance(wanted, Mapping):
        wanted = wanted.get(saved, "cpu")
    elif callable(wanted):
        storage = wanted(torch.empty(0, device=_CPU).untyped_storage(), saved)
        wanted = "cpu" if storage is None else getattr(storage, "device", storage)
    if wanted is None:
        return _CPU
    if not isinstance(wanted, str | torch.device):
        raise InvalidInputError(f"map_location gives {wanted!r}, which is not a device")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        msg = f"map_location is {wanted!r}, which names no device: {error}"
        hint = '"cpu" is host memory, "cuda" a GPU of NVIDIA or AMD, "mps" one of Apple'
        raise InvalidInputError(msg, hint=hint) from error
    if device.type == "meta":
        raise InvalidInputError("a state cannot be loaded to the meta device")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on the kind of device
        why = str(error).strip().partition("\n")[0][:120]
        msg = f"map_location is {str(device)!r}, a device that this process does not have: {why}"
        raise InvalidInputError(msg, hint='map_location="cpu" loads into host memory') from error
    return device


def _saved_device(node: Node) -> str:
    if isinstance(node, list):
        if node[0] == "Q":
            return _saved_device(node[1])
        at = {"T": 4, "V": 8}.get(str(node[0]))
        if at is not None and len(node) > at:
            return str(node[at])
    return "cpu"


# --- tensors that a load fills in place -----------------------------------------------------------


def _tensors_of(value: object, path: Path, depth: int) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors of a state that lies at `path`, `depth` levels down, with their paths.

    Raises
    ------
    InvalidInputError
        The state is a module, or nested too deep.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, torch.nn.Module):
        msg = "into must be a state, not a module"
        raise InvalidInputError(msg, hint="pass into=module.state_dict()")
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


def _check_target(leaf: Leaf, record: TensorRecord, target: torch.Tensor) -> None:
    """Refuse a tensor that a leaf cannot be read into.

    Raises
    ------
    InvalidInputError
        The leaf is no tensor, or its dtype or shape differs; names the path.
    """
    where = repr(path_text(leaf.path))
    if leaf.kind in _ON_CPU or leaf.kind == "quantized":
        raise InvalidInputError(f"{where} is a {leaf.kind} leaf: it cannot be read into a tensor")
    if why := unfillable(target):
        hint = "leave it out of into, or of the load (exclude=)"
        msg = f"the tensor of into at {where} is not a plain one: it is {why}"
        raise InvalidInputError(msg, hint=hint)
    dtype, shape = kind_of(leaf, record)
    if dtype_text(target.dtype) != dtype or tuple(target.shape) != shape:
        raise InvalidInputError(
            f"{where} is {dtype}{list(shape)} in the version, but {dtype_text(target.dtype)}"
            f"{list(target.shape)} in into",
            hint="leave it out of into, or of the load (exclude=)",
        )


def unfillable(target: torch.Tensor) -> str:
    """Return why torch does not let values be written into a tensor in place; empty if it does."""
    if is_lazy(target):
        return "not initialized"
    if target.is_meta:
        return "on the meta device"
    if type(target).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(target).__name__}"
    if target.layout != torch.strided or target.is_quantized:
        return "not a plain strided tensor"
    if overlaps_itself(target):
        return "expanded: its elements share memory"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, which changes only under torch.inference_mode()"
    return ""


def count_changes(targets: Iterable[torch.Tensor]) -> None:
    """Tell autograd that tensors were written to, so that no gradient uses their old values."""
    torch.autograd.graph.increment_version([one for one in targets if not one.is_inference()])


def _has_layout(target: torch.Tensor, record: TensorRecord) -> bool:
    """Return whether a record's bytes can be put into a tensor's memory in their order."""
    strides = strides_of(record.shape, record.order)
    return record.blocks is None and same_strides(record.shape, target.stride(), strides)
