"""Base of all pictures: kinds of file, matplotlib without a window, reproducible files.

Needs matplotlib, which the extra ``plots`` installs; it is imported when a picture is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import InvalidInputError, MissingDependencyError, StorageError

if TYPE_CHECKING:
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


def draw_picture(
    form: str, size_inches: tuple[float, float], draw: Callable[[Figure], None]
) -> bytes:
    """Return a picture as a file of one kind: ``svg``, ``png`` or ``pdf``.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "pictures need matplotlib"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[plots]'") from error
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
    return data.getvalue()


def write_picture(target: Path, data: bytes) -> None:
    """Write a picture, replacing an existing file; raises StorageError on failure."""
    try:
        target.write_bytes(data)
    except OSError as error:
        msg = f"{target} cannot be written: {error.strerror}"
        raise StorageError(msg) from error
