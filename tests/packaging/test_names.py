"""Holds that a name of the package means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The two packages of Lightning, and the adapters that are the same but for their import.
MIRRORED = {"CkptStoreCallback", "CkptStoreIO", "CkptStoreModelParallel"}


def modules() -> list[Path]:
    """Return the modules of the package, each once: ``ckptstore/backends`` is a link."""
    files = [*(ROOT / "ckptstore").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    return [file for file in files if not any(part.is_symlink() for part in file.parents)]


def twice(places: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what has more than one place."""
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_modules_have_one_basename() -> None:
    """A basename finds one module, whatever its folder; ``__init__`` apart."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in modules():
        if file.stem != "__init__":
            places[file.stem].append(str(file.relative_to(ROOT)))
    assert len(places) > 200
    assert twice(places) == {}


def test_no_two_public_classes_have_one_name() -> None:
    """A class name finds one class, but for those that mirror each other on purpose."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in modules():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(ROOT)))
    assert len(places) > 200
    assert twice(places).keys() == MIRRORED
