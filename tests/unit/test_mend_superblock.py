"""A store whose ``store.json`` is gone or damaged: brought back, or said why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import ckptstore
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.log import Build
from ckptstore.config import Options
from ckptstore.errors import (
    CorruptObjectError,
    StoreNotFoundError,
    UnsafeBackendError,
    UnsupportedFeatureError,
)
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import STORE_KEY, commit_key
from ckptstore.format.superblock import decode_superblock, encode_superblock
from ckptstore.maintenance.repair.fix_superblock import mend_superblock
from ckptstore.repo import Finding, create_on, open_on

CHUNK_BYTES = 1 << 17


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a store with two versions, closed."""
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=CHUNK_BYTES) as store:
        for step in (1, 2):
            store.run("r").save({"x": torch.full((50_000,), float(step))}, step=step)
    return tmp_path / "s"


def superblock(place: Path) -> dict[str, object]:
    """Return what ``store.json`` says."""
    body: dict[str, object] = json.loads((place / STORE_KEY).read_bytes())["body"]
    return body


def test_a_missing_one_is_made_from_what_is_there(place: Path) -> None:
    """Chunk size and time come back, the storage is asked, the id is new; everything loads."""
    before = superblock(place)
    (place / STORE_KEY).unlink()
    with pytest.raises(StoreNotFoundError, match=r"but no store\.json .* ckptstore repair"):
        ckptstore.open(place)
    dry = ckptstore.mend_superblock(place, dry_run=True)
    assert not (place / STORE_KEY).exists()
    found = ckptstore.mend_superblock(place)

    assert found == dry
    assert found is not None
    assert (found.what, found.mended, found.source) == ("missing", True, "rebuilt")
    assert found.new == ("store_id", "by")
    after = superblock(place)
    assert after["chunk_bytes"] == CHUNK_BYTES
    assert after["put_if_absent"] == "atomic"
    assert after["probe"]
    assert after["store_id"] != before["store_id"]
    with ckptstore.open(place) as store:
        assert store.verify().ok
        assert store.load("r@1")["x"][0] == 1
        store.run("r").save({"x": torch.ones(3)}, step=3)
    assert ckptstore.mend_superblock(place) is None


def test_forks_from_other_stores_do_not_say_the_size_of_chunks(place: Path) -> None:
    """Only versions that were saved here do, however many newer ones came from elsewhere."""
    with (
        ckptstore.open(place.parent / "a", create=True, chunk_bytes=CHUNK_BYTES * 4) as other,
        ckptstore.open(place) as store,
    ):
        other.run("x").save({"x": torch.ones(5)}, step=1)
        for name in ("one", "two", "three"):
            other.fork("x@1", name, store=store)
    (place / STORE_KEY).unlink()
    found = ckptstore.mend_superblock(place)

    assert found is not None
    assert found.new == ("store_id", "by")
    assert superblock(place)["chunk_bytes"] == CHUNK_BYTES


def test_a_size_of_chunks_that_is_a_guess_is_said_to_be_one(place: Path) -> None:
    """Where manifests disagree, or all came from elsewhere: among the new, with the candidates."""
    path = place / STORE_KEY
    said = decode_superblock(path.read_bytes(), where=STORE_KEY)
    path.unlink()
    path.write_bytes(encode_superblock(msgspec.structs.replace(said, chunk_bytes=CHUNK_BYTES * 2)))
    with ckptstore.open(place) as store:
        store.run("r").save({"x": torch.ones(5)}, step=3)
    path.unlink()
    found = ckptstore.mend_superblock(place)
    assert found is not None
    assert found.new == ("store_id", "by", "chunk_bytes")
    assert f"saved here say {CHUNK_BYTES} (2), {CHUNK_BYTES * 2} (1)" in found.why
    assert superblock(place)["chunk_bytes"] == CHUNK_BYTES

    with ckptstore.open(place.parent / "b", create=True) as target, ckptstore.open(place) as store:
        store.fork("r@3", "fork", store=target)
    (place.parent / "b" / STORE_KEY).unlink()
    found = ckptstore.mend_superblock(place.parent / "b")
    assert found is not None
    assert found.new == ("store_id", "by", "chunk_bytes")
    assert f"from other stores, and there are no others, say {CHUNK_BYTES * 2} (1)" in found.why


