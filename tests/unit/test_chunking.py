"""The grid covers every byte once, and falls on row borders where rows allow it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.chunking import cut, piece_bytes


@given(
    row=st.integers(0, 10_000_000),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    target=st.sampled_from([1 << 16, 1 << 20, 1 << 22]),
)
def test_pieces_hold_whole_rows_or_whole_elements(row: int, item: int, target: int) -> None:
    """A piece is at most the target, and a multiple of the row or, for huge rows, the element."""
    length = piece_bytes(row * item, item, target)

    assert 0 < length <= target
    assert length % item == 0
    if 0 < row * item <= target:
        assert length % (row * item) == 0
        assert length + row * item > target


@given(total=st.integers(0, 1 << 20), length=st.integers(1000, 1 << 18))
def test_cuts_cover_every_byte_once(total: int, length: int) -> None:
    """Pieces follow each other without gap or overlap and end where the tensor ends."""
    at = 0
    for start, size in cut(total, length):
        assert at == start
        assert 0 < size <= length
        at += size

    assert total == at


def test_appended_rows_leave_earlier_pieces_alone() -> None:
    """A table that grows by rows keeps its cuts: only the last piece and new ones differ."""
    length = piece_bytes(3000, 4, 1 << 16)
    before, after = list(cut(3000 * 100, length)), list(cut(3000 * 130, length))

    assert before[:-1] == after[: len(before) - 1]
