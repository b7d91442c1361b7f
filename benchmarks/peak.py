"""Peak extra memory of a save, each in a process of its own.

The child loads the state, saves a tiny one the same way (so that imports, pools and caches are
paid for), resets the kernel's high-water mark of its resident memory, saves, and reports the rise
of the mark above the resident memory before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.disk import Workspace
from benchmarks.measure import Measured, say

__all__ = ["peak_of_saves"]

_REPO = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 300


def peak_of_saves(state_file: Path, space: Workspace, names: Sequence[str] = ()) -> list[Measured]:
    """Return one row for each way to save, with ``extra_bytes``.

    Parameters
    ----------
    state_file
        File of the state, written by torch.save.
    names
        Ways to save; all by default.
    """
    rows = []
    for name in names or _names():
        folder = space.fresh()
        command = [sys.executable, "-m", "benchmarks.peak", name, str(state_file), str(folder)]
        done = subprocess.run(
            command, cwd=_REPO, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        row = Measured(name=name)
        if done.returncode:
            row.error = done.stderr.strip().splitlines()[-1]
        else:
            numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            row.numbers = numbers
            row.logical_bytes = int(numbers["state_bytes"])
        rows.append(row)
        space.discard(folder)
        say(f"peak memory: {name}")
    return rows


def _names() -> list[str]:
    from benchmarks.peers import PEERS

    return [
        *(peer.name for peer in PEERS),
        *(f"ckptstore {codec}" for codec in ("auto", "raw", "planes")),
    ]


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    msg = f"no {field} in /proc/self/status"
    raise RuntimeError(msg)


def _save(name: str, state: dict[str, Any], folder: Path) -> None:
    if name.startswith("ckptstore"):
        import ckptstore

        with ckptstore.open(folder, create=True, codec=name.split()[1]) as store:
            store.run("bench").save(state, step=1)
        return
    from benchmarks.peers import PEERS, quiet

    quiet()
    next(peer for peer in PEERS if peer.name == name).save(state, folder)


def _child(name: str, state_file: str, folder: str) -> None:
    import torch

    from benchmarks.states import state_bytes

    state = torch.load(state_file, weights_only=True)
    small = Path(folder, "small")
    small.mkdir()
    _save(name, {"model": {"a": torch.ones(1 << 20), "b": torch.ones(10)}}, small)
    large = Path(folder, "large")
    large.mkdir()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident memory
    before = _resident_bytes("VmRSS")
    _save(name, state, large)
    extra = _resident_bytes("VmHWM") - before
    print(json.dumps({"extra_bytes": extra, "state_bytes": state_bytes(state), "pid": os.getpid()}))


if __name__ == "__main__":
    _child(*sys.argv[1:4])
