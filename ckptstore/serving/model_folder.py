"""A version as the folder of files that ``from_pretrained`` reads; nothing is stored twice.

Sizes and ETags follow from the manifest. Weights are made from the pieces while they are read,
small files (configurations, tokenizer, model card) are in memory.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from ckptstore import errors
from ckptstore.catalog.catalog import Catalog
from ckptstore.checkpoint.content import Content
from ckptstore.checkpoint.ranges import Range, read_ranges
from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import path_text
from ckptstore.format.skeleton import MAPS, Node, decode_key, pairs
from ckptstore.hashing import blake3_of
from ckptstore.integrations.pretrained_files import CONFIGS, described, names_digest
from ckptstore.integrations.safetensors_plan import FileTensor, encode_header, file_tensor
from ckptstore.integrations.safetensors_stream import FileStream, PlannedFile, Scratch, Weight
from ckptstore.limits import PRETRAINED_BYTES_MAX
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.serving import serving_limits as limits
from ckptstore.store import Store

_MARKS: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "0": ""}
"""Ends of commit hashes, after zeros, and the dtype that was asked for."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """One file of a folder."""

    name: str
    content: PlannedFile | bytes = field(repr=False)
    nbytes: int
    etag: str
    """40 hex digits."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of one version."""

    repo: Repo
    version: Version
    manifest: Content
    dtype: str
    """Format that floats are cast to; empty for the stored ones."""
    files: Mapping[str, ServedFile]
    """By name, in order of the names."""

    @property
    def commit(self) -> str:
        """The version's id and 8 digits of the dtype: 40 hex digits, as clients of the Hub want."""
        (mark,) = (mark for mark, dtype in _MARKS.items() if dtype == self.dtype)
        return self.version.id + mark.zfill(8)

    def file(self, name: str) -> ServedFile:
        """Return a file.

        Raises
        ------
        ObjectNotFoundError
            There is none of this name.
        """
        if name not in self.files:
            raise errors.ObjectNotFoundError(f"{self.version.label} has no file {name!r:.200}")
        return self.files[name]

    def below(self, place: str) -> list[str]:
        """Return the paths of the files and folders in a folder, in order; empty: the whole."""
        start = f"{place}/" if place else ""
        inside = (name.removeprefix(start) for name in self.files if name.startswith(start))
        return sorted({start + name.partition("/")[0] for name in inside})

    def read(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of a range of a file, some MiB at a time, each after it was checked.

        Raises
        ------
        ObjectNotFoundError
            There is no such file.
        CorruptTensorError
            Stored data is damaged; nothing of the damaged window was yielded.
        StorageError
            The storage failed.
        """
        yield from self.stream(name).read(start, self.file(name).nbytes if stop is None else stop)

    def stream(self, name: str, scratch: Scratch | None = None) -> FileStream:
        """Return a file for reads of its windows; see :meth:`read`."""
        made = self.file(name).content
        planned = made if isinstance(made, PlannedFile) else PlannedFile(made, ())
        sizes = limits.WINDOW_BYTES, limits.VIEW_BYTES_MAX
        return FileStream(self.manifest, self.repo, planned, *sizes, scratch or Scratch())


def parse_dtype(text: str) -> str:
    """Return torch's name of a dtype that versions can be asked for in.

    Raises
    ------
    InvalidRefError
        There is no cast to it.
    """
    name = _MARKS.get(text.replace("fp", "f"), text)
    if name not in _MARKS.values() or not name:
        raise errors.InvalidRefError(f"no version is served as {text!r:.40}", hint="dtype=bf16")
    return name


def split_commit(text: str) -> tuple[str, str] | None:
    """Return the id of the version and the dtype of a commit hash; None if it is none."""
    dtypes = {mark.zfill(8): dtype for mark, dtype in _MARKS.items()}
    if not re.fullmatch("[0-9a-f]{40}", text) or text[32:] not in dtypes:
        return None
    return text[:32], dtypes[text[32:]]


def open_folder(
    store: Store, version: Version, *, dtype: str = "", shard_bytes: int | None = None
) -> ModelFolder:
    """Return the files of a version; reads its manifest and its small files.

    Parameters
    ----------
    dtype
        Cast floats to it; see :func:`parse_dtype`.
    shard_bytes
        Largest file of weights; None for the default of ``save_pretrained``.

    Raises
    ------
    StateError
        The version has no weights, or some that no safetensors file can hold.
    InvalidInputError
        It names a file outside of the folder.
    CkptStoreError
        It cannot be read.
    """
    repo, replicas = store.repo, store._session.replicas
    catalog, content = repo.catalog, replicas.content(version)

    def said(one: str) -> Any:  # noqa: ANN401 - plain values
        """Return what a version says of its model; None if its data is gone."""
        try:
            held = content if one == version.id else replicas.content(catalog.version(one))
        except errors.NotFoundError:
            if one == version.id:
                raise
            return None
        return read_kept(held, repo)

    about = described(catalog, version.id, said)
    items = find_weights(content)
    as_read = about.get("names") == names_digest(item.name for item in items)
    if about.get("adapter_config"):
        files = _adapters(items, about["adapter_config"], dtype, as_read=as_read)
    else:
        most = shard_bytes or (limits.SHARD_BYTES_AS_READ if as_read else limits.SHARD_BYTES)
        files = plan_weights(items, "model", dtype, most, as_read=as_read)
    files |= _configs(items, about, dtype, as_read=as_read)
    adapter = bool(about.get("adapter_config"))
    files.setdefault("README.md", model_card(catalog, version, adapter=adapter))
    found = {}
    for name, made in sorted(files.items()):
        planned = PlannedFile(made, ()) if isinstance(made, bytes) else made
        found[name] = ServedFile(name, made, planned.nbytes, etag_of_weights(planned, content))
    return ModelFolder(repo, version, content, dtype, found)


def _adapters(
    items: list[FileTensor], adapters: Mapping[Any, Any], dtype: str, *, as_read: bool
) -> dict[str, PlannedFile | bytes]:
    """Return the folders that PEFT reads."""
    files: dict[str, PlannedFile | bytes] = {}
    for name, config in adapters.items():
        if not isinstance(name, str) or not isinstance(config, Mapping):
            raise InvalidInputError(f"the version has no configuration of the adapter {name!r}")
        own, alone = items, len(adapters) == 1
        if not as_read:
            own = find_adapter(items, name, config, alone=alone)
        place = "" if name == "default" or as_read else name + "/"
        most = limits.SHARD_BYTES_AS_READ
        planned = plan_weights(own, "adapter_model", dtype, most, as_read=True)
        files |= {_inside(place + file): made for file, made in planned.items()}
        files[_inside(place + "adapter_config.json")] = _json(config)
    return files


def _configs(
    items: list[FileTensor], about: Mapping[str, Any], dtype: str, *, as_read: bool
) -> dict[str, PlannedFile | bytes]:
    """Return configurations and other small files."""
    files: dict[str, PlannedFile | bytes] = {}
    for part in CONFIGS[:2]:
        config = about.get(part)
        if config is None or (about.get("adapter_config") and not as_read):
            continue
        if part == "config" and (dtype or not as_read):
            config = {key: value for key, value in config.items() if key != "torch_dtype"}
            floats = (item.dtype for item in items if item.dtype in CASTS)
            config["dtype"] = dtype or next(floats, "float32")
        files[f"{part}.json"] = _json(config, sort=not as_read)
    for name, data in about.get("processing", {}).items():
        if not isinstance(data, bytes):
            raise InvalidInputError(f"the version holds something that is no file: {name!r:.200}")
        files[_inside(name)] = data
    return files


def _json(config: object, *, sort: bool = False) -> bytes:
    try:
        return (json.dumps(config, indent=2, sort_keys=sort) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the version has a configuration that is no JSON: {error}"
        raise InvalidInputError(msg) from error


def _inside(name: object) -> str:
    """Return the name of a file if it stays in its folder; raises InvalidInputError if not."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if not {"", ".", ".."}.isdisjoint(parts) or {"\0", "\\"} & set(str(name)):
        raise InvalidInputError(f"the version names a file outside of its folder: {name!r:.200}")
    return str(name)


_LINEAGE = 10
"""Ancestors that a card names."""


def model_card(catalog: Catalog, version: Version, *, adapter: bool) -> bytes:
    """Return ``README.md``: run, step, metrics, lineage and digest of a version."""
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}", "tags:"]
    lines += ["- ckptstore", "---", "", f"# {_safe(f'{version.run}@{version.step}')}"]
    before = [one.label for one in islice(catalog.ancestors(version.id), 1, _LINEAGE + 1)]
    facts: dict[str, object] = {
        "run": version.run,
        "step": version.step,
        "version": version.id,
        "content": version.content,
        "saved": f"{version.created_at:%Y-%m-%d %H:%M:%S} UTC",
        "tags": ", ".join(version.tags),
        "kept": version.level,
        **{f"metric {name}": f"{value:.9g}" for name, value in version.metrics.items()},
        "continues": ", ".join(before),
        "metadata": json.dumps(version.metadata, sort_keys=True) if version.metadata else "",
    }
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {_safe(key)} | {_safe(value)} |" for key, value in facts.items() if value != ""]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _safe(value: object) -> str:
    """Return a text that is one cell of a table, whatever names hold."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", " ")


def read_kept(content: Content, repo: Repo) -> Any:  # noqa: ANN401 - plain values
    """Return what a version holds beside its weights; None if nothing.

    Raises
    ------
    InvalidInputError
        It is no plain value.
    LimitError
        It is too large.
    CkptStoreError
        As :func:`ckptstore.checkpoint.ranges.read_ranges`.
    """
    node = dict(_entries(content.node)).get(BESIDE)
    if node is None:
        return None
    leaves = [leaf for leaf in content.leaves if leaf.path[:1] == (BESIDE,)]
    sizes = {leaf.index: content.manifest.tensors[leaf.index].nbytes for leaf in leaves}
    if sum(sizes.values()) > PRETRAINED_BYTES_MAX:
        msg = f"the files of the version have more than {PRETRAINED_BYTES_MAX} bytes"
        raise errors.LimitError(msg, hint="ckptstore export writes its weights")
    blobs = {index: memoryview(bytearray(size)) for index, size in sizes.items()}
    ranges = [Range(index=i, start=0, nbytes=len(out), out=out) for i, out in blobs.items()]
    read_ranges(content, ranges, backend=repo.load_backend, options=repo.options)
    return _value(node, blobs)


def _entries(node: Node) -> list[tuple[object, Node]]:
    if not isinstance(node, list) or node[0] not in MAPS:
        return []
    return [(decode_key(key), value) for key, value in pairs(node)]


def _value(node: Node, blobs: dict[int, memoryview]) -> Any:  # noqa: ANN401 - plain values
    """Return the plain value of a node."""
    if not isinstance(node, list):
        return node
    tag = node[0]
    if tag in MAPS:
        return {key: _value(value, blobs) for key, value in _entries(node)}
    if tag in {"l", "t"}:
        return [_value(value, blobs) for value in node[1:]]
    if tag in {"u", "i"}:
        return decode_key(node)
    if tag == "B" and isinstance(node[1], int):
        data = bytes(blobs[node[1]])
        return data.decode("utf-8", "surrogatepass") if node[2] == "str" else data
    msg = f"the version holds something at {BESIDE!r} that is no plain value: {tag!r}"
    raise InvalidInputError(msg, hint="save what describe_model returns")


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
    return blake3_of(parts).hex()[:_ETAG_CHARS]


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
