"""Stores in memory and on disk with simulated time and a probe that costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from simulated_environment import SimulatedEnvironment

from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Environment, Options
from ckptstore.format.keys import COMMITS_PREFIX
from ckptstore.model import Version
from ckptstore.repo import Finding, create_on, open_on
from ckptstore.store import Store

__all__ = ["CHUNK_BYTES", "contents", "create", "memory_with", "reopen", "trusting", "version_ids"]

CHUNK_BYTES = 1 << 16
_names = itertools.count()


def trusting(_backend: Backend, _environment: Environment) -> Finding:
    """Stand in for the probe: these tests know their storage."""
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


def memory_with(objects: Mapping[str, bytes]) -> MemoryBackend:
    """Return a memory backend of its own that holds these objects."""
    backend = MemoryBackend(f"faults/{next(_names)}")
    for key, data in objects.items():
        backend.put(key, data)
    return backend


def contents(backend: MemoryBackend) -> dict[str, bytes]:
    """Return a copy of every object."""
    return {key: item.data for key, item in sorted(backend.objects.items())}


def create(backend: Backend, **options: Any) -> Store:  # noqa: ANN401 - as Options takes them
    """Create a store with small chunks, or open it."""
    repo = create_on(
        backend, prober=trusting, chunk_bytes=CHUNK_BYTES, exist_ok=True,
        environment=SimulatedEnvironment(next(_names)),
        options=Options(**{"workers": 2, **options}),
    )  # fmt: skip
    return Store(repo)


def reopen(backend: Backend, **options: Any) -> Store:  # noqa: ANN401 - as Options takes them
    """Open the store on a backend."""
    repo = open_on(
        backend,
        prober=trusting,
        environment=SimulatedEnvironment(next(_names)),
        options=Options(**{"workers": 2, **options}),
    )
    return Store(repo)


def version_ids(store: Store) -> list[str]:
    """Return the ids of all versions, oldest first."""
    return [version.id for version in store.versions()]


def commits_of(backend: Backend) -> list[str]:
    """Return the keys of the log."""
    return [info.key for info in backend.list(COMMITS_PREFIX)]


def load_id(store: Store, version: Version | str) -> Any:  # noqa: ANN401 - whatever was saved
    """Load a version by its id."""
    return store.load(f"#{version if isinstance(version, str) else version.id}")
