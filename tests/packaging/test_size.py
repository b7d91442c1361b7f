"""The size of the code: what comes in takes something out."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Lines of code that there may be. Lower it after taking something out.
BUDGET = 47_500
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return the lines of a module without blank ones, comments and texts that stand alone."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - texts)


def modules() -> list[Path]:
    """Return the modules of the package, each once: ``ckptstore/backends`` is a link."""
    files = [*(ROOT / "ckptstore").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    return [file for file in files if not any(part.is_symlink() for part in file.parents)]


def test_lines_are_counted() -> None:
    """Blank lines, comments and docstrings do not count; each line of a statement does."""
    lines = ['"""Title.', "", 'More."""', "", "X = (", "    1,  # one", ")", "", "def f():"]
    text = "\n".join([*lines, '    """Do."""', "    # so", "    return X", ""])
    assert code_lines(text) == 5


def test_the_code_is_within_its_budget() -> None:
    """All modules of the package together; print the figure with ``pytest -rP``."""
    count = sum(code_lines(file.read_text(encoding="utf-8")) for file in modules())
    print(f"{count} lines of code, {BUDGET} are allowed")  # noqa: T201
    assert count <= BUDGET


def test_modules_are_of_a_size_to_read() -> None:
    """No module is longer than 600 lines."""
    lines = {file: file.read_text(encoding="utf-8").count("\n") for file in modules()}
    assert [str(file) for file, count in lines.items() if count > 600] == []
