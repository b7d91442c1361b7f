"""Tensors that a load fills in place: finds them in a state, and checks that they fit."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Final

import torch

from ckptstore.errors import InvalidInputError
from ckptstore.format.dtypes import strides_of
from ckptstore.format.manifest import TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Leaf
from ckptstore.tensors.tensor_bytes import dtype_text, extent_of

ON_CPU: Final = frozenset({"numpy", "bytes", "generator"})
"""Kinds of leaves that torch.device does not apply to: they are read back on the CPU."""


def is_view(leaf: Leaf) -> bool:
    """Return whether a leaf is a view of only a part of its record's memory."""
    node = leaf.node
    inner = node[1] if isinstance(node, list) and node[0] == "Q" else node
    return isinstance(inner, list) and inner[0] == "V"


def tensors_of(value: object, path: Path, depth: int) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors of a state that lies at `path`, `depth` levels down, with their paths.

    Raises
    ------
    InvalidInputError
        The state is a module, or nested too deep.
    """
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, torch.nn.Module):
        raise InvalidInputError(
            "into must be a state, not a module", hint="pass into=module.state_dict()"
        )
    if depth > 64:
        raise InvalidInputError("into is nested too deep")
    found: list[tuple[Path, torch.Tensor]] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            found += tensors_of(item, (*path, key), depth + 1)
    elif isinstance(value, list | tuple | deque):
        for at, item in enumerate(value):
            found += tensors_of(item, (*path, at), depth + 1)
    return found


def check_target(leaf: Leaf, record: TensorRecord, target: torch.Tensor) -> None:
    """Refuse a tensor that a leaf cannot be read into.

    Raises
    ------
    InvalidInputError
        The leaf is no tensor, or its dtype or shape differs; names the path.
    """
    where = repr(path_text(leaf.path))
    if leaf.kind in ON_CPU or leaf.kind == "quantized":
        raise InvalidInputError(f"{where} is a {leaf.kind} leaf: it cannot be read into a tensor")
    if target.layout != torch.strided or target.is_meta or target.is_quantized:
        raise InvalidInputError(f"the tensor of into at {where} is not a plain strided tensor")
    dtype, shape = kind_of(leaf, record)
    if dtype_text(target.dtype) != dtype or tuple(target.shape) != shape:
        raise InvalidInputError(
            f"{where} is {dtype}{list(shape)} in the version, but {dtype_text(target.dtype)}"
            f"{list(target.shape)} in into",
            hint="leave it out of into, or of the load (exclude=)",
        )


def kind_of(leaf: Leaf, record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a leaf; a view has its own."""
    node = leaf.node
    if isinstance(node, list) and node[0] == "V" and isinstance(node[4], list):
        return str(node[2]), tuple(node[4])  # type: ignore[arg-type]  # validated: ints
    return record.dtype, record.shape


def decodable(record: TensorRecord, target: torch.Tensor) -> bool:
    """Return whether the bytes can be decoded straight into the target's memory."""
    if record.blocks is not None or not target.is_cpu or target.is_conj() or target.is_neg():
        return False
    if record.order is None and target.is_contiguous():
        return True
    strides = strides_of(record.shape, record.order)
    pairs = zip(record.shape, target.stride(), strides, strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in pairs)


def check_apart(
    targets: Mapping[Path, torch.Tensor],
    leaves: Mapping[Path, Leaf],
    direct: Mapping[int, torch.Tensor],
) -> None:
    """Refuse memory that would receive two different tensors of the version.

    Parameters
    ----------
    targets
        The tensors to fill.
    leaves
        The leaves of the version.
    direct
        By record: the tensor that receives its decoded bytes.

    Raises
    ------
    InvalidInputError
        Two tensors share memory; names their paths.
    """
    spans: list[tuple[str, int, int, int, Path]] = []
    for path, target in targets.items():
        leaf = leaves[path]
        if leaf.index in direct and target.numel():
            start = target.data_ptr()
            stop = start + extent_of(target) * target.element_size()
            spans.append((str(target.device), start, stop, leaf.index, path))
    spans.sort(key=lambda span: span[:3])
    for before, after in itertools.pairwise(spans):
        if before[0] == after[0] and after[1] < before[2] and before[3] != after[3]:
            a, b = path_text(before[4]), path_text(after[4])
            raise InvalidInputError(
                f"{a!r} and {b!r} share memory in into, but are two tensors in the version",
                hint="leave one of them out of into",
            )
