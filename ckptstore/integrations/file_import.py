"""Import: a file of weights becomes a version; read from mapped memory, without executing anything.

It reads safetensors files, files of ``torch.save`` (always with ``weights_only=True``), folders
or index files of either in shards, as Transformers writes them, directories of
torch.distributed.checkpoint (:mod:`ckptstore.integrations.dcp.directory`), and checkpoints of
Orbax (:mod:`ckptstore.integrations.orbax`) and DeepSpeed (:mod:`ckptstore.integrations.deepspeed`).
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ckptstore import errors, limits
from ckptstore.backends.oserrors import translate
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.config import absolute_path
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.paths import Pattern
from ckptstore.integrations import file_kinds as kinds
from ckptstore.integrations.dcp.plain_bytes import check_archive, first_line
from ckptstore.integrations.deepspeed import FORMAT as UNIVERSAL
from ckptstore.integrations.deepspeed import find_universal, read_universal
from ckptstore.integrations.orbax import find_checkpoint, read_checkpoint
from ckptstore.integrations.pretrained_files import names_digest, read_beside, read_json
from ckptstore.model import Version
from ckptstore.store import Store, resume_check

TORCH_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt"})
"""Suffixes of files that ``torch.save`` wrote."""

_SAFETENSORS: Final = ".safetensors"
_INDEX: Final = ".index.json"
_USUAL: Final = ("adapter_model", "model", "pytorch_model")
"""Names that PEFT and Transformers give files of weights, up to the first dot, in their order."""
_MODEL: Final = "model"
_STORAGES: Final = (torch.TypedStorage, torch.UntypedStorage)


@dataclass(frozen=True, slots=True)
class _Read:
    """A state read from files; its tensors are mapped memory."""

    state: Any
    format: str
    files: tuple[str, ...]
    """Names without their folder."""
    metadata: Mapping[str, str]
    step: int | None = None
    """Said by the files themselves, as the next one."""
    metrics: Mapping[str, float] | None = None


def import_file(
    store: Store,
    path: str | os.PathLike[str],
    *,
    run: str,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    directions: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    roles: Mapping[Pattern, str] | None = None,
    under: str | None = None,
    codec: str | None = None,
    progress: ProgressCallback = silent,
) -> Version:
    """Save the content of a file as a new version of a run.

    For a folder of Transformers or PEFT, which has a ``config.json`` or ``adapter_config.json``,
    the files beside the weights are saved too, below the key ``pretrained``, for
    :func:`ckptstore.integrations.transformers.export_pretrained`. Nothing in it is executed.

    The file must not change during the import. Host memory stays within the store's budget:
    tensors are read from the mapped file.

    Parameters
    ----------
    path
        A safetensors file or one of ``torch.save``, of any suffix; a folder or an
        ``.index.json`` of shards; a directory of torch.distributed.checkpoint; a checkpoint of
        Orbax, or the folder of a CheckpointManager, of which the newest step is taken, or `step`; a
        universal checkpoint of DeepSpeed, or the folder whose ``latest_universal`` names one.
    run, step, metrics, tags, metadata, roles, codec
        As in :meth:`ckptstore.Run.save`. The state's origin is added to the metadata as
        ``import``. Such a folder has step 0 if none is given; a CheckpointManager's steps have
        their own, and their metrics.
    directions
        Whether each metric improves upwards or downwards, as in :meth:`ckptstore.Store.run`.
    under
        Put the file's content below this key of the state: ``model`` makes ``{"model": ...}``.
        None: ``model`` for such a folder, else nothing.
    progress
        Called with the bytes done.

    Raises
    ------
    ObjectNotFoundError
        The file does not exist.
    InvalidInputError
        The file's format is not supported; a file of such a folder is a link that leaves it;
        `step` is missing; or as in ``save``.
    FormatError
        The file is damaged, or its content is not that of its suffix; or a file beside it is a Git
        LFS pointer or the like.
    LimitError
        The files beside the weights have more than ``PRETRAINED_BYTES_MAX`` bytes.
    PolicyError
        Its pickle needs more than ``weights_only=True`` allows; nothing of it was run.
    StateError
        It has a value that cannot be represented; names its path.
    StorageError
        A file or the store failed; no version appeared.
    """
    path = absolute_path(path)
    directory = _holds(path, ".metadata")
    described = not directory and _holds(path, "config.json", "adapter_config.json")
    key = under if under is not None else _MODEL if described else ""
    roles = {**(roles or {}), BESIDE: "weights"} if described else roles
    wishes: Any = {"tags": tags, "roles": roles, "codec": codec, "progress": progress}
    if directory:
        from ckptstore.integrations.dcp.directory import import_directory

        return import_directory(
            store, path, run=run, step=_step(path, step), metrics=metrics, directions=directions,
            metadata=metadata, under=key, **wishes,
        )  # fmt: skip
    with _opened(path, step) as found:
        state = {key: found.state} if key else found.state
        if described:
            state, step = _with_files(state, found, path), step or 0
        step = _step(path, found.step if step is None else step)
        about = {**_origin(found), **(metadata or {})}
        metrics = metrics or found.metrics
        target = store.run(run, metrics=directions)
        resume_check.importing(store.repo, run)
        return target.save(state, step=step, metrics=metrics, metadata=about, **wishes)


def _step(path: Path, step: int | None) -> int:
    if step is None:
        raise errors.InvalidInputError(f"{path} does not say its step", hint="give one: --step N")
    return step


def _holds(folder: Path, *names: str) -> bool:
    try:
        return any((folder / name).is_file() for name in names)
    except OSError as error:
        raise translate(error, f"reading {folder}") from error


def _with_files(state: Any, found: _Read, folder: Path) -> dict[str, Any]:
    """Return the state of a folder with the files beside its weights."""
    if not isinstance(state, dict) or not isinstance(found.state, dict) or BESIDE in state:
        msg = f"the weights in {folder} leave no place for {BESIDE!r} beside them"
        raise errors.InvalidInputError(msg, hint=f"put them below another key: {_MODEL!r}")
    beside = read_beside(folder, found.files)
    return {**state, BESIDE: {**beside, "names": names_digest(map(str, found.state))}}


def _origin(found: _Read) -> dict[str, Any]:
    """Return the metadata of a version about its origin."""
    origin: dict[str, Any] = {"format": found.format, "files": list(found.files)[:100]}
    size = len(msgspec.json.encode(found.metadata))
    if size > limits.IMPORT_METADATA_BYTES_MAX:
        origin["metadata_left_out_bytes"] = size
    elif found.metadata:
        origin["metadata"] = dict(found.metadata)
    return {"import": origin}


@contextmanager
def _opened(path: Path, step: int | None) -> Iterator[_Read]:
    """Yield the content of a file, a folder or an index for the duration of a block."""
    try:
        if path.is_dir():
            if (orbax := find_checkpoint(path, step)) is not None:
                state, step, metrics = read_checkpoint(orbax)
                about: dict[str, Any] = {"files": (orbax.name,), "metadata": {}, "format": "orbax"}
                yield _Read(state=state, step=step, metrics=metrics, **about)
                return
            if (universal := find_universal(path)) is not None:
                with ExitStack() as stack:
                    state, step = read_universal(
                        universal, lambda file: _read_one(file, stack).state
                    )
                    files = (universal.name,)
                    yield _Read(state=state, step=step, format=UNIVERSAL, files=files, metadata={})
                return
            path = _main_file(path)
        with ExitStack() as stack:
            if path.name.endswith(_INDEX):
                yield _read_shards(path, stack)
            else:
                yield _read_one(path, stack)
    except errors.CkptStoreError:
        raise
    except FileNotFoundError as error:
        msg = f"there is no file {error.filename or path}"
        raise errors.ObjectNotFoundError(msg, hint=f"look in {path.parent}") from error
    except OSError as error:
        raise translate(error, f"reading {error.filename or path}") from error


def _main_file(folder: Path) -> Path:
    """Return a folder's file of weights or index of shards: the one that from_pretrained takes."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    for stem in _USUAL if "adapter_config.json" in names else _USUAL[1:]:
        for suffix in (_SAFETENSORS, f"{_SAFETENSORS}{_INDEX}", ".bin", f".bin{_INDEX}"):
            if f"{stem}{suffix}" in names:
                return folder / f"{stem}{suffix}"
    for suffix in (f"{_SAFETENSORS}{_INDEX}", _SAFETENSORS, f".bin{_INDEX}", ".bin"):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) == 1:
            return folder / found[0]
        if found:
            break
    if any(name.endswith(".distcp") for name in names):
        msg = f"the save that wrote {folder} did not finish: there is no .metadata"
        raise errors.FormatError(msg, hint="import a checkpoint that was saved before it")
    what = ", ".join(found[:5]) if found else "none"
    msg = f"{folder} must hold one file of weights or one index of shards; there is {what}"
    hint = "name the file itself"
    if "store.json" in names:
        hint = "it is a store: ckptstore replicate copies its versions"
    raise errors.InvalidInputError(msg, hint=hint)


