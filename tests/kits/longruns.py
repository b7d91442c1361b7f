"""Stores with very many versions and no data: the commits that saves would have written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

import msgspec

import ckptstore
from ckptstore.catalog import run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.run_ops import Save
from ckptstore.catalog.state import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.model import RoleBytes

__all__ = ["add_versions"]

_BATCH = 500
"""Versions of a commit."""


def add_versions(store: ckptstore.Store, run: str, count: int) -> None:
    """Add versions to a run, at steps 0, 10, 20 ..., with a metric that falls and has one peak."""
    store.run(run, metrics={"val_loss": "min"})
    head = ""
    for first in range(0, count, _BATCH):
        places = range(first, min(first + _BATCH, count))

        def build(catalog: Catalog, places: Sequence[int] = places, head: str = head) -> list[Op]:
            ops: list[Op] = []
            for place in places:
                *before, save = _ops(catalog, run, place, peak=count // 3)
                ops += [op for op in before if not ops]
                ops.append(msgspec.structs.replace(cast("Save", save), parent=head))
                head = cast("Save", save).version
            return ops

        store.repo.log.append(build)
        head = _id(run, places[-1])


def _id(run: str, place: int) -> str:
    return blake2b(f"{run}@{place}".encode(), digest_size=16).hexdigest()


def _ops(catalog: Catalog, run: str, place: int, *, peak: int) -> list[Op]:
    version = _id(run, place)
    loss = 9.0 if place == peak else 2.0 + math.exp(-place / 2000)
    return run_ops.save(
        catalog,
        run=run,
        version=version,
        step=10 * place,
        manifest=ManifestPointer(key=manifest_key(version), stored_bytes=40_000, digest="1" * 64),
        content=f"{place:064x}",
        directions={"val_loss": "min"},
        metrics={"val_loss": loss, "accuracy": 1 / loss},
        roles={
            "weights": RoleBytes(logical=10**9, new=10**9, stored=650_000_000),
            "optimizer": RoleBytes(logical=6 * 10**9, new=6 * 10**9, stored=4_900_000_000),
        },
        receipt={"writing_s": 1.2, "committing_s": 0.01, "stored_bytes": 5.5e9},
    )
