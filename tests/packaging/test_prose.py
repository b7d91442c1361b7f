"""Rules for docstrings that a program can check; CONTRIBUTING.md has the others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TITLE = re.compile(r"(What|Who|Which|How) ")
BANNED = re.compile(r"\b(anew|whoever)\b", re.IGNORECASE)
# Folders and modules that follow the rules; add others when their prose does.
PLACES = (
    "backends", "benchmarks", "ckptstore/catalog", "ckptstore/checkpoint", "ckptstore/chunking.py",
    "ckptstore/cli", "ckptstore/codecs", "ckptstore/committing.py", "ckptstore/config.py",
    "ckptstore/encodings", "ckptstore/engine", "ckptstore/errors.py", "ckptstore/events.py",
    "ckptstore/format", "ckptstore/hashing.py", "ckptstore/integrations", "ckptstore/jobs",
    "ckptstore/keyring.py", "ckptstore/limits.py", "ckptstore/maintenance/check",
    "ckptstore/maintenance/cold", "ckptstore/maintenance/collect", "ckptstore/maintenance/core",
    "ckptstore/maintenance/repair", "ckptstore/maintenance/replicas",
    "ckptstore/maintenance/reports", "ckptstore/maintenance/retention", "ckptstore/manifests.py",
    "ckptstore/model.py", "ckptstore/objects", "ckptstore/replicas", "ckptstore/repo.py",
    "ckptstore/saver", "ckptstore/states", "ckptstore/states/compare.py",
    "ckptstore/states/lazy.py", "ckptstore/states/shards.py", "ckptstore/states/transfer.py",
    "ckptstore/store", "ckptstore/superblocks.py", "ckptstore/tensors", "ckptstore/testing",
    "tests/kits",
)  # fmt: skip


def broken(source: str) -> list[str]:
    """Return the first line of each docstring that breaks a rule."""
    return [
        text.partition("\n")[0]
        for text in docstrings(ast.parse(source))
        if TITLE.match(text) or BANNED.search(text)
    ]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes and of its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield text


@pytest.mark.parametrize("place", PLACES)
def test_docstrings_begin_with_a_noun_or_a_verb(place: str) -> None:
    """A docstring names a thing or an action at once, and uses no word that readers look up."""
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    found = {str(one.relative_to(ROOT)): broken(one.read_text("utf-8")) for one in files}
    assert {name: titles for name, titles in found.items() if titles} == {}


@pytest.mark.parametrize(
    ("source", "titles"),
    [
        ('"""What a store holds."""', ["What a store holds."]),
        ('class A:\n    """How it works."""', ["How it works."]),
        ('def f():\n    """Write a pack anew.\n\n    More."""', ["Write a pack anew."]),
        ('async def f():\n    """Read.\n\n    For whoever asks."""', ["Read."]),
        ('"""Whatever was saved, how it was saved."""', []),
    ],
)
def test_a_breach_is_found(source: str, titles: list[str]) -> None:
    """The check sees every kind of docstring, and the words in all of its lines."""
    assert broken(source) == titles
