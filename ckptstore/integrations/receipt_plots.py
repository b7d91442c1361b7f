"""Picture of the costs of saves: seconds by stage, and bytes, one column a version."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import VersionNotFoundError
from ckptstore.integrations.figures import check_picture, dress, save_picture
from ckptstore.model import Receipt, Version
from ckptstore.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_receipts"]

_SIZE_INCHES: Final = (10.0, 7.0)
# Columns in one picture. Source: with more, each is narrower than a pixel.
_VERSIONS_MAX: Final = 200
# Colours that colour-blind people can distinguish. Source: M. Okabe and
# K. Ito, Color universal design (2008).
_STAGES: Final = {
    "staging_s": "#56B4E9",
    "hashing_s": "#009E73",
    "encoding_s": "#0072B2",
    "writing_s": "#E69F00",
    "committing_s": "#CC79A7",
}
_SIZES: Final = {"logical_bytes": "#8c8c8c", "new_bytes": "#0072B2", "stored_bytes": "#D55E00"}
_NAMES: Final = {"logical_bytes": "state", "new_bytes": "new", "stored_bytes": "stored"}


def plot_receipts(store: Store, path: str | os.PathLike[str], *, run: str | None = None) -> Path:
    """Draw the receipts of the last versions, as SVG, PNG or PDF by the suffix of the file.

    Parameters
    ----------
    path
        Replaced if it exists.
    run
        Only versions of this run; None for all, in the order in which they were saved.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    InvalidInputError
        The file has another suffix.
    RunNotFoundError, VersionNotFoundError
        There is no such run, or no version.
    StorageError
        The file cannot be written.
    """
    target = check_picture(path)
    versions = store.versions(run)[-_VERSIONS_MAX:]
    if not versions:
        msg = "there is no version whose receipt could be drawn"
        raise VersionNotFoundError(msg)
    save_picture(target, _SIZE_INCHES, lambda figure: _draw(figure, versions, run))
    return target


def _draw(figure: Figure, versions: Sequence[Version], run: str | None) -> None:
    receipts = [Receipt.of(version.receipt, version.state) for version in versions]
    above, below = figure.subplots(2, 1, sharex=True)
    lines: dict[str, list[int]] = {}
    for place, version in enumerate(versions):
        lines.setdefault(version.run, []).append(place)
    _draw_seconds(above, receipts, [*lines.values()])
    _draw_bytes(below, receipts, [*lines.values()])
    places = range(0, len(versions), max(1, len(versions) // 12))
    named = [f"{v.run}@{v.step}" if run is None else str(v.step) for v in versions]
    turn = 45 if run is None else 0
    below.set_xticks(list(places), [named[place] for place in places], rotation=turn)
    below.set_xlabel("version" if run is None else "step")
    title = run or ", ".join(sorted(lines))
    above.set_title(title.replace("$", r"\$"), fontsize=10, loc="left")
    for axes in (above, below):
        dress(axes, grid="y")


def _draw_lines(
    axes: Axes,
    values: Sequence[float],
    lines: Sequence[Sequence[int]],
    *,
    label: str,
    **style: Any,  # noqa: ANN401 - of matplotlib
) -> None:
    """Draw one line a run, all in one style: versions of different runs are not consecutive."""
    for places in lines:
        axes.plot(places, [values[place] for place in places], label=label, **style)
        label = "_again"


def _draw_seconds(axes: Axes, receipts: Sequence[Receipt], lines: Sequence[Sequence[int]]) -> None:
    places = list(range(len(receipts)))
    bottom = [0.0] * len(receipts)
    for name, color in _STAGES.items():
        heights = [getattr(receipt, name) for receipt in receipts]
        label = name.removesuffix("_s")
        axes.bar(places, heights, bottom=bottom, color=color, label=label, width=0.8)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    blocked = [receipt.blocked_s for receipt in receipts]
    label = "training stood still"
    _draw_lines(axes, blocked, lines, label=label, color="black", marker="_", linewidth=1.2)
    axes.set_ylabel("seconds, of all threads")


def _draw_bytes(axes: Axes, receipts: Sequence[Receipt], lines: Sequence[Sequence[int]]) -> None:
    for name, color in _SIZES.items():
        sizes = [getattr(receipt, name) / (1 << 20) for receipt in receipts]
        style = {"color": color, "marker": "o", "markersize": 3}
        _draw_lines(axes, sizes, lines, label=_NAMES[name], **style)
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
