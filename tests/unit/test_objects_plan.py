"""The plan of a load: each chunk once, neighbours joined, limits kept; for any table and wish."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from ckptstore.backends.base import Capabilities, PutIfAbsent
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.piece_reader import ReadItem, Span, plan_spans


def capabilities_of(gap: int, size: int) -> Capabilities:
    """Return capabilities that differ in what a plan looks at."""
    return Capabilities(
        put_if_absent=PutIfAbsent.ATOMIC,
        pack_bytes=1 << 20,
        part_bytes=1 << 20,
        read_gap_bytes=gap,
        read_bytes_max=size,
        concurrency=1,
        scatter_read=True,
        lookup_lag_s=0.0,
    )


@st.composite
def tables(draw: st.DrawFn) -> PieceTable:
    """Draw a table of a few packs; chunks hold one to three pieces and may lie apart."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    for pack in range(draw(st.integers(1, 3))):
        at = 32
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0, 0, 0, 100, 5000]))
            raws = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=3))
            stored = draw(st.integers(1, sum(raws)))
            inner = 0
            for raw in raws:
                rows.append((raw, pack, at, stored, inner, sum(raws)))
                inner += raw
            at += CHUNK_HEADER_BYTES + stored
    rows = draw(st.permutations(rows))
    columns = np.array(rows, np.uint64).reshape(len(rows), 6).T
    u32 = [columns[place].astype(np.uint32) for place in (0, 1, 3, 4, 5)]
    return PieceTable(
        ids=np.zeros((len(rows), 32), np.uint8),
        raw=u32[0],
        pack=u32[1],
        offset=columns[2].astype(np.uint64),
        stored=u32[2],
        inner=u32[3],
        slab=u32[4],
        packs=["aa" * 16, "bb" * 16, "cc" * 16],
    )


def apart(first: Span, second: Span, gap: int) -> bool:
    """Say whether two spans lie too far apart for one request."""
    return first.pack != second.pack or not 0 <= second.start - first.end <= gap


@given(tables(), st.data(), st.sampled_from([0, 64, 200, 10_000]), st.integers(1, 9000))
def test_a_plan_fetches_each_chunk_once_and_no_more(
    table: PieceTable, data: st.DataObject, gap: int, size: int
) -> None:
    """Whatever is wanted, in whatever order, and however often.

    Each wanted chunk is in one span with all that is wanted of it; spans are in order; a gap is
    read only if it is small; a span passes the size only if it is one chunk; and no two spans
    could have been one.
    """
    if not len(table):
        assert plan_spans(table, [], capabilities_of(gap, size)) == []
        return
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=20))
    items = [ReadItem(row=row, out=None, label=f"t{place}") for place, row in enumerate(rows)]

    spans = plan_spans(table, items, capabilities_of(gap, size))

    found: dict[tuple[str, int], list[ReadItem]] = {}
    for span in spans:
        assert span.end - span.start <= size or len(span.chunks) == 1
        for chunk in span.chunks:
            assert (span.pack, chunk.offset) not in found
            found[span.pack, chunk.offset] = list(chunk.items)
        for first, second in itertools.pairwise(span.chunks):
            end = first.offset + CHUNK_HEADER_BYTES + first.stored_bytes
            assert 0 <= second.offset - end <= gap
    meant: dict[tuple[str, int], list[ReadItem]] = {}
    for item in items:
        where = (table.packs[int(table.pack[item.row])], int(table.offset[item.row]))
        meant.setdefault(where, []).append(item)
    assert found.keys() == meant.keys()
    for where, members in meant.items():
        assert {id(item) for item in members} == {id(item) for item in found[where]}
        assert len(members) == len(found[where])
    for first_span, second_span in itertools.pairwise(spans):
        joined = second_span.chunks[0].stored_bytes + CHUNK_HEADER_BYTES
        longer = second_span.start + joined - first_span.start
        assert apart(first_span, second_span, gap) or longer > size


def test_a_plan_of_one_pack_is_one_request() -> None:
    """Chunks that follow each other are fetched together, from first header to last byte."""
    count = 10
    table = PieceTable(
        ids=np.zeros((count, 32), np.uint8),
        raw=np.full(count, 100, np.uint32),
        pack=np.zeros(count, np.uint32),
        offset=np.arange(count, dtype=np.uint64) * 164 + 32,
        stored=np.full(count, 100, np.uint32),
        inner=np.zeros(count, np.uint32),
        slab=np.full(count, 100, np.uint32),
        packs=["aa" * 16],
    )
    items = [ReadItem(row=row, out=None, label="t") for row in reversed(range(count))]

    spans = plan_spans(table, items, capabilities_of(0, 1 << 20))

    assert [(span.start, span.end) for span in spans] == [(32, 32 + 1640)]
