"""A real Dask scheduler with two worker processes, once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daskcluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start a scheduler and two workers with a nanny each, as three programs."""
    with Cluster(workers=2) as running:
        yield running
