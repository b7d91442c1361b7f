"""Makes the golden store with pins for other stores; ``make_golden.py`` explains golden stores.

python tests/kits/make_golden_pins.py tests/compat/golden/v1-pins
"""

from __future__ import annotations

import pathlib
import sys

import torch
from make_golden import create
from simulated_environment import SimulatedEnvironment

from ckptstore import limits
from ckptstore.catalog.lifecycle_ops import pin_for, unpin_for
from ckptstore.store import Store


def make(folder: pathlib.Path) -> None:
    """Make a store of four versions: pinned by a person, for two stores, by both, by none."""
    least = limits.SNAPSHOT_COMMITS_MIN
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # so that snapshots hold pins
    try:
        with Store(create(folder, SimulatedEnvironment(13))) as store:
            run, log = store.run("gpt"), store.repo.log
            saved = [
                run.save({"model": {"w": torch.arange(100.0) + n}}, step=n, codec="planes")
                for n in range(4)
            ]
            ids = [version.id for version in saved]
            store.pin("gpt@0")
            log.append_any(lambda now: pin_for(now, ids[1:3], f"{1:032x}"))
            log.append_any(lambda now: pin_for(now, ids[1:4], f"{2:032x}"))
            store.pin("gpt@2")
            log.append_any(lambda now: unpin_for(now, ids[3:], f"{2:032x}"))
            store.pin("gpt@3")
            store.unpin("gpt@3")
            log.append_any(lambda now: unpin_for(now, ids[2:3], f"{1:032x}"))
    finally:
        limits.SNAPSHOT_COMMITS_MIN = least  # type: ignore[misc]


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
