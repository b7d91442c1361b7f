"""The plot of resumed trainings: the range of full precision, and the curves of other forms."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.resume import REFUSED

__all__ = ["draw_resume"]

_COLOURS = ("#1f6feb", "#1a7f37", "#bf8700", "#8250df")
_RANGE = "#9aa4b2"
_BAD = "#cf222e"
_INK = "#1f2328"


def draw_resume(result: Result, path: Path) -> Path:
    """Draw the loss over the steps: the range of full precision as a band, forms as lines."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ckptstore"  # equal results give equal files
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor="#ffffff")
    axes = figure.subplots()
    steps = result.facts["steps"]
    curves = result.facts["curves"]
    names = list(curves)
    full = curves[names[0]]
    low = [min(one[at] for one in full) for at in range(len(steps))]
    high = [max(one[at] for one in full) for at in range(len(steps))]
    label = f"{names[0]}: range of {len(full)} orders of the data"
    axes.fill_between(steps, low, high, color=_RANGE, alpha=0.4, label=label, linewidth=0)
    for name, colour in zip(names[1:], _COLOURS, strict=False):
        means = [statistics.mean(one[at] for one in curves[name]) for at in range(len(steps))]
        bad = name == REFUSED
        axes.plot(
            steps,
            means,
            label=f"{name}: mean",
            color=_BAD if bad else colour,
            linestyle="--" if bad else "-",
            linewidth=1.5,
        )
    axes.set_xlabel("steps after the resume")
    axes.set_title("Loss on held-out text after a resume", loc="left", fontsize=11, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_RANGE, alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    return path
