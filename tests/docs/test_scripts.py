"""Blocks of pages that are whole programs do what they say when each is a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docpages import ROOT, read_page

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_the_loop_that_saves_in_the_background(tmp_path: Path) -> None:
    """A script without a guard for its child process: three saves, and all three are there."""
    page = read_page(ROOT / "docs" / "howto" / "saving-in-the-background.md")
    script = tmp_path / "train.py"
    script.write_text(page.blocks[0].text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout == "[100, 200, 300]\n"
