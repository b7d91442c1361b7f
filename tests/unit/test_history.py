"""The history of a metric, the best by it, and its picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.catalog.history import history
from ckptstore.cli.metric_history import sparkline
from ckptstore.errors import (
    InvalidInputError,
    MissingDependencyError,
    RunNotFoundError,
    StorageError,
    VersionNotFoundError,
)
from ckptstore.integrations import plots
from ckptstore.integrations.plots import plot_history


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
        ([], ""),
        ([1.0], "▄"),
        ([1.0, 1.0], "▄▄"),
        ([0.0, 1.0, 2.0, 7.0], "▁▂▃█"),
        ([7.0, math.nan, 0.0], "█!▁"),
        ([math.inf, 1.0], "!▄"),
        ([math.nan], "!"),
        ([1e308, -1e308, 1e308], "█▁█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    """Least to greatest; what is no number is marked; equal values are in the middle."""
    assert sparkline(values) == line


def test_a_long_sparkline_takes_means() -> None:
    """It never grows wider than it may, and every value counts."""
    assert sparkline([0.0, 2.0, 4.0, 6.0], width=2) == "▁█"
    assert len(sparkline([float(n) for n in range(1000)])) == 72
    assert sparkline([1.0, math.nan, 3.0, 3.0], width=2, blocks="ab") == "ab"


# --- the picture --------------------------------------------------------------------------------


def test_the_picture_shows_what_there_is(store: ckptstore.Store, tmp_path: Path) -> None:
    """Text of the SVG: the line, the fork, the rollback, the tag, NaN, the best, retention."""
    policy = {"full": "last 2", "weights": "best 3 loss"}
    path = plot_history(store, "gpt", "loss", tmp_path / "a.svg", policy=policy)
    text = path.read_text(encoding="utf-8")
    for said in (
        "gpt: loss", "lower is better", "fork ft", ">rollback<", "abandoned by a rollback", "a_tag",
        "NaN or infinite", "best: 2 at step 60", "retention full: last 2; weights: best 3 loss",
        "retention would delete", "retention would keep the weights", "deleted",
    ):  # fmt: skip
        assert said in text, said
    assert plot_history(store, "gpt", "loss", tmp_path / "b.svg", policy=policy).read_bytes() == (
        path.read_bytes()
    ), "one picture is the same file each time"


def test_forks_of_forks_are_drawn(store: ckptstore.Store, tmp_path: Path) -> None:
    """A fork of a fork begins at its point, also behind a fork that does not have the metric."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    store.run("ft").save({"x": torch.ones(1)}, step=90, metrics={"loss": 1.5})
    store.fork("ft@90", "deep")
    store.run("deep").save({"x": torch.ones(1)}, step=95, metrics={"other": 1.0})
    store.fork("deep", "deeper")
    store.run("deeper").save({"x": torch.ones(1)}, step=99, metrics={"loss": 1.25})
    text = plot_history(store, "gpt", "loss", tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "fork ft" in text
    assert "fork deeper" in text
    figure = Figure()
    plots._draw(figure, plots._picture(store, "gpt", "loss", None))
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "fork deeper"]
    assert np.asarray(line.get_xydata()).tolist() == [[90, 1.5], [99, 1.25]]


@pytest.mark.slow
def test_the_picture_without_retention_and_of_a_fork(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    """No policy, nothing about one; a fork says where it comes from; PNG and PDF are that."""
    text = plot_history(store, "gpt", "loss", tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "retention" not in text
    assert "only the record is kept" in text
    fork = plot_history(store, "ft", "loss", tmp_path / "ft.svg").read_text(encoding="utf-8")
    assert "forked from gpt@40" in fork
    assert plot_history(store, "gpt", "loss", tmp_path / "a.PNG").read_bytes()[1:4] == b"PNG"
    assert plot_history(store, "gpt", "loss", tmp_path / "a.pdf").read_bytes()[:4] == b"%PDF"


def test_odd_names_and_values_are_drawn(tmp_path: Path) -> None:
    """Names that matplotlib would take for formulas; a run of NaN; one version."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        run = store.run("a_b", metrics={"$x^2": "min", "n": "min"})
        run.save({"x": 1}, step=1, metrics={"$x^2": 1.0, "n": math.nan}, tags=["v_1"])
        assert plot_history(store, "a_b", "$x^2", tmp_path / "a.svg").exists()
        assert plot_history(store, "a_b", "n", tmp_path / "b.png").exists()


def test_pictures_that_cannot_be(
    store: ckptstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of no picture, a folder that is not there, no matplotlib."""
    with pytest.raises(InvalidInputError, match=r"\.svg, \.png, \.pdf"):
        plot_history(store, "gpt", "loss", tmp_path / "a.gif")
    with pytest.raises(StorageError, match="cannot be written"):
        plot_history(store, "gpt", "loss", tmp_path / "none" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"ckptstore\[plots\]"):
        plot_history(store, "gpt", "loss", tmp_path / "a.svg")
