"""A store in memory for each test; the folder's own module ``gckit`` is importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("gckit")

from gckit import Place, new_place  # noqa: E402 - found through the line above

from ckptstore.store import Store  # noqa: E402 - after the line above


@pytest.fixture
def place() -> Place:
    """Make an empty store."""
    return new_place()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    """Open it."""
    with place.open() as opened:
        yield opened
