"""The history of a store: metrics of versions, and the graph of runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.catalog.metrics import history
from ckptstore.cli.log_cmd import sparkline
from ckptstore.cli.log_graph import arranged, rails
from ckptstore.errors import InvalidInputError, RunNotFoundError, VersionNotFoundError


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    """Return a store: a run that was rolled back, saved on, pruned by hand; and a fork of it."""
    opened = ckptstore.open(tmp_path / "store", create=True)
    run = opened.run("gpt", metrics={"loss": "min"})

    def save(step: int, loss: float | None) -> None:
        metrics = {} if loss is None else {"loss": loss}
        run.save({"model": {"w": torch.full((9,), float(step))}}, step=step, metrics=metrics)

    for step, loss in ((0, 5.0), (10, 4.0), (20, None), (30, 3.0), (40, 9.0), (50, math.nan)):
        save(step, loss)
    run.rollback(30)
    for step, loss in ((40, 2.5), (50, 2.7), (60, 2.0), (70, 2.2)):
        save(step, loss)
    run.tag(30, "a_tag")
    opened.age(["gpt@0"], "record")
    opened.remove(["gpt@10"])
    fork = opened.fork("gpt@40", "ft")
    fork.save({"model": {"w": torch.ones(9)}}, step=50, metrics={"loss": 1.5})
    return opened


def test_history_has_every_value(store: ckptstore.Store) -> None:
    """Of deleted, abandoned and reduced versions, too; those without the metric are left out."""
    found = history(store.repo.refresh(), "gpt", "loss")
    assert [p.version.step for p in found.points] == [0, 10, 30, 40, 50, 40, 50, 60, 70]
    assert [p.version.step for p in found.line] == [0, 10, 30, 40, 50, 60, 70]
    improved = [(p.version.step, p.value) for p in found.points if p.improved]
    assert improved == [(0, 5.0), (10, 4.0), (30, 3.0), (40, 2.5), (60, 2.0)]
    assert (found.direction, store.version(f"#{found.best}").step) == ("min", 60)
    assert found.head == store.resolve("gpt").id
    assert [p.version.deleted for p in found.points][:2] == [False, True]


def test_a_metric_without_direction_has_a_history(store: ckptstore.Store) -> None:
    """But neither a best nor improvements."""
    store.annotate("gpt@60", {"acc": 0.5})
    found = history(store.repo.refresh(), "gpt", "acc")
    assert (found.direction, found.best, found.points[0].improved) == (None, "", False)


def test_history_of_nothing(store: ckptstore.Store) -> None:
    """The hint says what there is."""
    with pytest.raises(VersionNotFoundError, match="did you mean loss"):
        history(store.repo.refresh(), "gpt", "los")
    with pytest.raises(RunNotFoundError):
        history(store.repo.refresh(), "gtp", "loss")


def test_top_k(store: ckptstore.Store) -> None:
    """The best first; abandoned, deleted and NaN are not among them; bounds hold."""
    run = store.run("gpt")
    assert [v.step for v in run.best("loss", n=3)] == [60, 70, 40]
    assert [v.step for v in run.best("loss", n=99)] == [60, 70, 40, 50, 30]
    assert [v.step for v in run.best("loss")] == [60]
    assert [v.step for v in run.best("loss", n=9, step_min=40, step_max=50)] == [40, 50]
    assert run.best("loss", step_min=500) == []
    assert run.best("loss")[0] == run.resolve("best:loss")
    assert store.run("gpt", metrics={"acc": "max"}).best("acc") == []
    for wrong in ({"n": 0}, {"metric": "acc"}):
        with pytest.raises(InvalidInputError):
            run.best(**{"metric": "loss", **wrong})  # type: ignore[arg-type]  # one of the two


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""), ([1.0], "▄"), ([1.0, 1.0], "▄▄"), ([0.0, 1.0, 2.0, 7.0], "▁▂▃█"),
        ([7.0, math.nan, 0.0], "█!▁"), ([math.inf, 1.0], "!▄"), ([math.nan], "!"),
        ([1e308, -1e308, 1e308], "█▁█"),
    ],
)  # fmt: skip
def test_sparkline(values: list[float], line: str) -> None:
    """Least to greatest; what is no number is marked; equal values are in the middle."""
    assert sparkline(values) == line


def test_a_long_sparkline_takes_means() -> None:
    """It never grows wider than it may, and every value counts."""
    assert sparkline([0.0, 2.0, 4.0, 6.0], width=2) == "▁█"
    assert len(sparkline([float(n) for n in range(1000)])) == 72
    assert sparkline([1.0, math.nan, 3.0, 3.0], width=2, blocks="ab") == "ab"


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
        "* c", "* b", "| * x", "| | * y", "|_|/", "|/", "* a",
    ]  # fmt: skip


def test_branches_of_branches() -> None:
    """Lines right of one that ends move up."""
    parents = {"a": "", "b": "a", "f": "b", "g": "b", "h": "a"}

    assert _drawn(parents, {"g": 1, "h": 1}) == ["* f", "| * g", "|/", "* b", "| * h", "|/", "* a"]


def test_trees_without_a_common_root() -> None:
    """Runs that began by themselves follow each other, the newest first, with a gap between."""
    assert _drawn({"a": "", "b": "gone", "c": "a"}) == ["* b", "", "* c", "* a"]
    assert _drawn({"a": "", "b": "a", "c": "a", "d": ""}) == [
        "* d", "", "* c", "| * b", "|/", "* a",
    ]  # fmt: skip


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
