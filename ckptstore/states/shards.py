"""One rank's part of a save: writes its boxes of tensors, and some values, into packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from ckptstore import limits
from ckptstore.checkpoint.assemble import RankPart, ShardInfo, ValueInfo
from ckptstore.checkpoint.write import write_tensors
from ckptstore.chunking import piece_bytes
from ckptstore.errors import LimitError, StateError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.manifest import PieceTable
from ckptstore.format.paths import Path, path_text
from ckptstore.format.skeleton import Node
from ckptstore.objects.index import KnownPieces
from ckptstore.repo import Repo
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.flatten import flatten
from ckptstore.tensors.refusals import refusal
from ckptstore.tensors.tensor_bytes import SourceTensor, TensorBytes, dtype_text, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of a tensor that this rank writes."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """The box; any strides, any device."""


def is_box(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense memory of its own, which can be cut into boxes."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and strided and not tensor.is_meta


def write_part(
    repo: Repo,
    shards: Sequence[Shard],
    values: Mapping[str, object],
    *,
    paths: Mapping[str, Path] = MappingProxyType({}),
    shared: Sequence[PieceTable] = (),
    looked: int | None = None,
    codec: str = "auto",
    adapters: Sequence[TypeAdapter] = (),
    progress: ProgressCallback = silent,
) -> RankPart:
    """Write this rank's part of a state; return when its packs are durable.

    The tensors must not change during the call. Nothing becomes visible: the packs are orphans
    until :func:`ckptstore.checkpoint.assemble.commit_parts` names them.

    Parameters
    ----------
    paths
        Path in the state of each name; by default, at its top.
    shared
        Tables of the versions whose pieces may be shared.
    looked
        Number of the catalog in which those were looked up; by default, the one known now.

    Raises
    ------
    StateError
        A value cannot be represented; names it. Nothing was written.
    LimitError
        A value is nested too deep; names it. Nothing was written.
    StorageError
        A write failed.
    """
    began = repo.environment.monotonic()
    if looked is None:
        looked = (repo.catalog if repo.log.opened else repo.refresh()).number
    for shard in shards:
        path = paths.get(shard.name, ())
        if len(path) >= limits.STATE_DEPTH_MAX:
            msg = f"{path_text(path)!r} is nested deeper than {limits.STATE_DEPTH_MAX} levels"
            raise LimitError(msg)
    sources, spans = _cut_shards(shards, repo.chunk_bytes)
    flats = {
        name: _flat_value(paths.get(name, (name,)), value, adapters)
        for name, value in values.items()
    }
    starts: dict[str, int] = {}
    for name, (_, tensors) in flats.items():
        starts[name] = len(sources)
        sources += tensors
    settle(sources)
    written = write_tensors(
        repo,
        sources,
        KnownPieces(shared, deltas=False),
        {},
        codec=codec,
        options=repo.options,
        progress=progress,
    )
    first = written.first
    return RankPart(
        shards=tuple(
            ShardInfo(
                name=shard.name,
                dtype=dtype_text(shard.tensor.dtype) or "",
                shape=tuple(shard.shape),
                offsets=tuple(shard.offsets),
                sizes=tuple(shard.tensor.shape),
                rows=(first[start], first[stop]),
            )
            for shard, (start, stop) in zip(shards, spans, strict=True)
        ),
        values=tuple(
            ValueInfo(
                name=name,
                node=node,
                records=tuple((tensor.dtype, tensor.shape, tensor.order) for tensor in tensors),
                rows=tuple(pairwise(first[starts[name] :][: len(tensors) + 1])),
            )
            for name, (node, tensors) in flats.items()
        ),
        written=written,
        looked=looked,
        seconds=repo.environment.monotonic() - began,
    )


def _cut_shards(
    shards: Sequence[Shard], chunk_bytes: int
) -> tuple[list[SourceTensor], list[tuple[int, int]]]:
    """Return the tensors to write, and per shard the range of its own among them."""
    sources: list[SourceTensor] = []
    spans: list[tuple[int, int]] = []
    for shard in shards:
        if not is_box(shard.tensor):
            raise refusal(shard.tensor, (shard.name,))
        if dtype_text(shard.tensor.dtype) is None:
            msg = f"{shard.name!r} has the dtype {shard.tensor.dtype}, which cannot be stored"
            raise StateError(msg)
        cuts = _sources(shard, chunk_bytes)
        spans.append((len(sources), len(sources) + len(cuts)))
        sources += cuts
    return sources, spans


_Flat = tuple[Node, tuple[SourceTensor, ...]]
"""A value: its node, and the tensors in it."""


def _flat_value(path: Path, value: object, adapters: Sequence[TypeAdapter]) -> _Flat:
    """Flatten a value at its place in the state, so that errors name it and depth counts."""
    state = value
    for key in reversed(path):
        state = {key: state}
    flat = flatten(state, adapters)
    node: Any = flat.skeleton
    for _ in path:
        node = node[2]
    return node, flat.tensors


def _sources(shard: Shard, chunk_bytes: int) -> list[SourceTensor]:
    """Return a shard as one or two tensors to write.

    If it is a range of the tensor's rows, its pieces follow the grid on which the whole tensor
    would be cut, so that versions saved by other numbers of ranks share them. The rows before the
    first border of that grid then are a separate tensor.
    """
    tensor = shard.tensor.detach()
    slab = tensor.ndim > 0 and tuple(tensor.shape[1:]) == tuple(shard.shape[1:])
    start = shard.offsets[0] if slab else 0
    if not start or not tensor.is_contiguous():
        return [_source(tensor, shard.name)]
    item = tensor.element_size()
    row = tensor.numel() // max(1, tensor.shape[0]) * item
    head = -(start * row) % piece_bytes(row, item, chunk_bytes)
    if not 0 < head < tensor.numel() * item:
        return [_source(tensor, shard.name)]
    if row <= chunk_bytes:  # the grid falls on rows
        rows = head // row
        return [_source(tensor[:rows], shard.name), _source(tensor[rows:], shard.name)]
    flat = tensor.view(-1)
    return [_source(flat[: head // item], shard.name), _source(flat[head // item :], shard.name)]


def _source(tensor: torch.Tensor, name: str) -> SourceTensor:
    dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    dtype = dtype_text(tensor.dtype) or ""
    assert dtype in ITEM_BYTES  # noqa: S101  # checked before
    return SourceTensor(
        dtype=dtype,
        shape=tuple(tensor.shape),
        order=None,
        paths=((name,),),
        payload=TensorBytes(tensor, None, dense=dense),
    )
