"""Edits of a module that hold on while the code around them changes."""

from __future__ import annotations

import ast
import re

__all__ = ["AnchorError", "replaced"]

_WORD = re.compile(r"(\w+)|[^\w\s]")


class AnchorError(Exception):
    """A definition is missing, or does not have a text exactly once."""


def replaced(module: str, definition: str, old: str, new: str) -> str:
    """Return the source of a module with one text of a definition replaced.

    Parameters
    ----------
    definition
        A function, class, assignment or import by the name that it binds; ``Class.method`` for one
        within another; empty for the whole module.
    old
        White space between its words does not count, nor does a comma before a closing bracket.
    new
        Its lines are indented as the place is, by the difference to the first one.

    Raises
    ------
    AnchorError
        There is no such definition, or the old text does not occur exactly once in it.
    """
    nodes: list[ast.AST] = [ast.parse(module)]
    for name in filter(None, definition.split(".")):
        nodes = [each for node in nodes for each in getattr(node, "body", ()) if _binds(each, name)]
    if not nodes:
        msg = f"there is no {definition}"
        raise AnchorError(msg)
    places = [
        place for node in nodes for place in _pattern(old).finditer(module, *_span(module, node))
    ]
    if len(places) != 1:
        msg = f"its old text occurs {len(places)} times in {definition or 'the module'}, not once"
        raise AnchorError(msg)
    start, end = places[0].span()
    line = module[module.rfind("\n", 0, start) + 1 : start]
    margin = line[: len(line) - len(line.lstrip())]
    first, *rest = new.strip("\n").split("\n")
    own = len(first) - len(first.lstrip())
    lines = [first.strip(), *((margin + each[own:]).rstrip() for each in rest)]
    return module[:start] + "\n".join(lines) + module[end:]


def _span(module: str, node: ast.AST) -> tuple[int, int]:
    """Return start and end of a node's lines, with its decorators."""
    if not isinstance(node, ast.stmt):
        return 0, len(module)
    lines = module.splitlines(keepends=True)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def _binds(node: ast.stmt, name: str) -> bool:
    """Return whether a statement binds a name."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return name in {alias.asname or alias.name for alias in node.names}
    targets = getattr(node, "targets", None) or [getattr(node, "target", node)]
    return name in {getattr(each, "id", getattr(each, "name", None)) for each in targets}


def _pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a text with any white space between its words and signs."""
    parts = (
        rf"\b{found[1]}\b" if found[1] else r",?\s*" * (found[0] in ")]}") + re.escape(found[0])
        for found in _WORD.finditer(text)
    )
    return re.compile(r"\s*".join(parts))
