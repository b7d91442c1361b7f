"""Kill half way through a save over the previous one: the remains with each tool.

The process that saves is a child, ``python -m benchmarks.killed_saves TOOL FOLDER``, which kills
itself at a point that does not depend on time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.measure import FAILURES
from benchmarks.outcomes import Row
from benchmarks.peers import empty_like
from benchmarks.states import State, seeded_tensors

__all__ = ["killed_saves"]

_REPO = Path(__file__).resolve().parent.parent
_RUN = "bench"


def killed_saves(space: Workspace) -> list[Row]:
    """Save a second time to the same place, be killed half way, then load.

    One row for each of ``torch.save``, ``torch.distributed.checkpoint`` and this library.
    """
    folders = {tool: space.fresh() for tool in ("torch.save", "DCP", "ckptstore")}
    children = {
        tool: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.killed_saves", tool, str(folder)],
            cwd=_REPO,
            stderr=subprocess.PIPE,
            text=True,
        )
        for tool, folder in folders.items()
    }
    for tool, child in children.items():
        _, errors = child.communicate()
        if child.returncode != -signal.SIGKILL:
            msg = f"{tool} was not killed: {errors}"
            raise RuntimeError(msg)
    before, new = seeded_tensors(5), seeded_tensors(6)
    return [_after_kill(tool, before, new, folder) for tool, folder in folders.items()]


def _after_kill(tool: str, before: State, new: State, folder: Path) -> Row:
    fault = "killed (SIGKILL) half way through a save over the previous one"
    target = empty_like(before)
    try:
        if tool == "torch.save":
            target = torch.load(folder / "state.pt", weights_only=True)
        elif tool == "DCP":
            dcp_load(target, storage_reader=FileSystemReader(folder), no_dist=True)
        else:
            with ckptstore.open(folder, read_only=True) as store:
                target = store.load(f"{_RUN}@latest")
    except FAILURES as error:
        observed = f"neither the old nor the new state can be loaded ({type(error).__name__})"
        return Row(fault=fault, tool=tool, observed=observed, silent=False)
    names = before["model"]
    old = sum(torch.equal(target["model"][name], before["model"][name]) for name in names)
    fresh = sum(torch.equal(target["model"][name], new["model"][name]) for name in names)
    if old == len(names):
        observed = "loads the old state, whole"
    elif fresh == len(names):
        observed = "loads the new state, whole"
    else:
        rest = len(names) - old - fresh
        observed = f"loads without an error: {fresh} tensors new, {old} old, {rest} neither"
    return Row(fault=fault, tool=tool, observed=observed, silent=len(names) not in (old, fresh))


def _child(tool: str, folder: Path) -> None:
    """Save twice to one place; never return from the second save."""
    before, new = seeded_tensors(5), seeded_tensors(6)
    if tool == "torch.save":
        torch.save(before, folder / "state.pt")
        limit = (folder / "state.pt").stat().st_size // 2
        with (folder / "state.pt").open("wb") as file:
            torch.save(new, cast("IO[bytes]", _Fatal(file, limit)))
    elif tool == "DCP":
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        dcp_save(before, storage_writer=writer, no_dist=True)
        _die_at_file(3)
        dcp_save(new, storage_writer=writer, no_dist=True)
    else:
        with ckptstore.open(folder, create=True) as store:
            store.run(_RUN).save(before, step=1)
            store.run(_RUN).save(
                new, step=2, progress=lambda seen: _die() if 2 * seen.done >= seen.total else None
            )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_file(number: int) -> None:
    """Kill this process when DCP opens its file of this number from now on."""
    genuine = FileSystem.create_stream
    opened = [0]

    def counted(self: FileSystem, path: Any, mode: str) -> Any:  # noqa: ANN401 - DCP's own types
        opened[0] += 1
        if opened[0] == number:
            _die()
        return genuine(self, path, mode)

    FileSystem.create_stream = counted  # type: ignore[method-assign]


class _Fatal:
    """A file that kills the process after a number of written bytes."""

    def __init__(self, file: Any, limit: int) -> None:  # noqa: ANN401 - any binary file
        self._file = file
        self._left = limit

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        self._left -= len(data)
        if self._left < 0:
            self._file.flush()
            _die()
        count: int = self._file.write(data)
        return count

    def flush(self) -> None:
        self._file.flush()


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
