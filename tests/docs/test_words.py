"""The documentation stays short: what comes in takes something out.

Words are counted as ``wc -w`` does: everything between white space, so code, marks of Markdown and
bars of tables too.
"""

from __future__ import annotations

from docpages import ROOT

# Words that there may be. Lower it after taking something out.
BUDGET = 85_000


def words(text: str) -> int:
    """Return what ``wc -w`` prints for a text."""
    return len(text.split())


def test_words_are_counted() -> None:
    """Text, code, and bars of tables count, with any white space between them."""
    assert words("| a | `b c` |\n|---|---|\n$ ckptstore ls\t-> two-word's\n") == 12


def test_the_documentation_is_within_its_budget() -> None:
    """Pages of ``docs/``, README and changelog; print the figure with ``pytest -rP``."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    count = sum(words(page.read_text(encoding="utf-8")) for page in pages)
    print(f"{count} words, {BUDGET} are allowed")  # noqa: T201
    assert count <= BUDGET
