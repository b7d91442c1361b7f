"""Makes the golden store whose key record has a seal; ``make_golden.py`` explains golden stores.

python tests/kits/make_golden_sealed.py tests/compat/golden/v1-sealed
"""

from __future__ import annotations

import pathlib
import sys

import torch
from make_golden import create
from simulated_environment import SimulatedEnvironment

from ckptstore import keyring
from ckptstore.backends.sealing import UserKey
from ckptstore.store import Store


def make(folder: pathlib.Path) -> None:
    """Make a store that two keys open: 32 times 7 and a one, and bytes from 0 on."""
    environment = SimulatedEnvironment(12)
    first, second = UserKey(b"\7" * 31 + b"\1"), UserKey(bytes(range(32)))
    with Store(create(folder, environment, first)) as store:
        store.run("sealed").save({"model": {"w": torch.arange(300.0)}}, step=1, codec="raw")
        environment.sleep(60)
        keyring.rotate(store.repo.backend, first, second, keep_old=True, environment=environment)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
