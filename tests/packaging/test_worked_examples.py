"""The worked examples of CONTRIBUTING do what they say, and touch no more files than they may."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FILES_MAX = {"an operation of the log": 5, "a backend": 4, "a codec": 4, "an option of save": 3}


def blocks(subject: str, language: str) -> list[str]:
    """Return the blocks in a language from the section that adds a subject."""
    section = PAGE.split(f"\n## Add {subject}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def apply(patch: str, folder: Path, *options: str) -> None:
    """Apply a patch to the files of a folder, whether or not a repository is around it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(
        ["git", "apply", *options, "-"],
        cwd=folder,
        env=environment,
        input=patch,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("subject", FILES_MAX)
def test_an_example_applies_and_touches_few_files(subject: str) -> None:
    """The patch of an example fits the tree of today; docs and tests are not among its files."""
    (patch,) = blocks(subject, "diff")
    touched = set(re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE))

    assert 0 < len(touched) <= FILES_MAX[subject]
    assert all(path.startswith(("ckptstore/", "backends/")) for path in touched)
    apply(patch, ROOT, "--check")


@pytest.mark.slow
@pytest.mark.parametrize("subject", FILES_MAX)
def test_an_example_works(subject: str, tmp_path: Path) -> None:
    """With the patch of an example, the code beneath it runs."""
    (patch,) = blocks(subject, "diff")
    (code,) = blocks(subject, "python")
    for folder in ("ckptstore", "backends"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    apply(patch, tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nassert ckptstore.__file__.startswith({str(tmp_path)!r})\n",
        ],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stderr
