"""States of models and optimizers whose tensors are divided among ranks, as one version.

Such a model has DTensors as parameters (FSDP2, HSDP, tensor parallelism), or FSDP1 wraps it, which
then gives its state as DTensors. Each rank writes its part with :class:`CkptStoreWriter`; a load at
any number of ranks reads the parts that it needs with :class:`CkptStoreReader`. States of
optimizers have the names of parameters as keys; those of trainings that are not sharded, which
have numbers, load too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from ckptstore.errors import InvalidInputError, SaveBusyError, StateError
from ckptstore.integrations.dcp.reader import CkptStoreReader
from ckptstore.integrations.dcp.writer import CkptStoreWriter
from ckptstore.integrations.model_names import clean, may_lack, untrained
from ckptstore.integrations.ranks import from_first, on_all
from ckptstore.model import Version
from ckptstore.store import Run

_Pair = tuple[torch.nn.Module, torch.optim.Optimizer]
Part = torch.nn.Module | _Pair
"""A model, or a model and its optimizer; the latter then counts."""

_OPTIONS: Final = frozenset(
    {"step", "metrics", "tags", "metadata", "roles", "codec", "adapters", "retain"}
)


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the parameters of a model are divided among ranks.

    Raises
    ------
    InvalidInputError
        FSDP1 wraps it in a way whose parameters have no names, or divides them by hosts.
    """
    return _is_fsdp1(model) or has_parts(dict(model.named_parameters()))


