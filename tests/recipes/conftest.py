"""Makes ``recipekit`` importable by its plain name, and gives stores in memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.metered import MeteredBackend
from ckptstore.limits import CHUNK_BYTES_MIN

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("recipekit")

from ckptstore.config import Options  # noqa: E402
from ckptstore.repo import create_on  # noqa: E402
from ckptstore.store import Store  # noqa: E402


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
