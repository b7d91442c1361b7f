"""The notebooks run from top to bottom, and show what is stored in them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from docpages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# Ids, times and figures, which differ between machines and runs; and the folder.
_VARIES = re.compile(r"\b[0-9a-f]{8}\b|\d+-\d+-\d+ [\d:]+|\d+\.\d+|/[\w./-]*/ckpts")


def _value(cell: str, names: dict[str, Any]) -> object:
    """Run a cell; return the value of its last line, as a notebook does."""
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)  # noqa: S102 - that is the test
    return eval(ast.unparse(last), names) if last else None  # noqa: S307 - as above


def _shown(value: object) -> dict[str, str]:
    """Return the forms in which a notebook stores a value."""
    table = getattr(value, "_repr_html_", None)
    return {"text/plain": repr(value), **({"text/html": table()} if table else {})}


def _masked(forms: dict[str, Any]) -> dict[str, str]:
    return {name: _VARIES.sub("N", "".join(text)) for name, text in forms.items()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell works in a new folder, and gives the table that readers see without running it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    tables = 0
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        value = _value("".join(cell["source"]), names)
        stored = [_masked(output["data"]) for output in cell["outputs"]]
        assert stored == ([] if value is None else [_masked(_shown(value))])
        tables += sum("text/html" in forms for forms in stored)
    names["store"].close()
    assert tables >= 4


def test_there_is_a_notebook() -> None:
    """A search that finds none would let everything pass."""
    assert NOTEBOOKS
