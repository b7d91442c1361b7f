"""Plans a safetensors file from the manifest alone: names, dtypes, header.

Pure: no data is read and nothing is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptstore import limits
from ckptstore.checkpoint.content import Content
from ckptstore.errors import InvalidInputError, LimitError, StateError, TensorNotFoundError
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.paths import Path, PathFilter, path_text
from ckptstore.format.skeleton import MAPS, SEQUENCES, Leaf, Node, decode_key, pairs
from ckptstore.model import Version
from ckptstore.suggestions import did_you_mean

SAFETENSORS_DTYPES: Final[Mapping[str, str]] = {
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""dtype to its name in a file. Source: safetensors 0.8, held equal by tests/unit/test_files.py."""

_LEFT_OUT: Final = frozenset({"bytes", "generator"})
"""Kinds of leaves that are stored as tensors, but are none."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of the file."""

    name: str
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    index: int
    """Its record in the manifest."""
    order: tuple[int, ...] | None = None
    """Stored order of its dimensions; None if as in the file."""
    view: tuple[int, tuple[int, ...]] | None = None
    """Byte offset and strides in elements, if it is a part of the record."""
    blocks: bool = False
    """Whether it is stored in boxes."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def streams(self) -> bool:
        """True if the stored bytes are the file's, in order."""
        return self.order is None and self.view is None and not self.blocks

    @property
    def file_shape(self) -> list[int]:
        """Shape in the file: counts packed 4-bit elements singly, where torch counts pairs."""
        shape = list(self.shape)
        if self.dtype == "float4_e2m1fn_x2":
            shape[-1] *= 2
        return shape


def plan_file(
    content: Content, wanted: PathFilter, strip_prefix: str
) -> tuple[list[FileTensor], tuple[str, ...]]:
    """Return the tensors in the order of the file, and the paths that are left out."""
    left_out = [path_text(path) for path in _plain_values(content.node, ()) if wanted(path)]
    items: dict[str, FileTensor] = {}
    stripped = not strip_prefix
    for leaf in content.leaves:
        if not wanted(leaf.path):
            continue
        text = path_text(leaf.path)
        if leaf.kind in _LEFT_OUT:
            left_out.append(text)
            continue
        name = text.removeprefix(strip_prefix)
        if name.startswith(".") and name != text:
            msg = f"{text!r} would be {name!r} in the file"
            raise InvalidInputError(msg, hint=f"end the prefix with the dot: {strip_prefix}.")
        if not name or name in items or name == "__metadata__":
            msg = f"{text!r} would be the second tensor {name!r} in the file, or has no name"
            raise InvalidInputError(msg, hint="leave one of them out with exclude")
        items[name] = file_tensor(name, leaf, content)
        stripped = stripped or name != text
    wanted.check_all_used()
    if not items:
        hint = "ckptstore show REF --tree lists the tensors; what is no tensor is left out"
        raise TensorNotFoundError("there is no tensor to export", hint=hint)
    if not stripped:
        msg = f"no exported tensor begins with {strip_prefix!r}"
        raise InvalidInputError(msg, hint=did_you_mean(strip_prefix, items))
    # The widest elements first keep every tensor aligned, as in the safetensors library.
    order = sorted(items.values(), key=lambda item: (-ITEM_BYTES[item.dtype], item.name))
    return order, tuple(left_out)


def file_tensor(name: str, leaf: Leaf, content: Content) -> FileTensor:
    """Return one tensor of a file.

    Raises
    ------
    StateError
        A safetensors file cannot hold it.
    """
    text = path_text(leaf.path)
    record = content.manifest.tensors[leaf.index]
    node = leaf.node
    dtype, shape, order = record.dtype, record.shape, record.order
    view = None
    described = ""
    if leaf.kind == "quantized":
        described = "quantized"
    elif leaf.kind == "view" and isinstance(node, list):
        dtype, order = str(node[2]), None
        shape = _ints(node[4])
        view = (_ints([node[3]])[0], _ints(node[5]))
    elif leaf.kind == "numpy" and isinstance(node, list) and len(node) > 2 and node[2] is not None:
        described = f"a NumPy array of {node[2]!r}"
    if not described and (dtype not in SAFETENSORS_DTYPES or (dtype[:6] == "float4" and not shape)):
        described = dtype
    if described:
        msg = f"the tensor {text!r} is {described}, which a safetensors file cannot hold"
        raise StateError(msg, hint=f"leave it out: --exclude '{text}'")
    boxed = record.blocks is not None
    return FileTensor(name, dtype, shape, leaf.index, order, view, blocks=boxed)


def _ints(node: Node) -> tuple[int, ...]:
    """Return a list of ints of the skeleton, which was validated."""
    return tuple(int(x) for x in node if isinstance(x, int)) if isinstance(node, list) else ()


def _plain_values(node: Node, path: Path) -> Iterator[Path]:
    """Yield the paths of values that are neither containers nor stored as tensors."""
    tag = node[0] if isinstance(node, list) else None
    if not isinstance(node, list) or tag not in {*MAPS, *SEQUENCES, "x", *"TVNBGQ"}:
        yield path
    elif tag in MAPS:
        for key, value in pairs(node):
            yield from _plain_values(value, (*path, decode_key(key)))
    elif tag in SEQUENCES:
        for position, item in enumerate(node[SEQUENCES[str(tag)] :]):
            yield from _plain_values(item, (*path, position))
    elif tag == "x":
        yield from _plain_values(node[2], path)


def encode_header(items: Sequence[FileTensor], version: Version | None = None) -> bytes:
    """Return the length and the header, padded so that the data is aligned to 8 bytes.

    Parameters
    ----------
    version
        Named in the header's metadata; None for the metadata that ``save_pretrained`` writes.
    """
    metadata = {"format": "pt"}
    if version is not None:
        metadata["ckptstore.run"] = version.run
        metadata["ckptstore.step"] = str(version.step)
        metadata["ckptstore.version"] = version.id
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for item in items:
        entries[item.name] = {
            "dtype": SAFETENSORS_DTYPES[item.dtype],
            "shape": item.file_shape,
            "data_offsets": [at, at + item.nbytes],
        }
        at += item.nbytes
    try:
        raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        msg = f"a path of the state is not valid Unicode: {error.object[error.start - 20 :][:40]!r}"
        raise StateError(msg, hint="leave it out with exclude") from error
    raw += b" " * (-len(raw) % 8)
    if len(raw) > limits.SAFETENSORS_HEADER_BYTES_MAX:
        msg = f"the header would have {len(raw)} bytes; readers refuse it"
        raise LimitError(msg, hint="export in parts, with include")
    return len(raw).to_bytes(8, "little") + raw
