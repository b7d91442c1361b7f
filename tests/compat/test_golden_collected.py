"""The golden store with a reference record, which must be read as it is for ever."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from goldenkit import copied, golden, sizes

import ckptstore
from ckptstore.backends.posix import PosixBackend
from ckptstore.format.references import References, decode_references

GOLDEN = golden("v1-collected")
FILES = {
    "commits/000000/000000000001.json": 987,
    "commits/000000/000000000002.json": 1038,
    "commits/000000/000000000003.json": 1038,
    "commits/000000/000000000004.json": 390,
    "commits/000000/000000000005.json": 446,
    "commits/000000/000000000006.json": 444,
    "manifests/67/67dadaa22f5b55be6fb64abb00bd71c9.manifest": 349,
    "manifests/cc/cc844175ade6ac8532c8a4746d072cf8.manifest": 349,
    "packs/80/80148053d0be917e5e55800f05b10569.pack": 336,
    "packs/a8/a876df36c75f22df3d2c5dd199074c71.pack": 335,
    "references/000000000006-35ae7bc3.refs": 182,
    "snapshots/000000000004.snap": 759,
    "store.json": 360,
}
(RECORD,) = (name for name in FILES if name.startswith("references/"))


def test_every_file_of_the_golden_store_is_there() -> None:
    """A missing, added or changed fixture is a failure: it must be read as it was written."""
    assert sizes(GOLDEN) == FILES


def test_the_record() -> None:
    """Digests of the two live manifests, and the packs that they name."""
    with ckptstore.open(GOLDEN, read_only=True) as store:
        digests = [version.manifest_digest for version in store.versions()]
    # All of a pack is live, but for its header and its trailer.
    packs = {name[9:41]: size - 64 for name, size in FILES.items() if name.startswith("packs/")}
    found = decode_references((GOLDEN / RECORD).read_bytes(), where=RECORD)
    assert found == References(
        manifests=frozenset(map(bytes.fromhex, digests)), packs=packs, deltas_settled=True
    )


def test_a_collection_believes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No manifest is read where it is, all are where it is not; nothing changes."""
    read: list[str] = []
    plain = PosixBackend.get

    def get(self: PosixBackend, key: str, *, bytes_max: int) -> bytes:
        read.append(key)
        return plain(self, key, bytes_max=bytes_max)

    monkeypatch.setattr(PosixBackend, "get", get)
    for without, count in (((), 0), (("*.refs",), 2)):
        place = copied(GOLDEN, tmp_path / f"copy-{count}", without=without)
        with ckptstore.open(place) as store:
            read.clear()
            report = store.gc(grace_s=0, orphan_age_s=0)
        assert not report.condemned["packs"].count
        assert sum(key.startswith("manifests/") for key in read) == count
        apart = {name: size for name, size in FILES.items() if name != RECORD}
        assert apart.items() <= sizes(place).items()
        ours = [name for name in sizes(place) if not name.startswith(".")]
        assert len(ours) == len(FILES)


def test_the_single_file_reads_it_too(reader: ModuleType) -> None:
    """The reader of docs/reference passes over the record."""
    assert reader.restore(GOLDEN, "gpt")["model.w"][:3].tolist() == [2.0, 3.0, 4.0]
