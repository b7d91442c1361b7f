"""Modules import one another in one direction only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _modules(root: Path) -> dict[str, Path]:
    """Return the modules of the two source folders by the names that they are installed under."""
    found = {}
    for folder, prefix in (("ckptstore", "ckptstore"), ("backends", "ckptstore.backends")):
        for file in sorted((root / folder).rglob("*.py")):
            if (root / "ckptstore" / "backends") in file.parents:
                continue  # the symlink; visited as backends/
            parts = file.relative_to(root / folder).with_suffix("").parts
            names = (prefix, *(part for part in parts if part != "__init__"))
            found[".".join(names)] = file
    return found


def _imports(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each one imports, for types alone and inside functions too."""
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        wanted: set[str] = set()
        for node in _statements(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = (f"{node.module}.{each.name}" for each in node.names)
                wanted.update(part if part in modules else node.module for part in parts)
        graph[name] = wanted & modules.keys()
    return graph


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a block at every depth; no expressions, which hold no imports."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(block, part, ()):
            yield each
            yield from _statements(each)


def _cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle, in its order; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types and inside functions count: what they tie is one knot to a reader."""
    graph = _imports(_modules(ROOT))
    assert len(graph) > 300
    assert graph["ckptstore.store.store"] >= {"ckptstore.store.run", "ckptstore.repo"}
    assert _cycle(graph) == []


@pytest.mark.parametrize(
    "back",
    [
        "import ckptstore.one",
        "from ckptstore import one",
        "from ckptstore.one import name",
        "def f():\n    from ckptstore.one import name",
        "if TYPE_CHECKING:\n    from ckptstore.one import name",
    ],
)
def test_a_circle_is_found(tmp_path: Path, back: str) -> None:
    """Each form of an import statement ties modules, wherever it stands."""
    (tmp_path / "ckptstore").mkdir()
    (tmp_path / "backends").mkdir()
    (tmp_path / "ckptstore" / "one.py").write_text("from ckptstore.two import name\n")
    (tmp_path / "ckptstore" / "two.py").write_text("from ckptstore.backends.three import name\n")
    (tmp_path / "backends" / "three.py").write_text(f"{back}\n")
    found = _cycle(_imports(_modules(tmp_path)))
    assert set(found) == {"ckptstore.one", "ckptstore.two", "ckptstore.backends.three"}
