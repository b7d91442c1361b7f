"""Stores in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from metered import MeteredBackend

from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.limits import CHUNK_BYTES_MIN
from ckptstore.repo import create_on
from ckptstore.store import Store


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> Callable[..., Store]:
    """Return a function that creates a store in memory of its own, with the smallest chunks."""
    numbers = itertools.count()

    def create(*, chunk_bytes: int = CHUNK_BYTES_MIN, host_bytes: int = 1 << 28) -> Store:
        backend = MeteredBackend(MemoryBackend(f"recipes/{request.node.nodeid}/{next(numbers)}"))
        return Store(
            create_on(backend, chunk_bytes=chunk_bytes, options=Options(host_bytes=host_bytes))
        )

    return create
