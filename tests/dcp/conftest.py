"""Sets the environment of ranks; and a run of a new store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks, few processors
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import ckptstore
from ckptstore.store import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a run of a new store."""
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=65536) as store:
        yield store.run("one")
