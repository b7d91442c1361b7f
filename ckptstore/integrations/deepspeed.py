"""Reads DeepSpeed's universal checkpoints as states, and writes such versions as checkpoints again.

A universal checkpoint holds a training with ZeRO 1, 2 or 3 independent of its number of ranks:
below ``zero`` a folder for each parameter, with ``fp32.pt`` and a file for each state of the
optimizer, and beside them files about the whole. In a version the parameters lie as in one of
FSDP2, below ``model`` and ``optimizer.state``; the other files are kept as bytes, since they are
pickles of DeepSpeed's classes. DeepSpeed itself is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

import torch

from ckptstore import errors
from ckptstore.backends.oserrors import translate
from ckptstore.config import absolute_path
from ckptstore.integrations import file_kinds as kinds
from ckptstore.integrations.pretrained_files import check_inside
from ckptstore.jobs.job_outputs import replace_file
from ckptstore.model import Version
from ckptstore.store import Store

FORMAT: Final = "deepspeed universal"
"""Format in the metadata of an imported version."""

ZERO: Final = "zero"
MASTER: Final = "fp32"
PARAM: Final = "param"
KEPT: Final = "universal"
LATEST: Final = "latest_universal"
_MODEL_STATES: Final = "*_model_states.pt"
_MOST_KINDS: Final = 16
"""Files of one parameter; Adam has four."""

Reader = Callable[[Path], Any]
"""Reads a file of ``torch.save``, with ``weights_only=True``."""


def find_universal(path: Path) -> Path | None:
    """Return the folder of a universal checkpoint: `path`, or the newest in it; None without one.

    Raises
    ------
    InvalidInputError
        The folder is a checkpoint of ZeRO that was not converted.
    """
    for folder in (path, path / _pointer(path)):
        if any((folder / ZERO).glob(f"*/{MASTER}.pt")):
            return folder
    if any(path.glob("*_optim_states.pt")):
        msg = f"{path} holds ZeRO's partitions, which only DeepSpeed can read"
        hint = (
            "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder"
            f" {path} --output_folder NEW; then import NEW"
        )
        raise errors.InvalidInputError(msg, hint=hint)
    return None


def _pointer(path: Path) -> str:
    """Return the name in the file ``latest_universal``; of a folder inside, or empty."""
    with suppress(OSError, UnicodeError):
        name = (path / LATEST).read_text(encoding="utf-8").strip()
        return name if Path(name).name == name else ""
    return ""


def read_universal(folder: Path, read: Reader) -> tuple[dict[str, Any], int | None]:
    """Return the state of a folder that :func:`find_universal` found, and its step if it says one.

    Tensors are mapped memory. Parameters of ZeRO 3, which are stored flat, get their shapes.

    Raises
    ------
    FormatError
        A file is damaged, or holds something else than its name says.
    PolicyError
        A parameter's file needs more than ``weights_only=True`` allows.
    InvalidInputError
        A file is a link out of the folder.
    """
    within = [folder.resolve()]
    for file in [*_others(folder), *(folder / ZERO).glob("*/*.pt")]:
        check_inside(file, within)
    step, shapes = _described(folder, read)
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    notes: dict[str, dict[str, Any]] = {}
    for each in sorted(entry for entry in (folder / ZERO).iterdir() if entry.is_dir()):
        files = sorted(each.glob("*.pt"))
        if len(files) > _MOST_KINDS:
            raise errors.FormatError(f"{each} holds {len(files)} files, and a parameter has a few")
        for file in files:
            value, note = _parameter(file, read(file), shapes.get(each.name))
            notes.setdefault(each.name, {})[file.stem] = note
            if file.stem == MASTER:
                model[each.name] = value
            else:
                states.setdefault(each.name, {})[file.stem] = value
    others = {str(file.relative_to(folder)): _bytes(file) for file in _others(folder)}
    kept = {"notes": notes, "files": others}
    return {"model": model, "optimizer": {"state": states}, KEPT: kept}, step


def _described(folder: Path, read: Reader) -> tuple[int | None, dict[str, torch.Size]]:
    """Return the step, and the shapes of parameters, as far as they are plain values."""
    shapes: dict[str, torch.Size] = {}
    step = None
    for file in sorted(folder.glob(_MODEL_STATES))[:1]:
        with suppress(errors.PolicyError):  # the training's own classes: a step must be given then
            about = read(file)
            found = about.get("global_steps") if isinstance(about, dict) else None
            step = found if type(found) is int and found >= 0 else None
            groups = about.get("param_shapes") if isinstance(about, dict) else None
            for group in groups if isinstance(groups, list) else []:
                pairs = group.items() if isinstance(group, dict) else ()
                shapes |= {name: shape for name, shape in pairs if isinstance(shape, torch.Size)}
    return step, shapes


def _parameter(file: Path, content: Any, shape: torch.Size | None) -> tuple[Any, Any]:
    """Return the value of a parameter's file, and what is needed to write the file again."""
    note: dict[str, Any] = {"flat": False}
    if isinstance(content, dict):
        if PARAM not in content:
            raise errors.FormatError(f"{file} has no entry {PARAM!r}")
        note["beside"] = {key: value for key, value in content.items() if key != PARAM}
        content = content[PARAM]
    if not isinstance(content, torch.Tensor):
        if type(content) not in (int, float):
            raise errors.FormatError(f"{file} holds a {type(content).__name__}, and no tensor")
        return content, note
    content = content.detach()
    if shape is not None and content.ndim == 1 != len(shape) and content.numel() == shape.numel():
        return content.view(shape), {**note, "flat": True}
    return content, note


