"""The page of format v1 says what the golden store and the code do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckptstore import limits
from ckptstore.catalog.commits import OPS
from ckptstore.codecs.codec_table import CODECS, DELTAS
from ckptstore.codecs.plane_layout import Layout
from ckptstore.format import skeleton, skeleton_check
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.pack import (
    CHUNK_HEADER_BYTES,
    HEADER_BYTES,
    IndexRow,
    parse_chunk_header,
    parse_index,
    parse_trailer,
)
from ckptstore.hashing import xxh3_64

GOLDEN = Path(__file__).parent / "golden" / "v1"
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format-v1.md").read_text()
DUMP = re.compile(r"```text\n(\S+) from byte (\d+)\n(.*?)```", re.DOTALL)
HEX = re.compile(r"((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  .*)?\Z")


def table(heading: str) -> list[list[str]]:
    """Return the rows of all tables between a heading and the next of any level."""
    text = PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= {"-", "|"}]


def names(cell: str) -> list[str]:
    """Return what is in code marks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_hex_examples_are_what_the_golden_store_holds() -> None:
    """Every dump on the page is, byte for byte, a part of an object."""
    dumps = DUMP.findall(PAGE)

    assert len(dumps) == 4
    for key, start, text in dumps:
        lines = [HEX.match(line) for line in text.splitlines()]
        assert all(lines), text
        data = b"".join(bytes.fromhex(line[1]) for line in lines if line)
        assert (GOLDEN / key).read_bytes()[int(start) : int(start) + len(data)] == data


@pytest.mark.parametrize("key", ["store.json", "commits/000000/000000000004.json"])
def test_json_examples_are_what_the_golden_store_holds(key: str) -> None:
    """The records in JSON are shown as they are stored."""
    assert f"```json\n{(GOLDEN / key).read_text()}```" in PAGE


def test_the_limits_are_those_of_the_code() -> None:
    """Each limit on the page has the value that the code has."""
    rows = [row for row in table("## Limits") if names(row[0])]

    assert len(rows) > 20
    for cell, value in rows:
        assert getattr(limits, names(cell)[0]) == int(value), cell


def test_every_operation_is_listed() -> None:
    """The table of operations has those of the code and no other."""
    listed = [name for row in table("### Commits") if len(row) == 3 for name in names(row[0])]
    known = [op.__struct_config__.tag for op in OPS]

    assert sorted(set(listed) - {"op"}) == sorted(str(tag) for tag in known)


def test_every_field_of_an_operation_is_listed() -> None:
    """The fields of each operation are on the page under their stored names."""
    ops = {str(op.__struct_config__.tag): op for op in OPS}
    for row in table("### Commits"):
        for name in names(row[0]):
            if name in ops:
                fields = set(ops[name].__struct_encode_fields__)
                assert fields <= set(names(row[1])), name


def test_every_tag_of_a_skeleton_is_listed() -> None:
    """The table of tags has those that validation knows and no other."""
    listed = [name for row in table("## Skeleton") for name in names(row[0])]
    known = {*skeleton.MAPS, *skeleton.SEQUENCES, *skeleton_check._RULES}

    assert sorted(listed) == sorted(known)


def test_every_codec_layout_and_dtype_is_listed() -> None:
    """Codes and names are those of the code."""
    rows = table("### Codecs and layouts")
    codes = {(int(row[0]), row[1]) for row in rows if row[0].isdigit()}
    text = PAGE.split("dtypes are torch's names:")[1].split("### Snapshot")[0]
    dtypes = {name for part in names(text.replace("\n", " ")) for name in part.split()}
    dtypes |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}

    known: list[Any] = [*CODECS.values(), *DELTAS.values()]
    assert codes == {
        *((codec.code, codec.name) for codec in known),
        *((layout.value, layout.name) for layout in Layout),
    }
    assert dtypes == set(ITEM_BYTES)


def scanned(data: bytes) -> list[IndexRow]:
    """Return the index of a pack as the page says that it is rebuilt."""
    rows, at = [], HEADER_BYTES
    while data[at : at + 4] == b"CHNK":
        body = at + CHUNK_HEADER_BYTES
        header = parse_chunk_header(data[at:body], where="scan")
        assert xxh3_64(data[body : body + header.stored_bytes]) == header.checksum
        rows.append(
            IndexRow(
                chunk_id=header.chunk_id,
                offset=at,
                stored_bytes=header.stored_bytes,
                raw_bytes=header.raw_bytes,
            )
        )
        at = body + header.stored_bytes
    return rows


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("packs/*/*.pack")), ids=lambda p: p.stem[:8])
def test_an_index_is_rebuilt_by_a_scan(path: Path) -> None:
    """Scanning a pack by the rules of the page gives its index, row by row."""
    data = path.read_bytes()
    offset, count, checksum = parse_trailer(data[-32:], pack_bytes=len(data), where="p")
    index = data[offset : offset + 48 * count]

    assert scanned(data) == parse_index(index, checksum=checksum, offset=offset, where="p")
