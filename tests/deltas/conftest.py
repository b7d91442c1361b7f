"""Stores in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from deltakit import open_store

from ckptstore.backends.memory import MemoryBackend
from ckptstore.store import Store


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
