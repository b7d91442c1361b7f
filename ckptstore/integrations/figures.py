"""Base of all pictures: kinds of file, matplotlib without a window, reproducible files.

Needs matplotlib, which the extra ``plots`` installs; it is imported when a picture is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ckptstore.errors import InvalidInputError, MissingDependencyError, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = (".svg", ".png", ".pdf")
_DPI: Final = 150


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture; raises InvalidInputError if its suffix is no known kind."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        msg = f"{target.name!r} does not end in one of {', '.join(FORMATS)}"
        raise InvalidInputError(msg)
    return target


def save_picture(
    target: Path, size_inches: tuple[float, float], draw: Callable[[Figure], None]
) -> None:
    """Draw a picture and write it to a file, replacing an existing one.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    StorageError
        The file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "pictures need matplotlib"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[plots]'") from error
    form = target.suffix.lower()[1:]
    # Text stays text, and one picture gives the same file each time.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ckptstore",
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure)
        data = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(data, format=form, dpi=_DPI, metadata=metadata)
    try:
        target.write_bytes(data.getvalue())
    except OSError as error:
        msg = f"{target} cannot be written: {error.strerror}"
        raise StorageError(msg) from error


def dress(axes: Axes, *, grid: Literal["both", "y"]) -> None:
    """Add grid and legend to a diagram, and hide the frame above and to the right."""
    axes.grid(visible=True, axis=grid, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.9, loc="center left", bbox_to_anchor=(1.01, 0.5))
