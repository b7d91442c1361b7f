"""Plots of trajectories, of named workloads, and of memory, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, Result

__all__ = ["draw_memory", "draw_trajectory", "draw_workloads"]

_PAPER = "#ffffff"
_COLOURS = {
    "torch.save": "#9aa4b2",
    "safetensors": "#c2cad4",
    "DCP": "#7d8590",
    "DCP + zstd": "#57606a",
    "ZipNN": "#bf8700",
    "restic": "#8250df",
    "borg": "#cf222e",
    "ckptstore auto": "#79b8ff",
    "ckptstore planes": "#1f6feb",
    "ckptstore delta": "#0a3069",
    "ckptstore bf16 + int8": "#2da44e",
    "ckptstore bf16 + 8 bit": "#116329",
}
_PLAIN = "#9aa4b2"


def draw_trajectory(result: Result, folder: Path) -> dict[str, Path]:
    """Draw, for each trajectory, the bytes of all versions so far; return files by subject."""
    stored: Mapping[str, Mapping[str, Sequence[int]]] = result.facts["stored after"]
    names = [name for name in stored if any(stored[name].values())]
    if not names:
        return {}
    columns = 2
    rows = -(-len(names) // columns)
    figure = _figure(10, 3.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, name in enumerate(names):
        axes = grid[place // columns][place % columns]
        for keeper, after in stored[name].items():
            if after:
                axes.plot(
                    range(1, len(after) + 1),
                    [size / 1e6 for size in after],
                    label=keeper,
                    color=_COLOURS.get(keeper, _PLAIN),
                    linewidth=2 if keeper.startswith("ckptstore") else 1.2,
                )
        _plain(axes, name)
        axes.set_xlabel("versions")
        axes.set_ylabel("MB stored")
        axes.set_ylim(bottom=0)
    for place in range(len(names), rows * columns):
        grid[place // columns][place % columns].set_axis_off()
    grid[0][0].legend(frameon=False, fontsize=8)
    path = folder / "benchmark-trajectory.svg"
    figure.savefig(path, metadata={"Date": None})
    return {"Bytes of the versions of a training": path}


def draw_workloads(result: Result, path: Path) -> Path:
    """Draw the duration of a durable save of each workload, as a multiple of torch.save's speed."""
    names = list(result.facts["workloads"])
    tools: dict[str, dict[str, float]] = {}
    for name in names:
        rows = {one.name: one for one in result.tables[f"{name}: save"]}
        rows |= {
            f"ckptstore, {one.name}": one
            for one in result.tables[f"store: {name}"]
            if one.name in {"nothing changed", "stall"}
        }
        base = rows["torch.save"]
        for tool, row in rows.items():
            if row.seconds and base.seconds:
                tools.setdefault(tool, {})[name] = base.median / row.median
    figure = _figure(10, 4.2)
    axes = figure.add_subplot()
    width = 0.85 / max(1, len(tools))
    for number, (tool, speeds) in enumerate(tools.items()):
        ours = tool.startswith("ckptstore")
        shades = ("#79b8ff", "#1f6feb", "#2da44e", "#116329")
        greys = ("#57606a", "#7d8590", "#9aa4b2", "#c2cad4", "#d8dee4", "#bf8700")
        found = [one for one in tools if one.startswith("ckptstore") == ours]
        colour = (shades if ours else greys)[found.index(tool) % (4 if ours else 6)]
        places = [names.index(name) + (number - len(tools) / 2) * width for name in speeds]
        axes.bar(places, list(speeds.values()), width, label=tool, color=colour)
    axes.set_xticks(range(len(names)), names)
    axes.set_yscale("log")
    axes.axhline(1, color="#1f2328", linewidth=0.8)
    _plain(axes, "Durable save: times as fast as torch.save (stall: how long the training stands)")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Date": None})
    return path


def draw_memory(rows: Sequence[Measured], path: Path) -> Path:
    """Draw the peak extra memory over the size of the state."""
    figure = _figure(8, 3.6)
    axes = figure.add_subplot()
    for way in dict.fromkeys(one.name for one in rows):
        shown = [one for one in rows if one.name == way and one.numbers]
        sizes = [one.logical_bytes / 2**30 for one in shown]
        extra = [(one.numbers["extra_bytes"] + one.numbers["child_bytes"]) / 2**30 for one in shown]
        ours = way.startswith("ckptstore")
        axes.plot(sizes, extra, label=way, marker="o", linestyle="-" if ours else "--")
    _plain(axes, "Peak extra memory, GiB")
    axes.set_xlabel("state, GiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.savefig(path, metadata={"Date": None})
    return path


def _figure(width: float, height: float) -> Any:  # noqa: ANN401 - matplotlib has no types here
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ckptstore"  # equal results give equal files
    mpl.rcParams["font.size"] = 10
    return Figure(figsize=(width, height), layout="constrained", facecolor=_PAPER)


def _plain(axes: Any, title: str) -> None:  # noqa: ANN401 - matplotlib has no types here
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_PLAIN, alpha=0.3)
