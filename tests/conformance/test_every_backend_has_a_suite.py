"""Whoever registers a backend must give it a conformance suite."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ckptstore.backends.fsspec_backend import open_fsspec
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.backends.registry import FACTORIES, open_backend

TESTS = Path(__file__).parents[1]


def suites(folder: str) -> dict[str, list[str]]:
    """Return the suite classes of a folder by the ``backend_name`` that they set."""
    found: dict[str, list[str]] = {}
    for path in sorted((TESTS / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for item in node.body if isinstance(node, ast.ClassDef) else []:
                match item:
                    case ast.Assign(
                        targets=[ast.Name(id="backend_name")], value=ast.Constant(value=str(name))
                    ):
                        found.setdefault(name, []).append(str(path))
    return found


def registered() -> set[str]:
    """Return the names of all backends that a location can lead to."""
    names = set(SETTINGS) | {open_fsspec("memory://x").name}
    for scheme in FACTORIES:
        url = f"{scheme}://bucket/path" if scheme != "file" else "/some/path"
        names.add(open_backend(url, retry=False).name)
    return names


@pytest.mark.parametrize("name", sorted(registered()))
def test_backend_has_a_suite(name: str) -> None:
    """Each registered backend has a class in tests/conformance that says it tests it."""
    assert suites("conformance").get(name)


@pytest.mark.parametrize("name", ["nfs", "parallel"])
def test_mounted_kinds_have_a_lab_suite(name: str) -> None:
    """What only shows between machines is tested on real file systems, in the lab."""
    assert suites("lab").get(name) or suites("kits/labkit").get(name)
