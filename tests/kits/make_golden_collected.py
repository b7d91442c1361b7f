"""Makes the golden store with a reference record; ``make_golden.py`` explains golden stores.

python tests/kits/make_golden_collected.py tests/compat/golden/v1-collected
"""

from __future__ import annotations

import pathlib
import sys

import torch
from make_golden import create
from simulated_environment import SimulatedEnvironment

from ckptstore.store import Store


def make(folder: pathlib.Path) -> None:
    """Make a store of three versions, of which one was deleted and collected."""
    with Store(create(folder, SimulatedEnvironment(17))) as store:
        run = store.run("gpt")
        for step in range(3):
            run.save({"model": {"w": torch.arange(100.0) + step}}, step=step, codec="planes")
        store.remove(["gpt@0"])
        store.gc(grace_s=0, orphan_age_s=0)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
