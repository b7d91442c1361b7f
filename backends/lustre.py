"""A hint to Lustre about the layout of a new store's files; the store works without it."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from typing import Final

_PATIENCE_S: Final = 10.0


def stripe_folder(folder: str, count: int) -> None:
    """Request that files below the new `folder` lie on one server up to 4 MiB, on `count` beyond.

    A progressive layout (``lfs-setstripe(1)``, Lustre 2.10): commits and manifests then cost one
    object each, packs get the bandwidth of several servers. Never raises: where the tool is
    missing, too old, or too slow, the folder keeps its parent's layout.
    """
    tool = shutil.which("lfs")
    if tool is None or count < 2:
        return
    command = [tool, "setstripe", "-E", "4M", "-c", "1", "-E", "-1", "-c", str(count), folder]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(  # noqa: S603 - no shell, and no word that begins with a dash from outside
            command,
            timeout=_PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
