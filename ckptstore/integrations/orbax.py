"""Checkpoints of Orbax as states; their arrays are read by TensorStore, a few at a time.

Read are the folders of a StandardCheckpointer or PyTreeCheckpointer, in OCDBT or one folder an
array, and those of a CheckpointManager's steps. Nothing in them is executed, and neither Orbax nor
JAX is needed. Only what JSON says of the tree is believed: sequences come back as lists, every
other node as a dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.errors import FormatError, InvalidInputError, LimitError
from ckptstore.integrations.libraries import needed
from ckptstore.integrations.pretrained_files import read_json
from ckptstore.tensors.foreign import KEY_DATA, KEY_IMPL, ForeignTensor, LateBytes

_TREE: Final = "_METADATA"
_STEP: Final = "_CHECKPOINT_METADATA"
_STEP_NAME: Final = re.compile(r"(?:.*_)?([0-9]{1,18})")
_EMPTY: Final[dict[str, Any]] = {"Dict": dict, "List": list, "Tuple": tuple}
_NONE: Final = ("None", "NamedTuple")
_SEQUENCE: Final = 1


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _Entry(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: dict[str, Any]


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Entry]
    use_zarr3: bool | None = False
    store_array_data_equal_to_fill_value: bool | None = False


def find_checkpoint(path: Path, step: int | None) -> Path | None:
    """Return the folder of a checkpoint: `path`, or that of a step in it; None if it is none.

    Parameters
    ----------
    step
        The step of a manager's folder to take; None for the newest.

    Raises
    ------
    InvalidInputError
        The folder has no such step; the hint names those that it has.
    """
    if (path / _TREE).is_file() or (path / _STEP).is_file():
        return path
    steps: dict[int, Path] = {}
    for entry in path.iterdir():
        found = _STEP_NAME.fullmatch(entry.name)
        if found and (entry / _STEP).is_file():
            steps[int(found[1])] = entry
    if steps and step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps)[-10:]))
        raise InvalidInputError(f"{path} has no step {step}", hint=f"it has {known}")
    return steps[max(steps) if step is None else step] if steps else None


def read_checkpoint(folder: Path) -> tuple[Any, int | None, dict[str, float]]:
    """Return the content of a folder that :func:`find_checkpoint` found.

    Returns
    -------
    tuple
        The state, with unread arrays; the step and metrics that a manager was given.

    Raises
    ------
    FormatError
        It is damaged, or its layout is not known; names the file.
    InvalidInputError
        It has an item that is neither a tree nor JSON.
    MissingDependencyError
        TensorStore is not installed.
    """
    if (folder / _TREE).is_file():
        return _read_tree(folder), None, {}
    metrics: dict[str, Any] = {}
    items: dict[str, Any] = {}
    for entry in sorted(filter(Path.is_dir, folder.iterdir())):
        if entry.name == "metrics" and (entry / "metrics").is_file():
            metrics = read_json(entry / "metrics", dict[str, Any])
        elif (entry / _TREE).is_file():
            items[entry.name] = _read_tree(entry)
        elif (entry / "metadata").is_file():
            items[entry.name] = read_json(entry / "metadata", Any)
        else:
            msg = f"{entry} is neither a tree of arrays nor JSON"
            raise InvalidInputError(msg, hint="import the folders of the other items one by one")
    named = _STEP_NAME.fullmatch(folder.name)
    metrics = {name: value for name, value in metrics.items() if type(value) in (int, float)}
    state = items["default"] if items.keys() == {"default"} else items
    return state, int(named[1]) if named else None, metrics


def _read_tree(folder: Path) -> Any:  # nested dicts and lists
    """Return a tree with unread arrays."""
    described: _Tree = read_json(folder / _TREE, _Tree)
    value_of = values_of(
        folder,
        driver="zarr3" if described.use_zarr3 else "zarr",
        fills=not described.store_array_data_equal_to_fill_value,
    )
    above: dict[Any, Any] = {}
    for entry in described.tree_metadata.values():
        name = ".".join(key.key for key in entry.key_metadata)
        if len(entry.key_metadata) > limits.STATE_DEPTH_MAX:
            raise LimitError(f"{folder / _TREE} is nested deeper than {limits.STATE_DEPTH_MAX}")
        node: Any = above
        last: int | str = "root"
        for key in entry.key_metadata:
            node = node.setdefault(last, {})
            at = key.key_type == _SEQUENCE and key.key.isdecimal() and len(key.key) < 10
            last = int(key.key) if at else key.key
            if type(node) is not dict:
                raise FormatError(f"{folder / _TREE} has {name!r} below a value")
        kind = str(entry.value_metadata.get("value_type"))
        made = _EMPTY[kind]() if kind in _EMPTY else None
        value = made if kind in (*_EMPTY, *_NONE) else value_of(name, kind)
        if node.setdefault(last, value) is not value:
            raise FormatError(f"{folder / _TREE} has {name!r} twice")
    return _with_lists(above.get("root", {}), folder / _TREE)


def _with_lists(node: Any, file: Path) -> Any:
    """Return a tree with lists for the dicts whose keys are positions."""
    if type(node) is not dict:
        return node
    made = {key: _with_lists(value, file) for key, value in node.items()}
    if not any(type(key) is int for key in made):
        return made
    if {*made} != {*range(len(made))}:
        raise FormatError(f"{file} has a sequence with gaps: {sorted(made, key=str)[:10]}")
    return [made[at] for at in range(len(made))]


# Cache of nodes of an OCDBT. Source: Orbax itself takes as much.
_CONTEXT: Final = {"cache_pool": {"total_bytes_limit": 100_000_000}}


class _Array(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


def values_of(folder: Path, *, driver: str, fills: bool) -> Callable[[str, str], Any]:
    """Return a function that gives the value of a name and kind: a tensor, a number, a text.

    Parameters
    ----------
    driver
        TensorStore's name of the format of arrays.
    fills
        Parts of arrays that are absent hold zeros; if not, they are missing.
    """
    tensorstore = needed("tensorstore", "'ckptstore[orbax]'")
    context = tensorstore.Context(_CONTEXT)
    base = {"driver": "file", "path": f"{folder.resolve()}/"}
    ocdbt = (folder / "manifest.ocdbt").is_file()
    implementations = _implementations(folder)

    def spec_of(name: str, kind: str) -> dict[str, Any]:
        """Return TensorStore's description of a value; raises FormatError for unsafe names."""
        if kind == "string":
            store = {**base, "path": f"{base['path']}_strings.json"}
            return {"driver": "json", "kvstore": store, "json_pointer": f"/{name}"}
        if not ocdbt and (name.startswith("/") or ".." in PurePosixPath(name).parts):
            raise FormatError(f"{folder} names the folder {name!r}")
        inside = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        return {
            "driver": driver,
            "kvstore": inside if ocdbt else {**base, "path": f"{base['path']}{name}/"},
            "fill_missing_data_reads": fills,
        }

    def value_of(name: str, kind: str) -> Any:
        """Return a value; the bytes of an array are read when they are needed."""

        def done(future: Any) -> Any:
            """Return a result of TensorStore."""
            try:
                return future.result()
            except (ValueError, OSError) as error:
                msg = f"{folder} has no sound array {name!r}: {error}"
                raise FormatError(msg, hint="did its save finish? else copy it again") from error

        found = done(tensorstore.open(spec_of(name, kind), open=True, read=True, context=context))
        if kind in ("scalar", "string"):
            return done(found.read()).item()
        late = LateBytes(lambda: done(found.read()))
        tensor = ForeignTensor(dtype=found.dtype.name, shape=tuple(found.shape), payload=late)
        implementation = implementations.get(name)
        return tensor if implementation is None else {KEY_IMPL: implementation, KEY_DATA: tensor}

    return value_of


def _implementations(folder: Path) -> dict[str, str]:
    """Return the implementations of typed PRNG keys by the names of their arrays."""
    found: dict[str, str] = {}
    for file in sorted((folder / "array_metadatas").glob("process_*")):
        listed = read_json(file, dict[str, list[dict[str, _Array]]])
        for one in (one for many in listed.values() for each in many for one in each.values()):
            if isinstance(implementation := (one.ext_metadata or {}).get("random_key_impl"), str):
                found[one.param_name] = implementation
    return found
