"""Makes golden stores of format v1; run it only when an addition to the format needs a new one.

    python tests/kits/make_golden.py tests/compat/golden/v1-sealed

The golden stores are committed. Later versions of ckptstore must read them unchanged, so an
existing store is never made again: the tests of tests/compat hold every value. The last maker
stays as an example; those of earlier golden stores are in the history of this file.
Ids, times and names come from a simulated environment: the same program gives the same store, but
for zstd's compression of the chunks.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from simulated_environment import SimulatedEnvironment

from ckptstore import keyring, limits, repo
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.registry import open_backend
from ckptstore.backends.sealing import UserKey
from ckptstore.config import Options
from ckptstore.repo import Finding, Repo, create_on
from ckptstore.store import Store


def create(
    folder: pathlib.Path, environment: SimulatedEnvironment, key: UserKey | None = None
) -> Repo:
    """Create a store in a folder that does not exist yet."""
    for module in (repo, keyring):
        module.writer_identity = lambda: "golden@example 1"  # type: ignore[attr-defined]
    limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]
    torch.set_num_threads(1)
    finding = Finding(put_if_absent=PutIfAbsent.ATOMIC, report={"made by": "make_golden.py"})
    return create_on(
        open_backend(folder, kind="local"), prober=lambda _backend, _environment: finding,
        chunk_bytes=limits.CHUNK_BYTES_MIN, key=key, environment=environment,
        options=Options(workers=1),
    )  # fmt: skip


def make_sealed(folder: pathlib.Path) -> None:
    """Make a store that two keys open: 32 times 7 and a one, and bytes from 0 on."""
    environment = SimulatedEnvironment(12)
    first, second = UserKey(b"\7" * 31 + b"\1"), UserKey(bytes(range(32)))
    with Store(create(folder, environment, first)) as store:
        store.run("sealed").save({"model": {"w": torch.arange(300.0)}}, step=1, codec="raw")
        environment.sleep(60)
        keyring.rotate(store.repo.backend, first, second, keep_old=True, environment=environment)


if __name__ == "__main__":
    make_sealed(pathlib.Path(sys.argv[1]))
