"""Plans the files of weights of a version, as ``save_pretrained`` would write them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import path_text
from ckptstore.hashing import blake3_of
from ckptstore.integrations.safetensors_plan import FileTensor, encode_header, file_tensor
from ckptstore.integrations.safetensors_stream import PlannedFile, Weight

CASTS: Final = ("float64", "float32", "float16", "bfloat16")
"""Formats that a version can be asked for in, and those that are cast."""

# Widest first, as the safetensors library (0.8) orders the tensors of a file; then by name.
_ORDER: Final = (
    *("uint64", "int64", "float64", "complex64", "float32", "uint32", "int32"),
    *("bfloat16", "float16", "uint16", "int16", "float8_e5m2fnuz", "float8_e4m3fnuz"),
    *("float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float4_e2m1fn_x2"),
    "bool",
)
_ETAG_CHARS: Final = 40
"""Of a digest: 32 would be read as MD5 by clients of S3, 64 as SHA-256 by those of the Hub."""
_LEFT_OUT: Final = frozenset({"bytes", "generator"})
_EXPORT: Final = "export_pretrained writes it with PEFT"


def etag_of_weights(file: PlannedFile, content: Content) -> str:
    """Return a digest of what a file's bytes follow from: header, tensors, ids of their pieces."""
    parts = [file.header]
    for weight in file.weights:
        one = weight.stored
        record = content.manifest.tensors[one.index]
        parts.append(repr((record.dtype, record.shape, one.view, one.dtype)).encode())
        if record.recipe is not None:  # where its sources lie can change
            parts.append(record.recipe.digest)
        else:
            ids = content.manifest.pieces.ids[content.rows(one.index)]
            parts += [repr(record.identity).encode(), ids.tobytes()]
    return etag_of(parts)


def etag_of(parts: Iterable[bytes]) -> str:
    """Return the ETag of some bytes: the beginning of their BLAKE3 digest."""
    return blake3_of(tuple(parts)).hex()[:_ETAG_CHARS]


def find_weights(content: Content) -> list[FileTensor]:
    """Return the weights in the order of the state: those below ``model``, or else by role.

    Of tied tensors, the first is taken, as models of transformers save them.

    Raises
    ------
    StateError
        One cannot be in a safetensors file, or there are none.
    """
    leaves = [leaf for leaf in content.leaves if leaf.kind not in _LEFT_OUT]
    below = [leaf for leaf in leaves if leaf.path[:1] == ("model",) and len(leaf.path) > 1]
    if not below:
        judged = content.judged()
        by_role = (leaf for leaf in leaves if judged[leaf.index].role == "weights")
        leaves = [leaf for leaf in by_role if leaf.path[:1] != (BESIDE,)]
    found: dict[object, FileTensor] = {}
    for leaf in below or leaves:
        one = file_tensor(path_text(leaf.path[1:] if below else leaf.path), leaf, content)
        found.setdefault((one.index, one.view, one.dtype, one.shape), one)
    if not found:
        raise StateError("the version has no weights", hint="ckptstore show lists its tensors")
    return list(found.values())


def find_adapter(
    items: Sequence[FileTensor], name: str, config: Mapping[str, Any], *, alone: bool
) -> list[FileTensor]:
    """Return the weights of one adapter under the names of its file.

    Parameters
    ----------
    alone
        The version has no other adapter: weights that name none are this one's.

    Raises
    ------
    StateError
        Only PEFT could tell which weights belong to it.
    """
    named = {short: item for item in items if (short := _without(item.name, name)) is not None}
    kind = str(config.get("peft_type", ""))
    hidden = config.get("bias", "none") not in {"none", None} or (
        "PROMPT" in kind or "TUNING" in kind or kind in {"VBLORA", "PEANUT", "ADAPTION_PROMPT"}
    )
    if not named and alone and not any(".base_layer." in item.name for item in items):
        return list(items)
    if hidden or not named:
        msg = f"only PEFT can tell the weights of the adapter {name!r} ({kind}) from the others"
        raise StateError(msg, hint=_EXPORT)
    return [replace(item, name=short) for short, item in named.items()]


def _without(key: str, adapter: str) -> str | None:
    """Return the name of a weight in the file of an adapter; None for a weight of another."""
    whole = f".modules_to_save.{adapter}."
    if whole in key:
        return key.replace(whole, ".")
    if key.endswith(f".lora_magnitude_vector.{adapter}.weight"):
        return key.removesuffix(f".{adapter}.weight")
    for end in ("", ".weight", ".bias"):
        if key.endswith(f".{adapter}{end}"):
            return key.removesuffix(f".{adapter}{end}") + end
    return None


def plan_weights(
    items: Iterable[FileTensor], stem: str, dtype: str, shard_bytes: int, *, as_read: bool
) -> dict[str, PlannedFile | bytes]:
    """Return the files of some weights, by their names: one, or shards with an index.

    Parameters
    ----------
    stem
        ``model`` or ``adapter_model``.
    dtype
        Format of their floats; empty for the stored ones.
    as_read
        With the index that ``save_torch_state_dict`` writes, not that of ``save_pretrained``.

    Raises
    ------
    InvalidInputError
        Two have the same name.
    """
    cast = CASTS if dtype else ()
    weights = [Weight(w, replace(w, dtype=dtype) if w.dtype in cast else w) for w in items]
    shards = _in_shards(weights, shard_bytes)
    if len(shards) == 1:
        return {f"{stem}.safetensors": _file(shards[0])}
    count = len(shards)
    names = [f"{stem}-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    files: dict[str, PlannedFile | bytes] = dict(zip(names, map(_file, shards), strict=True))
    sizes: dict[str, int] = {"total_size": sum(one.served.nbytes for one in weights)}
    if not as_read:
        elements = (one.served.nbytes // ITEM_BYTES[one.served.dtype] for one in weights)
        sizes = {"total_parameters": sum(elements), **sizes}
    places = {w.served.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
    index = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=not as_read)
    files[f"{stem}.safetensors.index.json"] = (index + ("" if as_read else "\n")).encode()
    return files


def _in_shards(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    """Split weights as huggingface_hub does: a larger one has a shard of its own."""
    shards: list[list[Weight]] = []
    current: list[Weight] = []
    size = 0
    for weight in weights:
        nbytes = weight.served.nbytes
        if nbytes > most:
            shards.append([weight])
            continue
        if size + nbytes > most:
            shards.append(current)
            current, size = [], 0
        current.append(weight)
        size += nbytes
    return [*shards, current] if current else shards


def _file(weights: Iterable[Weight]) -> PlannedFile:
    ordered = sorted(weights, key=lambda one: (_ORDER.index(one.served.dtype), one.served.name))
    names = {one.served.name for one in ordered}
    if len(names) < len(ordered) or not names.isdisjoint({"", "__metadata__"}):
        raise InvalidInputError("two weights have one name in the file, or one has none")
    return PlannedFile(encode_header([one.served for one in ordered]), tuple(ordered))
