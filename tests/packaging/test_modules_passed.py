"""Bounds the modules that a save and a collection pass through.

A module counts if, while the operation runs, it calls another module of the package: the places at
which a reader has to go on reading. Not counted are `backends`, the pure records of `format`, and
the fold of the catalog, which every operation reads.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckptstore

_ROOT = os.path.dirname(ckptstore.__file__) + os.sep  # noqa: PTH120 - compared with texts
_FOLD = {"catalog", "fold", "interleaving", "metrics", "retention", "rows", "state"}
_NOT_COUNTED = {*(f"catalog/{name}.py" for name in _FOLD)}


def _module(frame: FrameType | None) -> str | None:
    """Return the module of the package that a frame or its callers belong to; None in imports."""
    while frame is not None and frame.f_code.co_name != "<module>":
        file = frame.f_code.co_filename
        if file.startswith(_ROOT):
            return file.removeprefix(_ROOT)
        frame = frame.f_back
    return None


def passed(action: Callable[[], Any]) -> set[str]:
    """Run an action, and return the counted modules that called others."""
    callers: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            caller = _module(frame.f_back)
            if caller is not None and caller != _module(frame):
                callers.add(caller)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return {
        name for name in callers - _NOT_COUNTED if not name.startswith(("backends/", "format/"))
    }


def _state(step: int) -> dict[str, Any]:
    """Return a state of which one row changes with the step."""
    weight = torch.zeros(300, 300)
    weight[step] += 1
    return {"model": {"weight": weight}, "step": step}


@pytest.mark.slow
def test_a_save_and_a_collection_pass_through_few_modules(tmp_path: Path) -> None:
    """At most 20 for a save that shares with earlier ones, and 16 for a gc that condemns."""
    with ckptstore.open(tmp_path / uuid.uuid4().hex, create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(3):
            run.save(_state(step), step=step, metrics={"loss": 1.0})

        save = passed(lambda: run.save(_state(3), step=3, metrics={"loss": 0.5}))
        store.remove(["gpt@0", "gpt@1"])
        collection = passed(store.gc)

    assert {"store/run.py", "checkpoint/write.py", "catalog/log.py"} <= save
    assert {"maintenance/collect/gc.py", "catalog/log.py"} <= collection
    assert len(save) <= 20, sorted(save)
    assert len(collection) <= 16, sorted(collection)