_DIVIDING: Final = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def _is_fsdp1(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 divides a model; have it give its state as DTensors.

    That it does if it knows a device mesh, which Accelerate does not give it.
    """
    wrapped: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    divided = [one for one in wrapped if one.sharding_strategy is not ShardingStrategy.NO_SHARD]
    for one in divided:
        if not one._use_orig_params or one.sharding_strategy not in _DIVIDING:
            msg = "FSDP1 is used with use_orig_params=False, or shards each host by itself"
            hint = "use_orig_params=True and FULL_SHARD or SHARD_GRAD_OP; or FSDP2: fsdp_version=2"
            raise InvalidInputError(msg, hint=hint)
        if one._device_mesh is None:
            mesh = DeviceMesh.from_group(one.process_group, one.compute_device.type)
            one._device_mesh = divided[0]._device_mesh or mesh
    return bool(divided)


def has_parts(state: Mapping[str, Any]) -> bool:
    """Return whether a state dict holds parts of tensors."""
    return any(isinstance(each, DTensor) for each in state.values())


def wants_full(accelerator: Any) -> bool:  # of accelerate, untyped
    """Return whether the FSDP plugin of an accelerator wants full state dicts."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return "FULL" in str(plugin and plugin.state_dict_type)


# --- saving --------------------------------------------------------------------------------------


def state_of(part: Part, *, full: bool = False, trained_only: bool = False) -> dict[str, Any]:
    """Return the state of a model or an optimizer; by the names of parameters if it is sharded.

    Names are those of the model before ``torch.compile``.

    Torch's function for optimizers takes a step with gradients of zero if there is no state yet,
    which would change the training: an optimizer without state is saved without.

    Parameters
    ----------
    full
        Gather whole tensors: rank 0 gets them in host memory. All ranks call it.
    trained_only
        Leave out the weights of a model that :func:`untrained` names.
    """
    options = torch_states.StateDictOptions(full_state_dict=full, cpu_offload=full)
    if isinstance(part, torch.nn.Module):
        return _weights(part, options, trained_only=trained_only)
    if not is_sharded(part[0]):
        return part[1].state_dict()
    if part[1].state and _is_fsdp1(part[0]):
        own: dict[str, Any] = torch_states.get_optimizer_state_dict(*part)
        if full:
            own["state"] = {
                name: {key: _gathered(value) for key, value in one.items()}
                for name, one in own["state"].items()
            }
        return own
    if full and part[1].state:
        return dict(torch_states.get_optimizer_state_dict(*part, options=options))
    return _by_name(part[1].state_dict(), _names(*part))


def _by_name(state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state of an optimizer with names in place of the numbers of parameters."""
    groups = state["param_groups"]
    return {
        **state,
        "state": {names[number]: one for number, one in state["state"].items()},
        "param_groups": [{**one, "params": [names[n] for n in one["params"]]} for one in groups],
    }


def _weights(
    model: torch.nn.Module, options: torch_states.StateDictOptions, *, trained_only: bool
) -> dict[str, Any]:
    if not is_sharded(model):
        state = {clean(name): value for name, value in model.state_dict().items()}
    elif not (trained_only or _is_fsdp1(model)):  # of which torch 2.13 crashes on CPUs if full
        return torch_states.get_model_state_dict(model, options=options)
    else:
        state = torch_states.get_model_state_dict(model)
    left = untrained(model, state) if trained_only else set()
    state = {name: value for name, value in state.items() if name not in left}
    if not options.full_state_dict:
        return state
    return {name: _gathered(value) for name, value in state.items()}


def _gathered(value: Any) -> Any:  # any value of a state
    """Return the whole of a DTensor in host memory. All ranks call it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.cpu() if isinstance(whole, torch.Tensor) else whole


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order."""
    names = {one: clean(name) for name, one in model.named_parameters()}
    params = list(chain(*(group["params"] for group in optimizer.param_groups)))
    if any(one not in names for one in params):
        msg = "the optimizer has parameters that are not those of its model"
        raise StateError(msg, hint="prepare models and optimizers in the same order, one for each")
    return [names[one] for one in params]


class _Planner(DefaultSavePlanner):
    """Keeps values whole, with the types of their keys, except below some keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self._keys = keys

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, **more: Any) -> None:  # type: ignore[override]
        """Flatten the sharded part of the state."""
        rest = {key: value for key, value in state_dict.items() if key not in self._keys}
        part = {key: value for key, value in state_dict.items() if key in self._keys}
        super().set_up_planner(part, storage_meta, **more)
        self.state_dict |= rest
        self.mappings |= {key: (key,) for key in rest}


@dataclass(slots=True)
class PendingShards:
    """A save of sharded states; each rank has one."""

    _run: Run
    _saving: Future[Metadata]
    _heard: bool = False

    @property
    def done(self) -> bool:
        """Whether it is over: durable, or failed."""
        return self._saving.done()

    def result(self, timeout: float | None = None) -> Version:
        """Wait until the version is durable, and return it.

        Raises
        ------
        SaveBusyError
            It is still under way after `timeout`, in seconds.
        CkptStoreError
            The save failed on a rank; no version appeared.
        """
        if not wait([self._saving], timeout).done:
            raise SaveBusyError(f"a save of {self._run.name} is still under way after {timeout} s")
        self._heard = True
        return self._run.resolve(f"#{raised(self._saving.result).storage_meta.save_id}")


_running: Final[list[PendingShards]] = []
"""The last background save: collectives of two saves in one group must not mix."""


def settle() -> None:
    """Wait for the background save of sharded states; raise its error, if rank 0 has not heard."""
    while _running:
        last = _running.pop()
        wait([last._saving])
        if not from_first(lambda save=last: save._heard):  # type: ignore[misc]
            last.result()


@functools.lru_cache(maxsize=1)
def _group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of background saves, apart from the collectives of the training."""
    return None if world is None else dist.new_group(backend="gloo")


def save_parts(run: Run, state: Any, keys: Sequence[str], **options: Any) -> PendingShards:
    """Save a state, whose `keys` hold parts of tensors. All ranks call it.

    Parameters
    ----------
    options
        For :class:`CkptStoreWriter`: step, metrics, retain ...; and `background`: return when the
        state was copied into host memory.

    Raises
    ------
    InvalidInputError
        An option is for whole states only, or a name or metric is not accepted.
    CkptStoreError
        A rank failed, with the error of the first one that did; no version appeared.
    """
    background = options.pop("background", False)
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        msg = f"{', '.join(unknown)}: not for a state of which each rank writes a part"
        hint = "save full state dicts: FULL_STATE_DICT, or save_distributed_checkpoint=False"
        raise InvalidInputError(msg, hint=hint)
    settle()
    writer, planner = CkptStoreWriter(run, **options), _Planner(keys)
    words: Any = {"state_dict": dict(state), "storage_writer": writer, "planner": planner}
    if not background:
        saving = Future[Metadata]()
        saving.set_result(raised(lambda: state_dict_saver.save(**words)))
        return PendingShards(run, saving)
    group = _group(dist.group.WORLD)
    saving = raised(lambda: state_dict_saver.async_save(**words, process_group=group))
    _running.append(PendingShards(run, saving))
    return _running[0]


def raised(call: Callable[[], Any]) -> Any:  # of torch
    """Return a result of torch's, and raise the error of the first rank that failed, if any."""
    try:
        return call()
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from error


# --- loading -------------------------------------------------------------------------------------

Filler = tuple[dict[str, Any], Callable[[Mapping[str, Any]], object]]
"""Tensors to read into, by their names in a version; and a function that uses them."""


def excluded(parts: Mapping[str, Part]) -> list[str]:
    """Return the patterns of paths that :func:`fill` reads, for a load of the others."""
    return [f"{path}.state" if isinstance(part, tuple) else path for path, part in parts.items()]


def fill(run: Run, ref: str, parts: Mapping[str, Part], rest: Mapping[str, Any]) -> None:
    """Set models and optimizers to those of a version, saved at any number of ranks.

    Parameters
    ----------
    ref
        Names the same version on all ranks, which call it.
    parts
        By their paths in the version, such as ``models.0``.
    rest
        The version without what :func:`excluded` names.

    Raises
    ------
    StateError
        The version has other models, parameters or shapes. Nothing was changed.
    CkptStoreError
        A rank could not read it. Nothing was changed.
    """
    wait([one._saving for one in _running])
    reader, content = opened(run, ref)
    _check_paths(content, parts)
    fillers: list[Filler] = [
        into_model(content, path, part)
        if isinstance(part, torch.nn.Module)
        else _into_optimizer(content, path, part, _at(rest, path)["param_groups"])
        for path, part in parts.items()
    ]
    read(reader, fillers)


def opened(run: Run, ref: str) -> tuple[CkptStoreReader, Metadata]:
    """Return a reader of a version, and its content. All ranks call it."""
    reader = CkptStoreReader(run, ref)
    return reader, on_all(reader.read_metadata)


def read(reader: CkptStoreReader, fillers: Sequence[Filler]) -> None:
    """Read into the tensors of fillers, and use them if no rank failed. All ranks call it."""
    found = {name: value for room, _ in fillers for name, value in room.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():  # of a load by one process
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        raised(lambda: state_dict_loader.load(found, storage_reader=reader, planner=planner))
    for _, use in fillers:
        use(found)


def _at(state: Any, path: str) -> Any:  # any state
    head, _, tail = path.partition(".")
    return state[head][int(tail)] if tail else state[head]


def _check_paths(content: Metadata, parts: Mapping[str, Part]) -> None:
    """Raise StateError if lists of the version have other items than those of `parts`."""
    mine = {path for path in parts if "." in path}
    lists = {path.partition(".")[0] for path in mine}
    found = {f"{path[0]}.{path[1]}" for path in content.planner_data.values() if path[0] in lists}
    # A model of which nothing was saved: frozen, or without weights.
    bare = {path for path in mine - found if isinstance(parts[path], torch.nn.Module)}
    other = sorted((found ^ mine) - bare)
    if other:
        msg = f"{other[0]} is only in {'the version' if other[0] in found else 'this training'}"
        raise StateError(msg, hint="prepare and register the same things, in the same order")


def into_model(content: Metadata, path: str, model: torch.nn.Module) -> Filler:
    """Return the filler of a model.

    Parameters
    ----------
    path
        Of its weights in the version; empty if they lie at the root, beside other things.

    Raises
    ------
    StateError
        The version has other names or shapes.
    """
    prefix = path and f"{path}."
    mine, metadata = state_of(model), content.state_dict_metadata
    saved = {name.removeprefix(prefix) for name in metadata if name.startswith(prefix)}
    saved = saved if path else saved & mine.keys()
    lacking = may_lack(model, mine, saved)
    mine = {name: value for name, value in mine.items() if name not in lacking}
    differing = sorted(mine.keys() ^ saved) or [
        name
        for name in saved
        if isinstance(about := metadata[f"{prefix}{name}"], TensorStorageMetadata)
        and about.size != getattr(mine[name], "shape", None)
    ]
    if differing:
        name = f"{prefix}{differing[0]}"
        msg = f"version and model differ in {len(differing)} names or shapes, as {name!r}"
        raise StateError(msg)
    room = {
        f"{prefix}{name}": torch.empty_like(value) if isinstance(value, torch.Tensor) else value
        for name, value in mine.items()
    }

    def use(found: Mapping[str, Any]) -> None:
        own = {name: found[f"{prefix}{name}"] for name in mine}
        options = torch_states.StateDictOptions(strict=not lacking)
        torch_states.set_model_state_dict(model, own, options=options)

    return room, use


def _into_optimizer(content: Metadata, path: str, part: _Pair, groups: list[Any]) -> Filler:
    """Return the filler of an optimizer; parameters may be frozen, or have no state."""
    model, optimizer = part
    params = list(chain(*(group["params"] for group in optimizer.param_groups)))
    by_torch = _is_fsdp1(model)
    if by_torch:  # the parameters are flat
        whole = torch_states.get_model_state_dict(model)
        params = [whole[name] for name in _names(*part)]
    keys = [one for group in groups for one in group["params"]]
    by_place = all(isinstance(one, int) for one in keys)  # not sharded: torch's rule
    numbers = {name: n for n, name in enumerate(map(str, keys) if by_place else _names(*part))}
    metadata, below = content.state_dict_metadata.items(), f"{path}.state."
    saved = {name: about for name, about in metadata if name.startswith(below)}
    places = {name: content.planner_data[name][path.count(".") + 2 :] for name in saved}
    mine = iter(range(len(params)))
    wanted = [[next(mine) for _ in group["params"]] for group in optimizer.param_groups]
    theirs = [[numbers.get(str(one), -1) for one in group["params"]] for group in groups]
    unknown = {path[0] for path in places.values()} - numbers.keys()
    if unknown or [sorted(one) for one in theirs] != wanted:
        msg = f"{path}: the version's groups of parameters are not the optimizer's"
        raise StateError(msg, hint="give the optimizer the same parameters in the same groups")
    room = {
        name: _room(saved[name], params[numbers[key]], last)
        for name, (key, *_, last) in places.items()
    }

    def use(found: Mapping[str, Any]) -> None:
        """Give the optimizer what was loaded."""
        state: dict[Any, Any] = {}
        for name, (key, *between, last) in places.items():
            node = state.setdefault(numbers[key], {})
            for each in between:
                node = node.setdefault(each, {})
            node[last] = found[name]
        own = [{**group, "params": ids} for group, ids in zip(groups, wanted, strict=True)]
        loaded: Any = {"state": state, "param_groups": own}
        if by_torch and state:
            named = _by_name(loaded, _names(*part))
            torch_states.set_optimizer_state_dict(model, optimizer, named)
        else:
            optimizer.load_state_dict(loaded)

    return room, use


def _room(about: object, param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return a tensor to read into: divided as the parameter is, if it has its shape."""
    if not isinstance(about, TensorStorageMetadata):
        return None
    alike = key != "step" and about.size == param.shape
    dtype = about.properties.dtype
    return torch.empty_like(param.detach() if alike else torch.empty(about.size), dtype=dtype)
