"""Gives a test that asks for a page every page of the documentation in turn."""

from __future__ import annotations

import fsspec
import pytest
from docpages import ROOT, pages, read_page

# As the entry point of the package does, also where it was installed before it had one.
fsspec.register_implementation("ckpt", "ckptstore.serving.filesystem.CkptFileSystem", clobber=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for a page every page in turn."""
    if "page" in metafunc.fixturenames:
        found = [read_page(path) for path in pages()]
        names = [str(page.path.relative_to(ROOT)) for page in found]
        metafunc.parametrize("page", found, ids=names)
