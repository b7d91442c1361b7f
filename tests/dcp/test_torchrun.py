"""The program of the how-to page, started by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore

pytestmark = pytest.mark.timeout(600)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "torch-distributed.md"


@pytest.mark.slow
def test_the_page_s_program_with_four_ranks(tmp_path: Path) -> None:
    """What the page saves and loads with one rank, torchrun does with four: four versions."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ends = "\nassert dist.get_world_size() == 4\nstore.close()\ndist.destroy_process_group()\n"
    program = tmp_path / "train.py"
    program.write_text("\n".join(blocks[:4]) + ends)
    # A file for what each rank prints: in one pipe their words may mix.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
    options += ["--log-dir", str(tmp_path / "printed"), "--redirects", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    with ckptstore.open(tmp_path / "ckpts", read_only=True) as store:
        versions = store.versions()
        assert [version.step for version in versions] == [1, 2, 3, 4]
        assert all(version.receipt["ranks_count"] == 4 for version in versions)
        assert store.load("sharded@2")["model"]["0.weight"].shape == (64, 32)
    printed = [file.read_text() for file in (tmp_path / "printed").rglob("stdout.log")]
    assert len(printed) == 4
    for lines in map(str.splitlines, printed):
        assert [line for line in lines if line.startswith("sharded@")] == [
            f"sharded@3 {versions[2].id}"
        ]
