"""Small stores in memory whose clock is the test's, and checks that do not ask the store."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from simulated_environment import SimulatedEnvironment, Skewed

from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import lifecycle_ops
from ckptstore.config import Options
from ckptstore.format.keys import MANIFESTS_PREFIX, PACKS_PREFIX, REFERENCES_PREFIX, pack_key
from ckptstore.model import Version
from ckptstore.repo import Finding, create_on, open_on
from ckptstore.store import Store

__all__ = ["Place", "delete", "equal", "needs", "new_place", "parts_of", "undelete"]

_names = itertools.count()
CHUNK_BYTES = 1 << 16


def _trusting(_backend: Backend, _environment: object) -> Finding:
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


@dataclass
class Place:
    """A store in memory, with checks that do not ask it."""

    backend: MemoryBackend
    environment: SimulatedEnvironment

    def open(
        self,
        backend: Backend | None = None,
        *,
        ahead_s: float = 0.0,
        **options: Any,  # noqa: ANN401 - as Options takes them
    ) -> Store:
        """Open the store as another process would; with `backend`, on that.

        Parameters
        ----------
        ahead_s
            Seconds by which the clock of the process's machine is ahead.
        """
        repo = open_on(
            backend or self.backend,
            environment=Skewed(self.environment, ahead_s) if ahead_s else self.environment,
            options=Options(**{"workers": 2, **options}),
            prober=_trusting,
        )
        return Store(repo)

    def stored(self) -> set[str]:
        """Return the packs and manifests that are stored."""
        kinds = (PACKS_PREFIX, MANIFESTS_PREFIX)
        return {key for key in self.backend.objects if key.startswith(kinds)}

    def apart_from_caches(self) -> dict[str, object]:
        """Return the stored objects without reference records."""
        records = REFERENCES_PREFIX
        return {key: one for key, one in self.backend.objects.items() if records not in key}

    def needed(self) -> set[str]:
        """Return the packs and manifests that versions need, from their manifests alone."""
        with self.open() as store:
            found: set[str] = set()
            for version in store.versions():
                if version.level != "record":
                    found |= needs(store, version)
        return found

    def orphan(self, name: str = "0") -> str:
        """Store a pack that no commit names; return its key."""
        key = pack_key(f"{int(name, 16):032x}")
        self.backend.put(key, b"left behind")
        return key


def needs(store: Store, version: Version) -> set[str]:
    """Return the keys of the objects that a version needs."""
    table = store.repo.manifests.load(version).pieces
    packs = {table.packs[int(place)] for place in table.pack}
    return {version.manifest_key, *map(pack_key, packs)}


def new_place(*, ahead_s: float = 0.0) -> Place:
    """Return a new, empty store, whose storage's clock is ahead of its clients'."""
    number = next(_names)
    environment = SimulatedEnvironment(number)
    backend = MemoryBackend(f"gc/{number}", environment=Skewed(environment, ahead_s))
    create_on(backend, environment=environment, chunk_bytes=CHUNK_BYTES, prober=_trusting).close()
    return Place(backend, environment)


def parts_of(*numbers: int, elements: int = 1 << 14) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of one tensor a number, each a chunk of its own: equal numbers are shared."""
    state = {}
    for name, number in zip("abcdefgh", numbers, strict=False):
        generator = torch.Generator().manual_seed(1000 * ord(name) + number)
        state[name] = torch.randn(elements, generator=generator)
    return {"model": state}


def equal(found: object, meant: object) -> bool:
    """Return whether two such states are the same, bit by bit."""
    if isinstance(meant, dict):
        assert isinstance(found, dict)
        return found.keys() == meant.keys() and all(equal(found[k], meant[k]) for k in meant)
    assert isinstance(found, torch.Tensor)
    assert isinstance(meant, torch.Tensor)
    return torch.equal(found, meant)


def delete(store: Store, *versions: str) -> None:
    """Delete versions, also pinned or tagged ones."""
    store.repo.log.append(lambda now: lifecycle_ops.delete(now, versions, force=True))


def undelete(store: Store, version: str) -> None:
    """Undelete a version as a client does: read the objects that it needs, then commit."""
    keys = needs(store, store.repo.refresh().version(version))
    store.repo.log.append(lambda now: lifecycle_ops.undelete(now, [version], {version: keys}))
