"""A store with everything that the page shows, and the documents of a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pagekit import Ask, documents_of, fill

import ckptstore


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes: a rollback, forks, tags, a policy, odd texts."""
    root = tmp_path_factory.mktemp("pages") / "store"
    with ckptstore.open(root, create=True) as store:
        fill(store)
    return root


@pytest.fixture
def store(history: Path) -> Iterator[ckptstore.Store]:
    """Open the store to read."""
    with ckptstore.open(history, read_only=True) as opened:
        yield opened


@pytest.fixture
def ask(store: ckptstore.Store) -> Ask:
    """Return what asks for a document of the store."""
    return documents_of(store)
