"""The tutorial, from an empty folder: its commands as printed, in a new environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distkit import build_sdist, build_wheel, make_environment
from docpages import ROOT, Page, read_page

pytestmark = pytest.mark.timeout(900)

COMMANDS_MAX = 14
# Ids, times and figures, which differ between machines and runs.
_VARIES = re.compile(r"\b[0-9a-f]{12}\b|\b[0-9a-f]{8}\b|\d+-\d+-\d+ [\d:]+|\d+\.\d+|\d+ [KM]iB")


def tutorial() -> Page:
    """Return the page."""
    return read_page(ROOT / "docs" / "tutorial.md")


def commands(page: Page) -> list[tuple[str, list[str]]]:
    """Return each command, with the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in page.blocks:
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def masked(text: str) -> str:
    """Return text with one space between words, and without what varies."""
    return " ".join(_VARIES.sub("N", text).split())


def test_the_tutorial_is_short() -> None:
    """It has fewer than fifteen commands, and shows what those print that a reader looks at."""
    found = commands(tutorial())
    assert 10 <= len(found) <= COMMANDS_MAX
    assert all(lines for command, lines in found if command.startswith(("python ", "ckptstore")))


@pytest.mark.slow
def test_the_tutorial_works_as_printed(tmp_path: Path) -> None:
    """With the built wheel alone, each command ends well and prints what the page shows."""
    for name in ("sdist", "wheel", "work"):
        (tmp_path / name).mkdir()
    wheel = build_wheel(build_sdist(tmp_path / "sdist"), tmp_path / "wheel")
    folder, page = tmp_path / "work", tutorial()
    for block in page.blocks:
        if block.language == "python":
            saved = re.fullmatch(r"saved as (\w+\.py) by the test", block.reason)
            assert saved, block.reason
            (folder / saved[1]).write_text(block.text + "\n", encoding="utf-8")
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
        "COLUMNS": "120",
    }
    printed: dict[str, str] = {}
    for command, expected in commands(page):
        # A shell for each command: it hands its variables to the next.
        done = subprocess.run(
            ["bash", "-euc", f"{command}\nenv -0 > {tmp_path}/environment"],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        told = (tmp_path / "environment").read_text("utf-8").rstrip("\0").split("\0")
        environment = dict(variable.split("=", 1) for variable in told)
        if command == "python3 -m venv env":
            make_environment(folder / "env")
        if expected:
            assert masked(done.stdout) == masked("\n".join(expected)), command
            printed[command] = done.stdout

    steps = printed["python train.py gpt 20"] + printed["python train.py gpt 40"]
    once = printed["python train.py straight 40"].replace("straight", "gpt")
    assert [line for line in steps.splitlines() if "loss" in line] == once.splitlines()
    assert printed["python train.py gpt 30"] in printed["python train.py gpt 40"]
    used = subprocess.run(
        [folder / "env/bin/python", "-c", "import ckptstore; print(ckptstore.__file__)"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(used.stdout.strip()).is_relative_to(folder / "env" / "lib")
    assert (folder / "exported" / "model.safetensors").is_file()
