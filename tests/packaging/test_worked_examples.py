"""The worked examples that CONTRIBUTING links to do what they say, and touch few files.

An edit of an example replaces the text `old` of a `definition` by `new`, or adds the text `added`
to the end of a file, which may be a new one. So it holds on while other code of the file changes.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from anchors import replaced

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).with_name("examples")
FILES_MAX = {"operation": 5, "backend": 4, "codec": 4, "option": 3}


def edited(example: str) -> tuple[dict[str, str], str]:
    """Return the files that an example changes, as they are then, and the code that uses it."""
    found = tomllib.loads((EXAMPLES / f"{example}.toml").read_text())
    files: dict[str, str] = {}
    for edit in found["edits"]:
        path = ROOT / edit["file"]
        text = files.get(edit["file"]) or (path.read_text() if path.exists() else "")
        if "added" in edit:
            text = f"{text}\n\n{edit['added']}" if text else edit["added"]
        else:
            text = replaced(text, edit["definition"], edit["old"], edit["new"])
        files[edit["file"]] = text
    return files, found["use"]


def test_contributing_links_to_each_example() -> None:
    """Each example has a link and a number of files, and nothing else lies beside it."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert {path.name for path in EXAMPLES.iterdir()} == {f"{name}.toml" for name in FILES_MAX}
    assert [
        name for name in FILES_MAX if f"(tests/packaging/examples/{name}.toml)" not in page
    ] == []


@pytest.mark.parametrize("example", FILES_MAX)
def test_an_example_applies_and_touches_few_files(example: str) -> None:
    """The edits of an example fit the tree of today; docs and tests are not among its files."""
    files, _ = edited(example)
    assert 0 < len(files) <= FILES_MAX[example]
    for path, text in files.items():
        assert path.startswith(("ckptstore/", "backends/"))
        ast.parse(text, path)


@pytest.mark.slow
@pytest.mark.parametrize("example", FILES_MAX)
def test_an_example_works(example: str, tmp_path: Path) -> None:
    """With the edits of an example, the code that uses it runs."""
    files, code = edited(example)
    for folder in ("ckptstore", "backends"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for path, text in files.items():
        (tmp_path / path).write_text(text)
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
