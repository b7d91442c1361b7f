"""The table of mounts in the documentation: what tests hold, and the lab tries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOUNTS", "Mount"]

_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "mounts.md"
_HEAD = "| mount | type | kind | a new store | tried |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One row."""

    name: str
    fs_type: str
    """As the mount table has it."""
    kind: str
    store: str
    """``shared``, ``single writer`` or ``read-only``."""
    tried: bool
    """False for what only the mount's own documents say."""


def _read() -> tuple[Mount, ...]:
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(_HEAD) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        name, fs_type, kind, store, tried = (cell.strip() for cell in line.strip("|").split("|"))
        assert tried in {"lab", "no"}
        rows.append(
            Mount(
                name=name, fs_type=fs_type.strip("`"), kind=kind, store=store, tried=tried == "lab"
            )
        )
    return tuple(rows)


MOUNTS = _read()
