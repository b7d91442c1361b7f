"""Shared by the unit tests of the catalog: a memory backend, simulated time, and quick saves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import run_ops
from ckptstore.catalog.log import Build
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.model import RoleBytes

Saving = Callable[..., Build]


@pytest.fixture
def environment() -> SimulatedEnvironment:
    """Return simulated time and randomness."""
    return SimulatedEnvironment()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a new local store."""
    with ckptstore.open(tmp_path / "store", create=True) as opened:
        yield opened


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> MemoryBackend:
    """Return a memory backend of this test alone."""
    return MemoryBackend(f"unit/{request.node.nodeid}")


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> Callable[[], MemoryBackend]:
    """Return a function that makes memory backends of this test alone."""
    numbers = itertools.count()
    return lambda: MemoryBackend(f"unit/{request.node.nodeid}/{next(numbers)}")


@pytest.fixture
def saving() -> Saving:
    """Return a function that makes the ``build`` of a save with everything but a state."""
    numbers = itertools.count(1)

    def make(
        run: str = "gpt",
        step: int = 0,
        *,
        version: str = "",
        metrics: Mapping[str, object] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, object] | None = None,
        directions: Mapping[str, str] | None = None,
    ) -> Build:
        named = version or f"{next(numbers):032x}"
        return lambda catalog: run_ops.save(
            catalog, run=run, version=named, step=step,
            manifest=ManifestPointer(key=manifest_key(named), stored_bytes=100, digest="1" * 64),
            content="2" * 64, metrics=metrics, tags=tags, metadata=metadata, directions=directions,
            roles={"weights": RoleBytes(logical=10, new=5, stored=4)}, receipt={"durable_s": 1.5},
        )  # fmt: skip

    return make
