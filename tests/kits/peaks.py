"""The memory that something takes at most, in this process and in programs of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["memory_below", "told_by"]

PEAK = """
import json, sys
from pathlib import Path
import torch, ckptstore

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) // 1024

def peak(action):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before
"""
"""Defines ``peak``: MiB that an action adds to the memory of its process at most."""


def told_by(program: str, *arguments: object) -> Any:  # noqa: ANN401 - as the program prints it
    """Run a program after the lines of `PEAK`; return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK + program, *map(str, arguments)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


@contextmanager
def memory_below(most_bytes: float) -> Iterator[None]:
    """Assert that the objects that the block makes take less memory at every moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_bytes
