"""Gives a test that asks for a page every page of the documentation in turn."""

from __future__ import annotations

import pytest
from docpages import ROOT, pages, read_page


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for a page every page in turn."""
    if "page" in metafunc.fixturenames:
        found = [read_page(path) for path in pages()]
        names = [str(page.path.relative_to(ROOT)) for page in found]
        metafunc.parametrize("page", found, ids=names)
