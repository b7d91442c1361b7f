"""A store in memory for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gckit import Place, new_place

from ckptstore.store import Store


@pytest.fixture
def place() -> Place:
    """Make an empty store."""
    return new_place()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    """Open it."""
    with place.open() as opened:
        yield opened
