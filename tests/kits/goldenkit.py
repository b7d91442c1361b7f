"""Golden stores for tests: their folders, their contents, copies of them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckptstore.format.pack import CHUNK_HEADER_BYTES, ChunkHeader, parse_chunk_header, parse_trailer

__all__ = ["DIGESTS", "FILES", "READER", "chunks_of", "copied", "golden", "sizes"]

_FACTS = json.loads((Path(__file__).parents[1] / "compat" / "golden.json").read_bytes())
FILES: Final[dict[str, dict[str, int]]] = _FACTS["files"]
"""The bytes of each file, by golden store and path; they never change."""
DIGESTS: Final[dict[str, dict[str, dict[str, str]]]] = _FACTS["digests"]
"""The first 16 bytes of BLAKE3-256 of tensors, by golden store, step and path of the tensor."""

READER = Path(__file__).parents[2] / "docs" / "reference" / "read_version.py"
"""The single-file reader, which needs no ckptstore."""


def golden(name: str) -> Path:
    """Return the folder of a golden store; nothing may write there."""
    return Path(__file__).parents[1] / "compat" / "golden" / name


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file of a store, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def copied(folder: Path, to: Path, *, without: tuple[str, ...]) -> Path:
    """Copy a store except files of these names, such as ``*.snap``; return the copy's folder."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*without))
    return to


def chunks_of(folder: Path) -> Iterator[tuple[ChunkHeader, memoryview]]:
    """Yield header and stored bytes of every chunk in a store's packs."""
    for path in folder.glob("packs/*/*.pack"):
        data = memoryview(path.read_bytes())
        index, count, _ = parse_trailer(bytes(data[-32:]), pack_bytes=len(data), where=path.name)
        for row in range(count):
            (at,) = struct.unpack_from("<Q", data, index + 48 * row + 32)
            body = at + CHUNK_HEADER_BYTES
            header = parse_chunk_header(bytes(data[at:body]), where=path.name)
            yield header, data[body : body + header.stored_bytes]