def test_a_copy_of_the_store_brings_all_of_it_back(place: Path) -> None:
    """With the id; a second store with another log is not taken for a copy."""
    before = superblock(place)
    copy, other = place.parent / "copy", place.parent / "other"
    shutil.copytree(place, copy)
    (place / STORE_KEY).unlink()
    with ckptstore.open(other, create=True) as store:
        store.run("r").save({"x": torch.ones(3)}, step=1)
        found = ckptstore.mend_superblock(place, source=store, dry_run=True)
    assert found is not None
    assert found.source == "rebuilt"
    with ckptstore.open(copy, read_only=True) as store:
        found = ckptstore.mend_superblock(place, source=store)

    assert found is not None
    assert (found.source, found.new) == ("copy", ())
    same = ("store_id", "created_at_ms", "chunk_bytes", "by")
    assert [superblock(place)[name] for name in same] == [before[name] for name in same]


def test_a_damaged_one_is_replaced_for_who_vouches(place: Path) -> None:
    """Its name is taken; only a single writer may have it replaced."""
    path = place / STORE_KEY
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CorruptObjectError, match="ckptstore repair --single-writer"):
        ckptstore.open(place)
    found = ckptstore.mend_superblock(place)

    assert found is not None
    assert (found.what, found.mended) == ("damaged", False)
    assert path.read_bytes() == data
    found = ckptstore.mend_superblock(place, single_writer=True)
    assert found is not None
    assert found.mended
    with ckptstore.open(place) as store:
        assert store.verify().ok


def test_what_cannot_be_had_is_named(place: Path) -> None:
    """Without the first commit the time is new, without any manifest the size of chunks."""
    (place / STORE_KEY).unlink()
    (place / commit_key(1)).unlink()
    shutil.rmtree(place / "manifests")
    found = ckptstore.mend_superblock(place)
    assert found is not None
    assert found.new == ("store_id", "by", "created_at_ms", "chunk_bytes")


def test_nothing_is_made_where_there_was_no_store(tmp_path: Path, place: Path) -> None:
    """An empty place is no store; nor is one with a damaged ``store.json`` and nothing else."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFoundError, match="ckptstore init"):
        ckptstore.mend_superblock(tmp_path / "empty")
    (tmp_path / "empty" / STORE_KEY).write_bytes(b"{}")
    with pytest.raises(CorruptObjectError, match="no commit"):
        ckptstore.mend_superblock(tmp_path / "empty", single_writer=True)
    shutil.rmtree(place / "commits")
    (place / STORE_KEY).unlink()
    with pytest.raises(StoreNotFoundError, match="restore commits/"):
        ckptstore.mend_superblock(place)
    assert not (place / STORE_KEY).exists()


def test_storage_without_put_if_absent_needs_a_single_writer(
    memory: MemoryBackend, saving: Callable[..., Build]
) -> None:
    """As for a new store. A superblock that a newer version wrote is no damage."""

    def careless(*_: object) -> Finding:
        return Finding(put_if_absent=PutIfAbsent.IGNORED, report={"x": 1})

    alone = Options(single_writer=True)
    with create_on(memory, options=alone, prober=careless) as repo:
        repo.log.append(saving())
    memory.delete(STORE_KEY)
    with pytest.raises(UnsafeBackendError):
        mend_superblock(memory, prober=careless)
    found = mend_superblock(memory, options=alone, prober=careless)
    assert found is not None
    with open_on(memory, prober=careless) as repo:
        assert repo.superblock.put_if_absent == "ignored"
        assert repo.superblock.single_writer
        body = {**msgspec.to_builtins(repo.superblock), "format": 99}
    memory.put(STORE_KEY, encode_envelope(msgspec.json.encode(body)))
    with pytest.raises(UnsupportedFeatureError):
        mend_superblock(memory, options=alone, prober=careless)
