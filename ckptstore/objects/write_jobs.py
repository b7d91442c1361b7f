"""The plan of a write: tensors cut into jobs, each of them one chunk.

Pure: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.chunking import cut, piece_bytes
from ckptstore.codecs.plane_layout import Layout, layout_of
from ckptstore.objects.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceJob:
    """One piece of a large tensor, or a batch of small tensors of one layout: one chunk."""

    small: bool
    """A batch. The length does not tell: the last piece of a large tensor may be short."""
    sources: tuple[Source, ...]
    slot: int
    """Row of the first piece; the pieces of a batch are listed in `slots`."""
    slots: tuple[int, ...]
    start: int
    """Where the piece begins in its tensor; 0 for a batch."""
    length: int
    """Bytes, of a batch all together."""
    layout: Layout
    foreseen: tuple[bytes | None, ...]
    """Per piece: its id, if that is known already."""


def plan_jobs(
    sources: Sequence[Source], chunk_bytes: int
) -> tuple[tuple[int, ...], list[PieceJob]]:
    """Cut every tensor; return the first row of each, and one more, and the jobs.

    A tensor of at least ``SMALL_TENSOR_BYTES`` is cut into pieces, each a job; smaller ones are
    one piece each, and those of one layout share jobs of at most ``SLAB_BYTES``.
    """
    first = [0]
    jobs: list[PieceJob] = []
    batches: dict[Layout, list[tuple[Source, int]]] = {}
    filled: dict[Layout, int] = {}
    for source in sources:
        layout = layout_of(source.dtype)
        slot = first[-1]
        if source.nbytes >= limits.SMALL_TENSOR_BYTES:
            length = piece_bytes(source.row_bytes, source.itemsize, chunk_bytes)
            ids = _foreseen(source, -(-source.nbytes // length))
            for (start, size), piece_id in zip(cut(source.nbytes, length), ids, strict=True):
                jobs.append(_large(source, slot, start, size, layout, piece_id))
                slot += 1
        elif source.nbytes:
            if filled.get(layout, 0) + source.nbytes > limits.SLAB_BYTES:
                jobs.append(_batch(batches.pop(layout), layout))
                filled[layout] = 0
            batches.setdefault(layout, []).append((source, slot))
            filled[layout] = filled.get(layout, 0) + source.nbytes
            slot += 1
        first.append(slot)
    jobs.extend(_batch(batch, layout) for layout, batch in batches.items())
    return tuple(first), jobs


def _foreseen(source: Source, count: int) -> Sequence[bytes | None]:
    """Return the id of each piece of a source, as far as they are known."""
    return getattr(source, "piece_ids", None) or [None] * count  # a PieceSource may have them


def _large(
    source: Source, slot: int, start: int, length: int, layout: Layout, piece_id: bytes | None
) -> PieceJob:
    return PieceJob(
        small=False,
        sources=(source,),
        slot=slot,
        slots=(slot,),
        start=start,
        length=length,
        layout=layout,
        foreseen=(piece_id,),
    )


def _batch(members: Iterable[tuple[Source, int]], layout: Layout) -> PieceJob:
    members = tuple(members)
    return PieceJob(
        small=True,
        sources=tuple(source for source, _ in members),
        slot=members[0][1],
        slots=tuple(slot for _, slot in members),
        start=0,
        length=sum(source.nbytes for source, _ in members),
        layout=layout,
        foreseen=tuple(_foreseen(source, 1)[0] for source, _ in members),
    )
