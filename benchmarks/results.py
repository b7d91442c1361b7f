"""Results as JSON files, one a suite, and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.measure import Measured, Result

__all__ = ["RESULTS", "read_result", "write_result"]

RESULTS: Final = Path(__file__).resolve().parent / "results"


def write_result(folder: Path, result: Result) -> Path:
    """Write a result as ``<benchmark>.json``; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.benchmark}.json"
    path.write_text(json.dumps(_rounded(asdict(result)), indent=1) + "\n")
    return path


def read_result(folder: Path, benchmark: str) -> Result | None:
    """Return the result of a suite, or None if there is none."""
    path = folder / f"{benchmark}.json"
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    tables = {
        name: [Measured(**row) for row in rows] for name, rows in document.pop("tables").items()
    }
    return Result(tables=tables, **document)


def _rounded(value: object) -> object:
    """Return a document whose fractions have six significant digits; the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
