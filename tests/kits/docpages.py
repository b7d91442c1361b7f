"""The pages of the documentation, read into blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "Page", "pages", "read_page"]

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    language: str
    reason: str
    """Reason for not running it; empty if it runs."""
    line: int
    """Of its first line of text, from 1."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One Markdown file."""

    path: Path
    blocks: tuple[Block, ...]
    prose: str
    """The text with its fenced blocks blanked out."""


def pages() -> list[Path]:
    """Return every Markdown file that users or contributors read, by name."""
    results = ROOT / "benchmarks" / "RESULTS.md"
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), results])


def read_page(path: Path) -> Page:
    """Return a page as blocks; an unclosed fence is an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks, prose = [], list(lines)
    numbered = iter(enumerate(lines, start=1))
    for number, line in numbered:
        opened = _FENCE.match(line)
        if not opened:
            continue
        body = list(_until(numbered, opened["fence"], f"{path}:{number}"))
        language, _, rest = opened["info"].strip().partition(" ")
        for place in range(number - 1, number + len(body) + 1):
            prose[place] = ""
        cut = len(opened["indent"])
        text = "\n".join(part[cut:] if part[:cut].isspace() or not cut else part for part in body)
        reason = rest.removeprefix("no-run:").strip() if rest.startswith("no-run:") else ""
        blocks.append(Block(language=language, reason=reason, line=number + 1, text=text))
    return Page(path=path, blocks=tuple(blocks), prose="\n".join(prose))


def _until(numbered: Iterator[tuple[int, str]], fence: str, where: str) -> Iterator[str]:
    for _, line in numbered:
        if line.strip() == fence:
            return
        yield line
    raise AssertionError(f"{where}: the fence is never closed")
