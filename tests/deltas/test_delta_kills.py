"""SIGKILL in the middle of saves with deltas and of collections: versions are absent or whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltakit import deltas_of, open_store, same, state_of

from ckptstore.backends.registry import open_backend

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from deltakit import open_store, state_of
from ckptstore.backends.registry import open_backend
from faultkit.tripwire import Tripwire
store = open_store(open_backend(sys.argv[2]))
run = store.run("gpt")
versions = store.versions()
step = versions[-1].step + 1 if versions else 0
Tripwire(int(sys.argv[3]), after=False)
while True:
    run.save(state_of(step), step=step)
    if step % 3 == 2:
        store.retain({"full": ["last 2"]})
        store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
    step += 1
"""


def killed(folder: Path, at: int) -> None:
    """Let a process save, prune and collect until it kills itself at a call on files."""
    words = [str(Path(__file__).parent), str(folder), str(at)]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], check=False, timeout=1200)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_savers_of_deltas_leave_versions_absent_or_whole(tmp_path: Path) -> None:
    """After each kill every version loads bit by bit, and verify finds nothing."""
    newest, deltas = -1, 0
    for at in (1200, 333, 40, 711, 1000):
        killed(tmp_path / "store", at)
        with open_store(open_backend(tmp_path / "store")) as store:
            versions = store.versions()
            for version in versions:
                assert same(store.load(f"#{version.id}"), state_of(version.step))
                deltas += deltas_of(store, version)
            steps = [version.step for version in versions]
            assert store.verify().ok
        assert steps == sorted(steps)
        assert not steps or steps[-1] >= newest
        newest = steps[-1] if steps else newest
    assert newest > 0
    assert deltas > 0
