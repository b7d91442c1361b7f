"""The tree of versions as text: order and lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cli.log_graph import arranged, rails


def _drawn(parents: dict[str, str], first: dict[str, int] | None = None) -> list[str]:
    order = arranged(parents, first or {})
    lines = []
    for node, (own, before) in zip(order, rails(order, parents), strict=True):
        lines += [*before, f"{own} {node}"]
    return lines


def test_a_line_is_a_line() -> None:
    """One run without forks: newest first, one column."""
    assert _drawn({"a": "", "b": "a", "c": "b"}) == ["* c", "* b", "* a"]


def test_branches_join_where_they_left() -> None:
    """The line of lowest rank stands left; the others come to it, from the right."""
    parents = {"a": "", "b": "a", "x": "a", "c": "b", "y": "a"}

    assert _drawn(parents, {"x": 1, "y": 2}) == [
        "* c",
        "* b",
        "| * x",
        "| | * y",
        "|_|/",
        "|/",
        "* a",
    ]


def test_branches_of_branches() -> None:
    """Lines right of one that ends move up."""
    parents = {"a": "", "b": "a", "f": "b", "g": "b", "h": "a"}

    assert _drawn(parents, {"g": 1, "h": 1}) == ["* f", "| * g", "|/", "* b", "| * h", "|/", "* a"]


def test_trees_without_a_common_root() -> None:
    """Runs that began by themselves follow each other, the newest first, with a gap between."""
    assert _drawn({"a": "", "b": "gone", "c": "a"}) == ["* b", "", "* c", "* a"]
    assert _drawn({"a": "", "b": "a", "c": "a", "d": ""}) == [
        "* d",
        "",
        "* c",
        "| * b",
        "|/",
        "* a",
    ]


@given(st.lists(st.integers(-1, 30), max_size=30), st.lists(st.integers(0, 2), min_size=30))
def test_every_version_is_drawn_once_after_what_continues_it(
    wanted: list[int], ranks: list[int]
) -> None:
    """In any forest; and every line that is begun ends at its parent."""
    parents = {str(at): str(parent) if 0 <= parent < at else "" for at, parent in enumerate(wanted)}
    order = arranged(parents, {str(at): rank for at, rank in enumerate(ranks)})

    assert sorted(order) == sorted(parents)
    places = {node: place for place, node in enumerate(order)}
    assert all(places[node] < places[parent] for node, parent in parents.items() if parent)
    rows = rails(order, parents)
    assert all(own.count("*") == 1 for own, _ in rows)
    joins = sum(bool(line) for _, before in rows for line in before)
    gaps = sum(not line for _, before in rows for line in before)
    assert gaps == max(0, sum(not parent for parent in parents.values()) - 1)
    children = [parent for parent in parents.values() if parent]
    assert joins == len(children) - len(set(children))
    if rows:
        assert rows[-1][0] == "*"
