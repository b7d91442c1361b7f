"""Several processes save into one store at once, each to its own run or all to one.

Run as ``python -m faultkit.writers_driver FOLDER WRITERS SAVES SHARED``; prints its results as
JSON. torch is imported once; the writers are forks that begin together.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptstore.states.lazy
import ckptstore.states.save  # noqa: F401 - needed after the fork, so imported before it
from faultkit.kill_driver import finish, fork, open_folder
from faultkit.states import differences, state_of

__all__ = ["main"]

ELEMENTS = 5000


def run_name(writer: int, *, shared: bool) -> str:
    """Return the run that a writer saves to."""
    return "together" if shared else f"writer-{writer}"


def write(
    folder: Path, writer: int, saves: int, gate: int, *, shared: bool, tell: Callable[[str], None]
) -> None:
    """Save versions as soon as the gate closes; send their ids."""
    with open_folder(folder) as store:
        run = store.run(run_name(writer, shared=shared), metrics={"loss": "min"})
        states = [state_of(1000 * writer + n, elements=ELEMENTS) for n in range(saves)]
        os.read(gate, 1)  # ends when the parent closes the other side
        ids = []
        for n, state in enumerate(states):
            seed = 1000 * writer + n
            version = run.save(state, step=seed, metrics={"loss": 1 / (1 + n)}, tags=[f"w{writer}"])
            ids.append(version.id)
    tell(json.dumps(ids))


def check(folder: Path, tell: Callable[[str], None]) -> None:
    """Load everything; send the contents."""
    problems: list[str] = []
    with open_folder(folder) as store:
        versions = store.versions()
        for version in versions:
            found = store.load(f"#{version.id}")
            problems += differences(found, state_of(version.step, elements=ELEMENTS))
        problems += [problem.message for problem in store.verify().problems]
        numbers = [commit.number for commit in store.log()]
        heads = {run.name: run.head for run in store.runs()}
    chains = {version.id: version.parent for version in versions}
    tell(json.dumps({"problems": problems, "numbers": numbers, "heads": heads, "chains": chains}))


def main() -> None:
    """Start the writers, then check."""
    torch.set_num_threads(1)
    folder, writers, saves, shared = Path(sys.argv[1]), *map(int, sys.argv[2:])
    with_store = fork(lambda _tell: open_folder(folder, create=True).close())
    problems = finish(*with_store)
    gate, other = os.pipe()
    children = []
    for writer in range(writers):

        def action(tell: Callable[[str], None], writer: int = writer) -> None:
            os.close(other)
            write(folder, writer, saves, gate, shared=bool(shared), tell=tell)

        children.append(fork(action))
    os.close(other)
    told = [finish(*child) for child in children]
    saved: list[Any] = [json.loads(lines[-1]) for lines in told if lines]
    checked = finish(*fork(lambda tell: check(folder, tell)))
    found = {"saved": saved, "setup": problems, **json.loads(checked[-1])}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
