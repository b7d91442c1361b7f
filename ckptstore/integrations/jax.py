"""JAX: pytrees of arrays on a run of a store; see docs/howto/jax.md.

::

    run.save(state_of({"params": params, "opt": opt_state}), step=100)
    tree = load(run, "latest", like={"params": params, "opt": opt_state})

:func:`state_of` names the leaves by their key paths and describes arrays without copying them
where they lie in host memory; :func:`load` puts arrays onto the shardings of `like`. Versions hold
nothing of JAX: they load as tensors of torch where it is not installed.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ckptstore import errors, limits
from ckptstore.backends.transfers import operation
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.chunking import in_batches
from ckptstore.format.paths import Path, path_text
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.libraries import library
from ckptstore.repo import Repo
from ckptstore.states.lazy import SLICEABLE
from ckptstore.states.load import LoadRequest, load_state
from ckptstore.store import Run, Store, resume_check
from ckptstore.tensors.bfloat16 import to_bfloat16
from ckptstore.tensors.destination import check_record
from ckptstore.tensors.foreign import KEY_DATA, KEY_IMPL, ForeignTensor, LateBytes
from ckptstore.tensors.tensor_bytes import ArrayBytes, as_elements

_JAX: Final = "'ckptstore[jax]'; without it, store.load gives tensors of torch"
with library("jax", _JAX):
    import jax
    import jax.numpy as jnp
    import ml_dtypes

__all__ = ["load", "state_of"]

_DICTS: Final = (dict, OrderedDict, defaultdict)
_ARRAYS: Final = (jax.Array, jax.ShapeDtypeStruct)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


# --- save -----------------------------------------------------------------------------------------


def state_of(tree: object) -> Any:  # nested dicts, lists and tuples
    """Return a pytree as a state for :meth:`ckptstore.Run.save` and ``save_async``.

    Dicts, lists and tuples stay what they are. Other nodes (named tuples of optax, states and
    variables of Flax, dataclasses) become dicts from the names in their key paths to their
    children. Typed PRNG keys become dicts of their implementation and data. Leaves that are no
    arrays are left alone.

    No array is copied here. The result refers to them: save it before a step that donates them.
    Sharded arrays, and those of accelerators, are then copied to host memory a few at a time.

    Raises
    ------
    StateError
        An array was deleted or donated, or has parts that only other processes reach; names its
        path. The save itself refuses elements that no stored dtype holds, such as ``float8_e4m3``.
    LimitError
        The tree is nested too deep.
    """
    return _plain(tree, (), {})


def _plain(node: Any, path: Path, known: dict[int, Any]) -> Any:
    """Return a node without classes of JAX; `known` has the arrays that were met, by id."""
    if len(path) > limits.STATE_DEPTH_MAX:
        msg = f"{path_text(path[:5])!r} is nested deeper than {limits.STATE_DEPTH_MAX}"
        raise errors.LimitError(msg)
    if isinstance(node, jax.Array):
        if id(node) not in known:
            known[id(node)] = (node, _described(node, path))
        return known[id(node)][1]
    if isinstance(node, np.ndarray) and hasattr(ml_dtypes, node.dtype.name):
        return ForeignTensor(dtype=node.dtype.name, shape=node.shape, payload=ArrayBytes(node))
    if type(node) in _DICTS:
        return {key: _plain(child, (*path, key), known) for key, child in node.items()}
    asked = itertools.count()  # first for the node itself, then for its children
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda _: next(asked) > 0)
    if node is None or [keys for keys, _ in found] == [()]:
        return node
    children = {_key(entry): child for (entry,), child in found}
    if len(children) < len(found):
        msg = f"{path_text(path)!r} is a {type(node).__qualname__} with two children of a name"
        raise errors.StateError(msg)
    made = {key: _plain(child, (*path, key), known) for key, child in children.items()}
    return type(node)(made.values()) if type(node) in (list, tuple) else made


def _described(array: jax.Array, path: Path) -> Any:  # a tensor, or a dict
    _check_readable(array, path)
    if not _is_key(array):
        payload = _payload(array, path)
        return ForeignTensor(dtype=array.dtype.name, shape=array.shape, payload=payload)
    data = _described(jax.random.key_data(array), path)
    return {KEY_IMPL: jax.random.key_impl(array), KEY_DATA: data}


def _check_readable(array: jax.Array, path: Path) -> None:
    name = path_text(path)
    if array.is_deleted():
        raise errors.StateError(f"{name!r} was deleted, or donated", hint="save what replaced it")
    if not (array.is_fully_addressable or array.is_fully_replicated):
        gather = "jax.experimental.multihost_utils.process_allgather(tree, tiled=True)"
        msg = f"{name!r} has parts that only other processes reach"
        raise errors.StateError(msg, hint=f"gather it: {gather}; then save it in process 0")


def _payload(array: jax.Array, path: Path) -> ArrayBytes | LateBytes:
    shards = array.addressable_shards
    if len(shards) == 1 and shards[0].device.platform == "cpu":
        return ArrayBytes(np.asarray(array))  # its memory itself

    def read() -> npt.NDArray[Any]:
        """Return the whole array; not from `array` itself, which would keep the copy."""
        _check_readable(array, path)
        parts = [shard.data for shard in shards]
        sharding = array.sharding
        return np.asarray(jax.make_array_from_single_device_arrays(array.shape, sharding, parts))

    return LateBytes(read)


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _key(entry: Any) -> Any:  # a dict key
    """Return the key of a state for an entry of a key path."""
    for name in ("key", "idx", "name"):  # DictKey, FlattenedIndexKey; SequenceKey; GetAttrKey
        if hasattr(entry, name):
            return getattr(entry, name)
    return jax.tree_util.keystr((entry,))


# --- load -----------------------------------------------------------------------------------------


@operation("load")
def load(source: Store | Run, ref: str | int = "latest", *, like: Any = None) -> Any:
    """Return a version as a pytree of arrays, every byte checked.

    Of arrays that `like` shards, each device gets its part: a process reads only the pieces of its
    own devices' parts, and holds at most ``host_bytes`` of these in host memory (one part at
    least). In a job of many processes, all may call this, each for its own devices.

    Parameters
    ----------
    source
        A store, or a run of one.
    ref
        Names the version: ``"gpt@1200"`` of a store, ``"latest"`` or ``1200`` of a run.
    like
        A tree of the structure to return: arrays, or ``jax.ShapeDtypeStruct`` with shardings, for
        arrays on these shardings; NumPy arrays for NumPy arrays; for anything else, the saved
        value. It may be a part of the saved tree. None: dicts, lists and tuples as they are stored,
        arrays on the default device.

    Raises
    ------
    VersionNotFoundError, RunNotFoundError, InvalidRefError
        The ref names no version.
    TensorNotFoundError
        `like` has a leaf that the version lacks; names its path.
    InvalidInputError
        A leaf of `like` differs in shape or dtype; or JAX would shorten a dtype of 64 bits.
    CorruptTensorError
        A piece is damaged; names the tensor.
    StorageError
        The storage failed.
    """
    if not isinstance(source, Store):
        check_run(source)
    version = source.resolve(str(ref))
    session = source._session
    repo, content = session.repo, session.replicas.content(version)
    resume_check.chosen(repo, version.run, version=version.id)
    if like is None:
        return _as_arrays(load_state(repo, content, LoadRequest()), ())
    found, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = {tuple(map(_key, keys)): leaf for keys, leaf in found}
    places = {leaf.path: leaf.index for leaf in content.leaves if leaf.kind in SLICEABLE}
    plain = {p: one for p, one in leaves.items() if isinstance(one, _ARRAYS) and not _is_key(one)}
    boxed = {path: (places[path], leaf) for path, leaf in plain.items() if path in places}
    made: dict[Path, Any] = {**_read_arrays(repo, content, boxed)}
    rest = [path for path in leaves if path not in made]
    values = load_state(repo, content, LoadRequest(include=rest))
    for path in rest:
        value = functools.reduce(operator.getitem, path, values)
        made[path] = _fitted(value, leaves[path], path)
    return jax.tree_util.tree_unflatten(structure, [made[path] for path in leaves])


def _read_arrays(
    repo: Repo, content: Content, wanted: Mapping[Path, tuple[int, Any]]
) -> dict[Path, jax.Array]:
    """Return arrays for leaves of `like`, given with their records by path."""
    parts: list[tuple[Path, Box, list[Any], int]] = []
    for path, (index, like) in wanted.items():
        record = content.manifest.tensors[index]
        check_record(record)
        dtype = _numpy_dtype(record.dtype)
        _check_fits(path, dtype, record.shape, like)
        devices: dict[Box, list[Any]] = defaultdict(list)
        for where, box in _boxes(like):
            devices[box].append(where)
        for box, which in devices.items():
            parts.append((path, box, which, math.prod(box[1]) * dtype.itemsize))
    made: dict[Path, list[jax.Array]] = defaultdict(list)
    for batch in in_batches(parts, operator.itemgetter(3), repo.options.host_bytes):
        hosts = [np.empty(box[1], wanted[path][1].dtype) for path, box, _, _ in batch]
        regions = []
        for (path, box, _, _), host in zip(batch, hosts, strict=True):
            index, out = wanted[path][0], host.view(f"V{host.itemsize}")
            regions.append(Region(content=content, index=index, offsets=box[0], out=out))
        read_regions(regions, backend=repo.load_backend, options=repo.options, rounding=to_bfloat16)
        for (path, _, which, _), host in zip(batch, hosts, strict=True):
            made[path] += [_put(host, where, path) for where in which]
    join = jax.make_array_from_single_device_arrays
    return {
        path: join(like.shape, sharding, made[path])
        if (sharding := _sharding(like))
        else made[path][0]
        for path, (_, like) in wanted.items()
    }


def _boxes(like: Any) -> list[tuple[Any, Box]]:
    """Return the parts of an array that this process reads, each with the place that it goes to."""
    sharding, shape = _sharding(like), tuple(like.shape)
    if sharding is None:
        return [(None, (tuple(0 for _ in shape), shape))]
    kind, found = sharding.memory_kind, []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        box = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)
        found.append((jax.sharding.SingleDeviceSharding(device, memory_kind=kind), box))
    return found


def _sharding(like: Any) -> Any:
    """Return the sharding that `like` asks for; None for the default device, uncommitted."""
    return like.sharding if getattr(like, "committed", True) else None


def _put(host: Any, where: Any, path: Path) -> jax.Array:
    """Return an array of JAX on a sharding; None for the default device."""
    made = jnp.asarray(host) if where is None else jax.device_put(host, where)
    if made.dtype != host.dtype:
        msg = f"{path_text(path)!r} is {host.dtype}, which JAX would shorten"
        hint = "jax.config.update('jax_enable_x64', True), or load it with store.load"
        raise errors.InvalidInputError(msg, hint=hint)
    return made


def _fitted(value: Any, like: Any, path: Path) -> Any:
    """Return a loaded value as `like` asks for it."""
    host = isinstance(like, np.ndarray)
    made = _numpy_of(value) if host else _as_arrays(value, path)
    if not host and not isinstance(like, _ARRAYS):
        return made
    if not hasattr(made, "dtype"):
        raise errors.InvalidInputError(f"{path_text(path)!r} is no array in the version")
    _check_fits(path, made.dtype, made.shape, like)
    return made if host else _put(made, _sharding(like), path)


def _as_arrays(value: Any, path: Path) -> Any:
    """Return a loaded state with arrays of JAX for tensors, and keys for their dicts."""
    if isinstance(value, torch.Tensor):
        return _put(_numpy_of(value), None, path)
    if type(value) in (list, tuple):
        return type(value)(_as_arrays(one, (*path, at)) for at, one in enumerate(value))
    if type(value) not in (dict, OrderedDict):
        return value
    made = type(value)((key, _as_arrays(one, (*path, key))) for key, one in value.items())
    if made.keys() != {KEY_IMPL, KEY_DATA}:
        return made
    try:
        return jax.random.wrap_key_data(made[KEY_DATA], impl=made[KEY_IMPL])
    except (TypeError, ValueError) as error:
        msg = f"{path_text(path)!r} makes no key of {made[KEY_IMPL]!r}: {error}"
        raise errors.InvalidInputError(msg) from error


def _numpy_of(value: Any) -> npt.NDArray[Any]:
    """Return a tensor of torch, or anything that NumPy takes, as a NumPy array."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    dtype = _numpy_dtype(str(value.dtype).removeprefix("torch."))
    if value.layout != torch.strided:
        hint = "load it with store.load"
        raise errors.InvalidInputError("JAX loads no sparse tensors", hint=hint)
    return as_elements(value.detach().resolve_conj().resolve_neg()).view(dtype)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        msg = f"JAX has no dtype {name!r}"
        raise errors.InvalidInputError(msg, hint="load it as a tensor: store.load(ref)") from error


def _check_fits(path: Path, dtype: Any, shape: Sequence[int], like: Any) -> None:
    if (dtype, tuple(shape)) != (like.dtype, tuple(like.shape)):
        found, asked = f"{dtype}{list(shape)}", f"{like.dtype}{list(like.shape)}"
        msg = f"{path_text(path)!r} is {found} in the version, but {asked} in like"
        raise errors.InvalidInputError(msg, hint="load it as it was saved, and convert the result")