def _others(folder: Path) -> Iterator[Path]:
    """Yield the files about the whole, in order of their names."""
    for place in (folder, folder / ZERO):
        yield from sorted(entry for entry in place.iterdir() if entry.is_file())


def _bytes(file: Path) -> torch.Tensor:
    """Return the bytes of a file, as mapped memory."""
    size = file.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    with file.open("rb") as opened:
        head = opened.read(kinds.HEAD_BYTES)
    kinds.check_beside(file, head, kinds.ARCHIVE, kinds.PICKLE, kinds.OTHER_PICKLE)
    return torch.from_file(str(file), size=size, dtype=torch.uint8)


# --- export ---------------------------------------------------------------------------------------

_NEEDED: Final = {KEPT: {"files", "notes"}, "optimizer": {"state"}}


def export_universal(store: Store, ref: str, folder: str | os.PathLike[str]) -> Path:
    """Write a version that was imported from a universal checkpoint as a folder; return its path.

    DeepSpeed resumes from it at any number of ranks, with ``"checkpoint": {"load_universal":
    true}`` in its configuration: ``engine.load_checkpoint(parent, tag=name)``. The file
    ``latest_universal`` beside the folder names it, as DeepSpeed's converter does. DeepSpeed
    unpickles files of the folder when it loads it: export versions that you trust.

    Host memory holds the weights, then the optimizer's states. The folder appears when it is
    complete.

    Raises
    ------
    StateError
        The version comes from no universal checkpoint, or lacks its weights or optimizer.
    ConflictError
        The folder is there already.
    InvalidInputError
        The version names a file outside of the folder. Nothing was written.
    StorageError
        It could not be written, or the version not be read.
    """
    path, version = absolute_path(folder), store.resolve(ref)
    kept = _part(store, version, KEPT)
    if path.exists():
        raise errors.ConflictError(f"{path} is there already", hint="name a new folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name[:100]}.", dir=path.parent) as beside:
            made = Path(beside, path.name)
            made.mkdir()
            for name, data in kept["files"].items():
                with _new_file(made, name) as file:
                    file.write(memoryview(data.numpy()))
            weights = _part(store, version, "model").items()
            _write(made, kept["notes"], ((name, MASTER, value) for name, value in weights))
            states = _part(store, version, "optimizer")["state"].items()
            every = ((name, kind, one) for name, each in states for kind, one in each.items())
            _write(made, kept["notes"], every)
            made.rename(path)
        replace_file(path.parent / LATEST, os.fsencode(path.name))
    except OSError as error:
        raise translate(error, f"writing {path}", writing=True) from error
    return path


def _part(store: Store, version: Version, key: str) -> Any:  # a dict of its kind
    with suppress(KeyError, errors.TensorNotFoundError):
        found = store.load(f"#{version.id}", include=[key])[key]
        if isinstance(found, Mapping) and _NEEDED.get(key, set()) <= found.keys():
            return found
    msg = f"{version} has no such {key!r}: it is no universal checkpoint of DeepSpeed, or reduced"
    raise errors.StateError(msg, hint="its weights: ckptstore export REF NAME.safetensors")


def _write(folder: Path, notes: Mapping[str, Any], values: Iterator[tuple[str, str, Any]]) -> None:
    for name, kind, value in values:
        note = notes.get(name, {}).get(kind, {})
        content = value.reshape(-1) if note.get("flat") else value
        if "beside" in note:
            content = {**note["beside"], PARAM: content}
        with _new_file(folder, f"{ZERO}/{name}/{kind}.pt") as file:
            torch.save(content, file)


@contextmanager
def _new_file(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Yield a file in the folder, durable after the block; refuse names that lead out of it."""
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise errors.InvalidInputError(f"the version names a file outside of the folder: {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
