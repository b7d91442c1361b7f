"""Duration of ``ckptstore ls`` from the start of its process, and the modules that it imports."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["time_ls"]

_HEAVY = ("torch", "numpy", "s3fs", "gcsfs")


def time_ls(store: Path, *, rounds: int) -> dict[str, Any]:
    """Return the seconds of each call, and the heavy modules that were imported.

    Parameters
    ----------
    store
        Location of a store.
    """
    program = "from ckptstore.cli.main import main; main()"
    command = [sys.executable, "-c", program, "ls", "--store", str(store)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    if first.returncode:
        return {"error": (first.stderr.strip().splitlines() or ["failed"])[-1]}
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", *command[1:]],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "imported": {name: name in names for name in _HEAVY},
    }