def _read_shards(index: Path, stack: ExitStack) -> _Read:
    """Read all files that an index names; each tensor must be where the index says."""
    weight_map, metadata = _parse_index(index)
    state: dict[str, Any] = {}
    origin: dict[str, str] = {}
    formats: set[str] = set()
    names = sorted(set(weight_map.values()))
    for name in names:
        part = _read_one(index.parent / name, stack)
        formats.add(part.format)
        if not isinstance(part.state, dict):
            raise errors.FormatError(f"the shard {name} holds no dict of tensors")
        for key in part.state:
            if key in state:
                raise errors.FormatError(f"{key!r} is in both {origin[key]} and {name}")
            origin[key] = name
        state.update(part.state)
    for key, name in weight_map.items():
        if origin.get(key) != name:
            raise errors.FormatError(f"{index.name} says that {key!r} is in {name}; it is not")
    held = sum(getattr(value, "nbytes", 0) for value in state.values())
    said = metadata.get("total_size", "")
    if said.isdecimal() and int(said) > held:
        msg = f"{index} says that its files hold {said} bytes of tensors; they hold {held}"
        raise errors.FormatError(msg, hint="copy the folder again, or take total_size out of it")
    kind = f"{' and '.join(sorted(formats))} shards"
    return _Read(state, kind, (index.name, *names), metadata)


