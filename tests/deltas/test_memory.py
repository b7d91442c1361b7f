"""Host memory of saves and loads of deltas stays within its budget, whatever the state's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

PROGRAM = """
import json, sys
from pathlib import Path
import torch, ckptstore

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) // 1024

def peak(action):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before

folder, budget = sys.argv[1], int(sys.argv[2])
open_it = lambda: ckptstore.open(
    folder, create=True, host_bytes=budget, workers=2, codec="delta", base_bytes=0
)
run = open_it().run("gpt")
run.save({"w": torch.randn(100_000)}, step=0)  # what is loaded once is loaded now
run.save({"w": torch.randn(100_000)}, step=1)
run.load()
state = {f"w{n}": torch.randn(10_000_000) * 0.02 for n in range(4)}
run.save(state, step=2)
for tensor in state.values():
    tensor += 1e-6
figures = {"save": peak(lambda: run.save(state, step=3))}
store = open_it()
version = store.resolve("gpt")
share = sum(part.stored / part.logical for part in version.roles.values())
figures["load"] = peak(lambda: store.load("gpt", into=state))
figures["verify"] = peak(lambda: store.verify())
print(json.dumps([share, figures]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """A state of 160 MB of deltas: saved with bases that are read, loaded in place, verified.

    Some slack is granted: a chunk, its base and its planes for each of two workers, and what the
    allocator keeps.
    """
    budget = 64 * MIB
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(budget)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    share, figures = json.loads(done.stdout)

    assert share < 0.7
    for name, peak_mib in figures.items():
        assert peak_mib * MIB < budget + 48 * MIB, (name, figures)
