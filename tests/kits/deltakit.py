"""States that change a little from step to step, and checks of their stored deltas."""

from __future__ import annotations

from typing import Any

import torch

from ckptstore.backends.base import Backend
from ckptstore.config import Options
from ckptstore.format.manifest import Manifest
from ckptstore.limits import CHUNK_BYTES_MIN
from ckptstore.model import Version
from ckptstore.repo import create_on
from ckptstore.store import Store

__all__ = ["deltas_of", "manifest_of", "open_store", "packs_of", "same", "state_of"]

ELEMENTS = 50_000
"""Of a tensor: four chunks of the smallest size, the last one short."""


def open_store(backend: Backend, **options: Any) -> Store:  # noqa: ANN401
    """Open, or create, a store that saves deltas."""
    chosen = Options(**{"codec": "delta", "workers": 2, **options})
    return Store(create_on(backend, exist_ok=True, chunk_bytes=CHUNK_BYTES_MIN, options=chosen))


def state_of(step: int, *, elements: int = ELEMENTS) -> dict[str, Any]:
    """Return the state of a step: weights change little, first moments are new noise."""
    noise = torch.Generator().manual_seed(7)
    weights = torch.randn(elements, generator=noise) * 0.02
    way = torch.randn(elements, generator=noise) * 1e-6
    frozen = torch.randn(elements // 2, generator=noise)
    now = torch.Generator().manual_seed(1000 + step)
    moved = weights + way * step
    return {
        "model": {
            "weight": moved,
            "half": (3 * weights + 50 * way * step).bfloat16(),
            "frozen": frozen,
        },
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(elements, generator=now)}},
            "count": torch.arange(elements // 2) + step,
        },
        "step": step,
    }


def same(found: Any, expected: Any) -> bool:  # noqa: ANN401 - nested dicts
    """Return whether two states are equal, bit by bit."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, torch.Tensor):
        bits = (found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
        return found.dtype == expected.dtype and torch.equal(*bits)
    return bool(found == expected)


def manifest_of(store: Store, version: Version) -> Manifest:
    """Return the current manifest of a version."""
    return store.repo.manifests.load(store.repo.refresh().version(version.id))


def deltas_of(store: Store, version: Version) -> int:
    """Return the number of a version's pieces that are deltas; their bases must not be deltas."""
    manifest = manifest_of(store, version)
    table, own = manifest.pieces, manifest.first[-1]
    if table.base is None:
        assert own == len(table)
        return 0
    rows = [row for row in range(own) if table.base_of(row) is not None]
    assert all(table.base_of(row) is None for row in range(own, len(table)))
    assert {table.base_of(row) for row in rows} == set(range(own, len(table)))
    return len(rows)


def packs_of(store: Store, version: Version) -> set[str]:
    """Return the packs that a version needs."""
    return set(manifest_of(store, version).pieces.packs)
