"""Host memory of a save and a load stays within its budget, whatever the size of the state."""

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

folder, budget, codec = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = ckptstore.open(folder, create=True, host_bytes=budget, workers=2)
run = store.run("gpt")
run.save({"w": torch.randn(100_000)}, step=0, codec=codec)  # what is loaded once is loaded now
run.load()
state = {f"w{n}": torch.randn(10_000_000) for n in range(8)}
figures = {"state": sum(t.nbytes for t in state.values()) >> 20}
figures["save"] = peak(lambda: run.save(state, step=1, codec=codec))
figures["save again"] = peak(lambda: run.save(state, step=2, codec=codec))
figures["load"] = peak(lambda: run.load(into=state))
figures["verify"] = peak(lambda: store.verify())
print(json.dumps(figures))
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("codec", ["planes", "raw"])
def test_memory_stays_within_the_budget(tmp_path: Path, codec: str) -> None:
    """A state five times as large as the budget: saved, loaded in place and verified within it.

    Some slack is granted: a chunk and its planes for each of two workers, and what the
    allocator keeps.
    """
    budget = 64 * MIB
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(budget), codec],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    figures: dict[str, int] = json.loads(done.stdout)
    state = figures.pop("state")

    assert state * MIB > 4 * budget
    assert max(figures.values()) < budget / MIB + 64, figures
