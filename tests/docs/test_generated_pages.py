"""The reference says what the source says, and leaves nothing public out."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from types import ModuleType

import pytest
from docpages import ROOT

from ckptstore import errors

REFERENCE = ROOT / "docs" / "reference"


@cache
def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", REFERENCE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api.md", "errors.md", "limits.md"])
def test_page_is_as_generated(name: str) -> None:
    """A docstring, an error or a limit that changed has its page changed with it."""
    written = (REFERENCE / name).read_text(encoding="utf-8")
    assert _generator().pages()[name] == written, "run: python docs/reference/generate.py"


def test_every_public_name_is_in_the_reference() -> None:
    """Each name that users may import has a row, below its module, with a summary."""
    text = (REFERENCE / "api.md").read_text("utf-8")
    rows: dict[str, list[str]] = {}
    for section in text.split("\n## ")[1:]:
        rows[section.split("\n")[0]] = re.findall(r"^\| `(\w+)` \| \w.+ \|$", section, re.MULTILINE)
    assert {"ckptstore", "ckptstore.reports", "ckptstore.backends.base"} <= set(rows)
    for module, names in rows.items():
        public = importlib.import_module(module).__all__
        assert names == [name for name in public if name not in errors.__all__], module


def test_every_limit_is_read() -> None:
    """The page knows each constant of the module, so none is left out by its layout."""
    from ckptstore import limits

    names = {name for group in _generator().read_limits().values() for name in group}
    units = {"KIB", "MIB", "GIB"}
    assert names == {name for name in vars(limits) if name.isupper()} - units
