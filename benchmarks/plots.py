"""Plots of results, as SVG: bars with the range of the rounds, ckptstore in its own colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, Result
from benchmarks.plots_of_resume import draw_resume
from benchmarks.plots_of_states import draw_memory, draw_trajectory, draw_workloads

__all__ = ["draw_plots"]

_OURS = "#1f6feb"
_PEERS = "#9aa4b2"
_INK = "#1f2328"
_PAPER = "#ffffff"


def draw_plots(result: Result, folder: Path) -> dict[str, Path]:
    """Draw the plots of a suite; return the files by their subjects."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Path] = {}
    if result.benchmark == "local":
        plots["Local saves"] = _speeds(
            result.tables["save"],
            "Durable save to a local disk: GB of state per second",
            folder / "benchmark-local-save.svg",
        )
        plots["Local loads"] = _speeds(
            [one for one in result.tables["load, warm cache"] if not one.name.endswith("mapped")],
            "Whole load from a warm cache: GB of state per second (mapped files left out)",
            folder / "benchmark-local-load.svg",
        )
        plots["Bytes stored"] = _shares(
            result.tables["save"],
            "Bytes stored per byte of state",
            folder / "benchmark-local-bytes.svg",
        )
    elif result.benchmark == "s3":
        plots["S3 saves"] = _speeds(
            result.tables["save"],
            "Save to S3: GB of state per second",
            folder / "benchmark-s3-save.svg",
        )
        plots["S3 loads"] = _speeds(
            result.tables["load"],
            "Whole load from S3: GB of state per second",
            folder / "benchmark-s3-load.svg",
        )
    elif result.benchmark == "catalog" and "collections" in result.tables:
        plots["What a collection costs"] = _curve(
            result.tables["collections"], folder / "benchmark-collections.svg"
        )
    elif result.benchmark == "trajectory":
        plots |= draw_trajectory(result, folder)
    elif result.benchmark == "resume":
        plots["Loss of resumed trainings"] = draw_resume(result, folder / "benchmark-resume.svg")
    elif result.benchmark == "workloads":
        plots["Saves of named workloads"] = draw_workloads(
            result, folder / "benchmark-workloads.svg"
        )
    elif result.benchmark == "memory":
        plots["Peak memory"] = draw_memory(result.tables["peak"], folder / "benchmark-memory.svg")
    elif result.benchmark == "scale":
        plots["Many commits at the same moment"] = _waiting(
            result.tables["at once"], folder / "benchmark-scale.svg"
        )
    return plots


def _waiting(rows: Sequence[Measured], path: Path) -> Path:
    """Draw the wait of writers that all commit at once, over their number."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ckptstore"  # equal results give equal files
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor=_PAPER)
    panels = {"longest wait, seconds": "max_s", "LIST requests a commit": "LIST a commit"}
    for axes, (label, value) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, colour, mark in zip(
            dict.fromkeys(one.name for one in rows), (_OURS, _INK, _PEERS), "os^", strict=False
        ):
            shown = [one.numbers for one in rows if one.name == name]
            places = [numbers["writers"] for numbers in shown]
            values = [numbers[value] for numbers in shown]
            axes.plot(places, values, label=name, color=colour, marker=mark)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("writers that commit at once")
        axes.set_title(label, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_PEERS, alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    return path


def _curve(rows: Sequence[Measured], path: Path) -> Path:
    """Draw seconds and requests of collections over the versions that a store ever had."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ckptstore"  # equal results give equal files
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor=_PAPER)
    lives = sorted({one.numbers["live"] for one in rows})
    values: dict[str, Callable[[Measured], float]] = {
        "seconds of a collection": lambda one: one.median,
        "requests of a collection": lambda one: one.numbers["requests"],
    }
    for axes, (label, value) in zip(figure.subplots(1, 2), values.items(), strict=True):
        for live, colour, mark in zip(lives, (_OURS, _INK, _PEERS), "os^", strict=False):
            shown = [one for one in rows if one.numbers["live"] == live]
            history = [one.numbers["history"] for one in shown]
            style: dict[str, Any] = {"color": colour, "marker": mark}
            axes.plot(history, list(map(value, shown)), label=f"{live:,.0f} alive", **style)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("versions ever saved")
        axes.set_title(label, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_PEERS, alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    return path


def _speeds(rows: Sequence[Measured], title: str, path: Path) -> Path:
    """Draw median speeds with whiskers from the slowest to the fastest round."""
    shown = [one for one in rows if one.seconds]
    speeds = [one.logical_bytes / one.median / 1e9 for one in shown]
    low = [
        speed - one.logical_bytes / max(one.seconds) / 1e9
        for one, speed in zip(shown, speeds, strict=True)
    ]
    high = [
        one.logical_bytes / min(one.seconds) / 1e9 - speed
        for one, speed in zip(shown, speeds, strict=True)
    ]
    return _bars([one.name for one in shown], speeds, (low, high), title, "GB/s", path)


def _shares(rows: Sequence[Measured], title: str, path: Path) -> Path:
    shown = [one for one in rows if "stored_bytes" in one.numbers]
    shares = [one.numbers["stored_bytes"] / one.logical_bytes for one in shown]
    return _bars([one.name for one in shown], shares, None, title, "stored / raw", path)


def _bars(
    names: Sequence[str],
    values: Sequence[float],
    whiskers: tuple[Sequence[float], Sequence[float]] | None,
    title: str,
    unit: str,
    path: Path,
) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ckptstore"  # equal results give equal files
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 0.38 * len(names) + 1.1), layout="constrained", facecolor=_PAPER)
    axes = figure.add_subplot()
    colours = [_OURS if name.startswith("ckptstore") else _PEERS for name in names]
    places = list(range(len(names)))
    style: dict[str, Any] = {"color": colours, "height": 0.7}
    if whiskers is not None:
        style |= {"xerr": whiskers, "ecolor": _INK, "error_kw": {"elinewidth": 1, "capsize": 2}}
    axes.barh(places, values, **style)
    reach = [
        value + (whiskers[1][place] if whiskers is not None else 0.0)
        for place, value in enumerate(values)
    ]
    limit = max(reach) if reach else 1.0
    for place, value, end in zip(places, values, reach, strict=True):
        axes.text(end + 0.01 * limit, place, f"{value:.2f}", va="center", color=_INK, fontsize=9)
    axes.set_xlim(0, 1.1 * limit)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    return path
