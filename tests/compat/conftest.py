"""The single-file reader of the documentation."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from goldenkit import READER


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    """Return the single-file reader of docs/reference as a module."""
    spec = importlib.util.spec_from_file_location("read_version", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
