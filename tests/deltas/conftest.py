"""Makes ``deltakit`` importable by its plain name, and gives stores in memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.backends.memory import MemoryBackend

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("deltakit")

from deltakit import open_store  # noqa: E402

from ckptstore.store import Store  # noqa: E402


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> Callable[[], MemoryBackend]:
    """Return a function that makes storages of this test alone."""
    numbers = itertools.count()
    return lambda: MemoryBackend(f"deltas/{request.node.nodeid}/{next(numbers)}")


@pytest.fixture
def backend(backends: Callable[[], MemoryBackend]) -> MemoryBackend:
    """Return an empty storage."""
    return backends()


@pytest.fixture
def store(backend: MemoryBackend) -> Store:
    """Return a new store that saves deltas."""
    return open_store(backend)
