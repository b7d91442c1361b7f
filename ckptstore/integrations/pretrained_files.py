"""Files of a folder of Transformers or PEFT beside its weights; none of them is executed.

They become the entry ``pretrained`` of a state: ``config``, ``generation_config`` and
``adapter_config`` (by name of the adapter) as plain values, the others below ``processing``
unchanged. ``names`` is a digest of the names of the folder's tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptstore import limits
from ckptstore.backends.oserrors import translate
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import FormatError, InvalidInputError, LimitError
from ckptstore.integrations.file_kinds import check_beside

CONFIGS: Final = ("config", "generation_config", "adapter_config")
"""Parts that are kept as plain values, each from the JSON file of its name."""

_KEPT: Final = frozenset(
    {".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".spm", ".py", ".md"}
)
"""Suffixes of files that a tokenizer, a processor, a model of one's own or a reader needs."""
_LICENSES: Final = frozenset({"LICENSE", "NOTICE"})
_WITHOUT: Final = "to import the weights alone, name their file"
_TEMPLATES: Final = "additional_chat_templates"


def names_digest(names: Iterable[str]) -> str:
    """Return a digest that is equal for equal sets of names."""
    return hashlib.sha256("\0".join(sorted(names)).encode("utf-8", "surrogatepass")).hexdigest()


def described(catalog: Catalog, version: str, said: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return a version's description of its model, completed by those its runs began with.

    Parameters
    ----------
    said
        Returns the own description of the version of an id; None if it has none.

    Raises
    ------
    InvalidInputError
        A version holds something else in place of a description.
    """
    about = _checked(said(version), version)
    for found in catalog.ancestors(version):
        if about is not None and "processing" in about:
            break
        before = catalog.version(found.parent) if found.parent else None
        if found.deleted or (before is not None and before.run == found.run):
            continue
        first = _checked(said(found.id), found.id) if found.id != version else None
        if about is None:
            about = first
        elif first is not None:
            about = {**about, "processing": first.get("processing", {})}
    return about or {}


def _checked(about: Any, version: str) -> Mapping[str, Any] | None:  # as saved
    if about is None:
        return None
    found: Mapping[str, Any] = about if isinstance(about, Mapping) else {"config": about}
    parts = [found.get(part, {}) for part in (*CONFIGS, "processing")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise InvalidInputError(f"#{version[:8]} holds something else at {BESIDE!r}")
    return found


def read_json(file: Path, kind: Any) -> Any:  # a type that msgspec knows
    """Return the content of a JSON file that describes others.

    Raises
    ------
    FormatError
        It is no JSON, or of another type.
    LimitError
        It is too large.
    """
    try:
        return msgspec.json.decode(read_described(file), type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{file} is not an index of a checkpoint: {error}") from error


def read_described(file: Path) -> bytes:
    """Return the bytes of a file that describes others; a FormatError names one of another kind."""
    with file.open("rb") as opened:
        data = opened.read(limits.SHARD_INDEX_BYTES_MAX + 1)
    if len(data) > limits.SHARD_INDEX_BYTES_MAX:
        raise LimitError(f"{file} has more than {limits.SHARD_INDEX_BYTES_MAX} bytes")
    check_beside(file, data)
    return data


def read_beside(folder: Path, weights: Iterable[str]) -> dict[str, Any]:
    """Return the files of a folder beside its weights.

    Parameters
    ----------
    weights
        Names of its files of weights: these are checked, and not read.

    Raises
    ------
    InvalidInputError
        A file, also one of weights, is a link out of the folder. Links of the cache of the
        Hugging Face hub are followed.
    FormatError
        A configuration is not a JSON object; or a file is a Git LFS pointer or the like.
    LimitError
        The files are too large.
    StorageError
        A file cannot be read.
    """
    place = folder.resolve()
    within = [place]
    if place.parent.name == "snapshots":  # the hub's cache, whose files are links to blobs
        within.append(place.parent.parent / "blobs")
    for name in weights:
        check_inside(folder / name, within)
    found: dict[str, Any] = {}
    others: dict[str, bytes] = {}
    left = limits.PRETRAINED_BYTES_MAX
    for path in _files(folder):
        check_inside(path, within)
        data = _read(path, left)
        left -= len(data)
        if path.suffix == ".json" and path.stem in CONFIGS:
            found[path.stem] = _parse(path, data)
        else:
            others[path.relative_to(folder).as_posix()] = data
    if "adapter_config" in found:
        found["adapter_config"] = {"default": found["adapter_config"]}
    return {**found, "processing": others}


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files to store, in order of their names; hidden ones are left out."""
    for path in [*sorted(folder.iterdir()), *sorted((folder / _TEMPLATES).glob("*.jinja"))]:
        kept = path.suffix in _KEPT or path.name in _LICENSES
        apart = path.name[0] == "." or path.name.endswith(".index.json")
        if kept and not apart and path.is_file():
            yield path


def check_inside(path: Path, within: Iterable[Path]) -> None:
    """Raise InvalidInputError if a file is a link out of some resolved folders."""
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in within):
        msg = f"{path} leads out of its folder, to {target}"
        raise InvalidInputError(msg, hint="import the folder that it leads to, or put a copy there")


def _read(path: Path, left: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(left + 1)
    except OSError as error:
        raise translate(error, f"reading {path}") from error
    if len(data) > left:
        msg = f"{path} takes the files beside the weights over {limits.PRETRAINED_BYTES_MAX} bytes"
        raise LimitError(msg, hint="move files that the model does not need out of the folder")
    check_beside(path, data)
    return data


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}", hint=_WITHOUT) from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{path} holds no JSON object", hint=_WITHOUT)
    return parsed