class _Index(msgspec.Struct):
    """The index of a sharded file, as Transformers writes it."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def _parse_index(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of each tensor, and the metadata; no file name may leave the folder."""
    parsed: _Index = read_json(index, _Index)
    for name in set(parsed.weight_map.values()):
        if PurePosixPath(name).name != name or name in {"", ".", ".."} or "\0" in name:
            raise errors.FormatError(f"{index} names the file {name!r}, which is not beside it")
    if not parsed.weight_map:
        raise errors.FormatError(f"{index} names no tensor")
    return parsed.weight_map, {name: str(value) for name, value in parsed.metadata.items()}


def _read_one(path: Path, stack: ExitStack) -> _Read:
    """Read a file of weights as what its first bytes say; its suffix decides where they do not."""
    kind = kinds.read_kind(path)
    named = path.suffix in {_SAFETENSORS, *TORCH_SUFFIXES}
    default = kinds.SAFETENSORS if path.suffix == _SAFETENSORS else kinds.PICKLE if named else ""
    name = kind.name if kind else default
    kinds.check_blob(path)
    if name == kinds.SAFETENSORS:
        return _read_safetensors(path, stack)
    if name in {kinds.ARCHIVE, kinds.PICKLE}:
        return _read_torch(path, zipped=name == kinds.ARCHIVE)
    raise kinds.refusal(path, kind, named=named)


def _read_safetensors(path: Path, stack: ExitStack) -> _Read:
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata() or {}
    except OSError:
        raise
    except (SafetensorError, RuntimeError, ValueError, TypeError, LookupError) as error:
        raise errors.FormatError(f"{path} is not a sound safetensors file: {error}") from error
    return _Read(state=state, format="safetensors", files=(path.name,), metadata=metadata)


def _read_torch(path: Path, *, zipped: bool) -> _Read:
    """Read with torch's restricted unpickler, which builds tensors and plain containers only."""
    if zipped:
        check_archive(path, path.stat().st_size, str(path))
    try:
        version = torch.torch_version.TorchVersion  # that of many trainers' files: a text
        safe = torch.serialization.safe_globals([version])
        with warnings.catch_warnings(), safe, torch.device("cpu"):  # whatever the default is
            warnings.simplefilter("ignore")  # about old storage classes in old files
            mapped = zipped and path.suffix != _SAFETENSORS  # which torch reads by its suffix
            with path.open("rb") as file:
                found = path if mapped else file
                state = torch.load(found, map_location="cpu", mmap=mapped, weights_only=True)
            state = _storages_as_tensors([state])[0]
    except OSError:
        raise
    except Exception as error:  # torch may raise any error on a hostile pickle
        raise _torch_problem(path, error) from error
    return _Read(state=state, format="torch", files=(path.name,), metadata={})


def _storages_as_tensors(state: list[Any]) -> list[Any]:
    """Return a list; storages in its dicts, lists and their tuples have become tensors."""
    todo: list[Any] = [state]
    seen: set[int] = set()
    while todo:
        box = todo.pop()
        if id(box) in seen:
            continue
        seen.add(id(box))
        for key, value in [*(box.items() if isinstance(box, dict) else enumerate(box))]:
            parts = value if type(value) is tuple else (value,)
            todo += [one for one in parts if isinstance(one, dict | list)]
            if any(isinstance(one, _STORAGES) for one in parts):
                found = tuple(map(_storage_as_tensor, parts))
                box[key] = found if parts is value else found[0]
    return state


def _storage_as_tensor(value: Any) -> Any:
    """Return a tensor of one dimension over the memory of a storage; other values as they are."""
    if not isinstance(value, _STORAGES):
        return value
    raw = getattr(value, "_untyped_storage", value)
    one = torch.empty(0, dtype=getattr(value, "dtype", torch.uint8))
    return one.set_(raw, 0, (len(value),), (1,))


def _torch_problem(path: Path, error: Exception) -> errors.CkptStoreError:
    """Return the error for a pickle that asks for too much, or for a damaged file."""
    text = first_line(error)
    wanted: list[str] = re.findall(r"GLOBAL (\S+)", str(error))
    with suppress(Exception):
        wanted = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or wanted
    unknown = isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in text
    if wanted or unknown:
        what = ", ".join(wanted[:5]) or text
        msg = f"the pickle in {path} needs more than weights_only=True allows: {what}"
        return errors.PolicyError(msg, hint=kinds.STATE)
    if not isinstance(error, RuntimeError | pickle.UnpicklingError):  # its text may be just: 101
        text = f"torch.load raised {type(error).__name__} {text}".rstrip()
    msg = f"{path} is not a sound file of torch.save: {text}"
    hint = "it may be truncated, or of another format: copy it again, or check its origin"
    return errors.FormatError(msg, hint=hint)
