"""Edits of a module that hold on while the code around them changes.

A place is named by a definition and a text within it. White space between the words of the text
does not count, nor does a comma before a closing bracket.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

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
    new
        Its lines are indented as the place is, by the difference to the first one.

    Raises
    ------
    AnchorError
        There is no such definition, or the old text does not occur exactly once in it.
    """
    lines = module.splitlines(keepends=True)
    found = [
        (start + match.start(), start + match.end())
        for start, end in _spans(module, definition, lines)
        for match in _pattern(old).finditer(module[start:end])
    ]
    if len(found) != 1:
        msg = f"its old text occurs {len(found)} times in {definition or 'the module'}, not once"
        raise AnchorError(msg)
    ((start, end),) = found
    line = module[module.rfind("\n", 0, start) + 1 : start]
    margin = line[: len(line) - len(line.lstrip())]
    return module[:start] + _indented(new, margin) + module[end:]


def _spans(module: str, definition: str, lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each definition of a name: overloads are several."""
    if not definition:
        yield 0, len(module)
        return
    scopes: list[list[ast.stmt]] = [ast.parse(module).body]
    nodes: list[ast.stmt] = []
    for name in definition.split("."):
        nodes = [node for body in scopes for node in body if name in _names(node)]
        scopes = [getattr(node, "body", []) for node in nodes]
    if not nodes:
        msg = f"there is no {definition}"
        raise AnchorError(msg)
    for node in nodes:
        decorators: Iterable[ast.expr] = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(one.lineno for one in decorators)])
        yield len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a text with any white space between its words and signs."""
    parts = (
        rf"\b{found[1]}\b" if found[1] else (r",?\s*" * (found[0] in ")]}") + re.escape(found[0]))
        for found in _WORD.finditer(text)
    )
    return re.compile(r"\s*".join(parts))


def _indented(text: str, margin: str) -> str:
    """Return lines with the margin instead of the indentation of the first, which has none."""
    first, *rest = text.strip("\n").split("\n")
    own = len(first) - len(first.lstrip())
    return "\n".join([first.strip(), *((margin + line[own:]).rstrip() for line in rest)])
