"""Writes versions as universal checkpoints of DeepSpeed, which were imported from such folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

import torch

from ckptstore.backends.oserrors import translate
from ckptstore.config import absolute_path
from ckptstore.errors import ConflictError, InvalidInputError, StateError, TensorNotFoundError
from ckptstore.integrations.deepspeed import KEPT, LATEST, MASTER, PARAM, ZERO
from ckptstore.jobs.job_outputs import replace_file
from ckptstore.model import Version
from ckptstore.store import Store

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
    path = absolute_path(folder)
    version = store.resolve(ref)
    kept = _part(store, version, KEPT)
    if path.exists():
        raise ConflictError(f"{path} is there already", hint="name a new folder")
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
    with suppress(KeyError, TensorNotFoundError):
        found = store.load(f"#{version.id}", include=[key])[key]
        if isinstance(found, Mapping) and _NEEDED.get(key, set()) <= found.keys():
            return found
    msg = f"{version} has no such {key!r}: it is no universal checkpoint of DeepSpeed, or reduced"
    raise StateError(msg, hint="its weights: ckptstore export REF NAME.safetensors")


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
        raise InvalidInputError(f"the version names a file outside of the folder: {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
