"""The choice of versions that are drawn: bounded, in order, without losing peaks or lines."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.snapshot import VersionRow, encode_metrics
from ckptstore.pages.run_documents import means, nearest_kept, thinned


def _rows(parents: list[int]) -> list[VersionRow]:
    """Return versions; the number says how many places before it the parent of each is."""
    return [
        VersionRow(
            id=f"{place:032x}", run="r", step=place,
            parent=f"{place - back:032x}" if back <= place else "", at_ms=0, commit=place + 1,
            metrics=encode_metrics({}), details=b"",
        )
        for place, back in enumerate(parents)
    ]  # fmt: skip


VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=80)


@given(VALUES, st.integers(4, 40), st.sets(st.integers(0, 79), max_size=20))
def test_extremes_and_marked_ones_stay(values: list[float], most: int, marked: set[int]) -> None:
    """At most so many, in order; the least and the greatest are among them, marked ones if few."""
    rows = _rows([1] * len(values))
    ids = {rows[place].id for place in marked if place < len(rows)}
    kept = thinned(rows, ids, lambda row: values[row.step], most=most)
    steps = [row.step for row in kept]
    assert len(kept) <= most
    assert steps == sorted(set(steps))
    if len(ids) <= most // 2:
        assert ids <= {row.id for row in kept}
        finite = [value for value in values if math.isfinite(value)]
        shown = [values[step] for step in steps if math.isfinite(values[step])]
        assert (min(finite, default=0), max(finite, default=0)) == (
            min(shown, default=0),
            max(shown, default=0),
        )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60), st.sets(st.integers(0, 59)))
def test_each_version_knows_the_nearest_ancestor_that_is_kept(
    parents: list[int], kept: set[int]
) -> None:
    """As a walk from parent to parent finds it, with the number of versions passed."""
    rows = _rows(parents)
    known = {row.id: row for row in rows}
    ids = {row.id for row in rows if row.step in kept}
    found = nearest_kept(rows, ids)
    for row in rows:
        passed, above = 0, row.parent
        while above and above not in ids:
            passed, above = passed + 1, known[above].parent
        assert found[row.id][0] == above
        if above:
            assert found[row.id][1] == passed


def test_means_of_stretches() -> None:
    """Every number counts once; what has none is a gap."""
    assert means([1.0, 3.0, math.nan, math.inf, 5.0, 5.0], 3) == [2.0, None, 5.0]
    assert means([], 3) == []
    assert means([1e308, 1e308], 1) == [1e308]
