"""Opens hostile stores with little memory to spare, and prints the outcomes as JSON.

Run as ``python -m faultkit.hostile_child``, a process of its own whose memory is bounded.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptstore.errors import CkptStoreError
from ckptstore.store import Store
from faultkit.forge import Forge
from faultkit.lies import LIES
from faultkit.states import differences, state_of
from faultkit.stores import contents, create, memory_with, reopen

__all__ = ["MEMORY_BYTES", "main"]

MEMORY_BYTES = 1 << 30
"""Bytes that the process may map in addition when it reads a store."""


def healthy() -> dict[str, bytes]:
    """Return the objects of a store with two versions."""
    backend = memory_with({})
    with create(backend) as store:
        for seed in (1, 2):
            store.run("gpt", metrics={"loss": "min"}).save(
                state_of(seed), step=seed, metrics={"loss": 1 / seed}
            )
    return contents(backend)


def kib_of(name: str) -> int:
    """Return a field of this process's status, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0])


def meet(objects: dict[str, bytes], newest: str) -> dict[str, str]:
    """Read a hostile store in every way that a reader does.

    Returns
    -------
    dict
        Per action ``ok``, or the class of the error; with its trace if it is no CkptStoreError.
    """
    results: dict[str, str] = {}

    def attempt(name: str, action: Callable[[Store], object]) -> None:
        try:
            with reopen(memory_with(objects)) as store:
                found = action(store)
        except CkptStoreError as error:
            results[name] = type(error).__name__
        except BaseException:  # noqa: BLE001 - this is what the test looks for
            results[name] = "foreign: " + traceback.format_exc()
        else:
            results[name] = "ok" if found is None else str(found)

    def load(store: Store) -> str | None:
        found = differences(store.load(f"#{newest}"), state_of(2))
        return "other values" if found else None

    def look(store: Store) -> None:
        lazy = store.version(f"#{newest}")
        lazy.tensors()
        for leaf in lazy._content.leaves[:1]:
            first = lazy[leaf.path]
            first.load()
            if first.shape:
                first[0]

    def list_all(store: Store) -> None:
        store.versions()
        store.runs()
        store.log()

    def write(store: Store) -> None:
        store.run("gpt").save(state_of(3), step=3)

    attempt("load", load)
    attempt("look", look)
    attempt("list", list_all)
    attempt("verify", lambda s: None if s.verify().ok else "problems")
    attempt("save", write)
    return results


def measured(action: Callable[[], dict[str, str]]) -> dict[str, Any]:
    """Return the result of `action` in bounded memory, and the peak growth of memory in use."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    before = kib_of("VmRSS")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (kib_of("VmSize") * 1024 + MEMORY_BYTES, hard))
    try:
        found = action()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return {**found, "peak_kib": kib_of("VmHWM") - before}


def main() -> None:
    """Read the hostile stores that are named, and print the results."""
    torch.set_num_threads(1)
    logging.disable()
    objects = healthy()
    newest = Forge(objects).save["version"]
    results = {"(healthy)": measured(lambda: meet(objects, newest))}
    for name in json.load(sys.stdin):
        lied = LIES[name](Forge(objects))
        results[name] = measured(lambda lied=lied: meet(lied, newest))  # type: ignore[misc]
        del lied
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
