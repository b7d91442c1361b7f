"""Decoders of stored records are made on import, before there are threads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_record_is_decoded_by_a_type_that_is_looked_up_each_time() -> None:
    """Several threads that decode the first record of a struct at once crash msgspec 0.22.

    What the format, catalog and objects decode may come from any thread: a ``Decoder`` made at
    module level has looked the type up before.
    """
    folders = ("format", "catalog", "objects", "checkpoint")
    found = [
        f"{path.name}: {line.strip()}"
        for folder in folders
        for path in sorted((ROOT / "ckptstore" / folder).glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\bdecode\(.*\btype=_?[A-Z]", line)
    ]

    assert found == []
