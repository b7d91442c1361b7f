"""A damaged end of the log is waited for or set aside; a lost superblock is mended."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.log import Build
from ckptstore.config import Options
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import STORE_KEY, commit_key
from ckptstore.format.superblock import decode_superblock, encode_superblock
from ckptstore.maintenance.repair.fix_opening import mend_superblock
from ckptstore.repo import Finding, create_on, open_on

Damage = Callable[[Path], object]


def _other(make: Damage) -> Damage:
    """Return the damage that puts something else under the name."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def _as_the_one_before(path: Path) -> None:
    shutil.copy(path.with_name(f"{int(path.stem) - 1:012d}.json"), path)


DAMAGES: dict[str, Damage] = {
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": _flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "too long": lambda path: os.truncate(path, limits.COMMIT_BYTES_MAX + 1),
    "of another program": lambda path: path.write_bytes(b"\x7fELF" * 200),
    "of another number": _as_the_one_before,
    "a folder": _other(Path.mkdir),
    "a dangling link": _other(lambda path: path.symlink_to("/nonexistent/x")),
    "a link to a record": _other(
        lambda path: path.symlink_to(path.with_name("000000000001.json").resolve())
    ),
    "a pipe": _other(lambda path: os.mkfifo(path)),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a closed store of three versions, each with a commit."""
    monkeypatch.setattr(limits, "VISIBILITY_WAIT_MIN_S", 0.01)
    with ckptstore.open(tmp_path / "s", create=True) as store:
        for step in (1, 2, 3):
            store.run("r").save({"w": torch.full((4,), float(step))}, step=step)
    return tmp_path / "s"


def _steps(store: ckptstore.Store) -> list[int]:
    return [version.step for version in store.versions()]


def _check_goes_on(place: Path, steps: list[int]) -> None:
    """Hold that a store has these versions, is sound, and takes further ones."""
    with ckptstore.open(place) as store:
        assert _steps(store) == steps
        assert store.verify().ok
        assert store.repair().ok
        store.run("r").save({"w": torch.zeros(4)}, step=9)
    with ckptstore.open(place) as store:
        assert _steps(store) == [*steps, 9]
        assert [commit.body.previous for commit in store.log()][1:] == [
            commit.digest for commit in store.log()[:-1]
        ]


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.short("torn|folder")
def test_reading_goes_on_and_repair_mends(
    place: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Refs mean what precedes it, told once; writers and verify name the command that goes on."""
    last = place / commit_key(3)
    DAMAGES[kind](last)
    found = os.lstat(last)
    with (
        ckptstore.open(place, engine="thread") as store,
        caplog.at_level(logging.WARNING, "ckptstore"),
    ):
        for ref in ("r@latest-valid", "r@latest", "r@2"):
            assert int(store.load(ref)["w"][0]) == 2
        assert _steps(store) == [1, 2]
        assert len(store.log()) == 2
        assert [commit_key(3) in one.getMessage() for one in caplog.records] == [True]
        for write in (
            lambda: store.run("r").save({}, step=9),
            lambda: store.run("r").save_async({}, step=9).result(),
            lambda: store.tag("r@1", "t"),
            store.verify,
            store.gc,
        ):
            with pytest.raises(errors.CorruptObjectError, match=commit_key(3)) as caught:
                write()
            assert f"ckptstore repair --store {place}" in caught.value.hint
            assert "b'" not in str(caught.value)
        before = {path: os.lstat(path).st_mtime_ns for path in place.rglob("*")}
        planned = store.repair(dry_run=True)
        assert before == {path: os.lstat(path).st_mtime_ns for path in place.rglob("*")}
        report = store.repair()
        for one in (*planned.commits, *report.commits):
            assert (one.number, one.set_aside, one.mended) == (3, True, False)
        assert report.ok
    assert os.path.samestat(found, os.lstat(last))  # what was there is kept
    _check_goes_on(place, [1, 2])


@pytest.mark.parametrize("single_writer", [False, True])
@pytest.mark.parametrize("kind", ["empty", "flipped", "a folder"])
def test_a_copy_brings_back_what_the_record_held(
    place: Path, tmp_path: Path, kind: str, single_writer: bool
) -> None:
    """Proven by the digest in it, or by the manifest here that the copy's commit names."""
    shutil.copytree(place, tmp_path / "copy")
    DAMAGES[kind](place / commit_key(3))
    if single_writer and kind == "a folder":
        (place / commit_key(3)).rmdir()  # nothing can replace it; missing is no damage
        (place / commit_key(3)).write_bytes(b"")
    with ckptstore.open(place, single_writer=single_writer) as store:
        report = store.repair(tmp_path / "copy")
        assert [one.mended for one in report.commits] == [True]
        assert [one.set_aside for one in report.commits] == [not single_writer]
    _check_goes_on(place, [1, 2, 3])


def test_what_nothing_proves_is_neither_taken_nor_set_aside(place: Path, tmp_path: Path) -> None:
    """A tag that follows in a copy may be the lost commit or another; without the copy it goes."""
    with ckptstore.open(place) as store:
        store.tag("r@1", "good")
    shutil.copytree(place, tmp_path / "copy")
    DAMAGES["empty"](place / commit_key(4))
    with ckptstore.open(place) as store:
        report = store.repair(tmp_path / "copy")
        assert not report.ok
        assert "may be it" in report.commits[0].why
        assert store.repair().ok
    _check_goes_on(place, [1, 2, 3])


def test_several_records_are_set_aside_at_once(place: Path) -> None:
    """Whatever is damaged after the last sound one, and one that is missing between."""
    DAMAGES["empty"](place / commit_key(3))
    with ckptstore.open(place) as store:
        assert store.repair().ok
    for number, kind in ((3, None), (4, "torn"), (2, "zeroed")):  # 4 was the repair's
        if kind is None:
            (place / commit_key(number)).unlink()
        else:
            DAMAGES[kind](place / commit_key(number))
    with ckptstore.open(place) as store:
        assert _steps(store) == [1]
        assert store.repair().ok
    _check_goes_on(place, [1])


def test_a_snapshot_of_the_record_is_a_reason_to_wait(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows that others have read it: repair sets nothing aside until that is moved away."""
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 4)
    with ckptstore.open(place) as store:
        store.run("r").save({"w": torch.ones(4)}, step=4)
    DAMAGES["torn"](place / commit_key(4))
    snapshot = place / "snapshots/000000000004.snap"
    with ckptstore.open(place) as store:
        assert _steps(store) == [1, 2, 3]
        report = store.repair()
        assert not report.ok
        assert "snapshots/000000000004.snap shows" in report.commits[0].why
        snapshot.rename(place.parent / "away")
        assert store.repair().ok
    _check_goes_on(place, [1, 2, 3])


def test_who_had_read_it_stops(place: Path) -> None:
    """Its next save is refused, before the repair and after it; opened again it goes on."""
    with ckptstore.open(place) as knew, ckptstore.open(place) as other:
        assert _steps(knew) == _steps(other) == [1, 2, 3]
        DAMAGES["torn"](place / commit_key(3))
        assert _steps(knew) == [1, 2, 3]
        with pytest.raises(errors.CorruptObjectError, match="end of the log"):
            knew.run("r").save({}, step=4)
        with pytest.raises(errors.CommitConflictError, match="had read"):
            knew.repair()
        with ckptstore.open(place) as third:
            assert third.repair().ok
        for store in (knew, other):
            for call in (store.versions, lambda: store.run("r").save({}, step=4)):  # noqa: B023
                with pytest.raises(errors.CorruptObjectError, match="history was changed"):
                    call()
    _check_goes_on(place, [1, 2])


def test_who_goes_on_from_it_leaves_no_end_to_set_aside(place: Path, tmp_path: Path) -> None:
    """A sound record after a damaged one is history: nothing reads past it, a copy mends it."""
    with ckptstore.open(place) as store:
        store.tag("r@1", "t")
    shutil.copytree(place, tmp_path / "copy")
    DAMAGES["torn"](place / commit_key(3))
    with ckptstore.open(place) as store:
        for call in (store.versions, lambda: store.load("r@latest-valid"), store.verify):
            with pytest.raises(errors.CorruptObjectError, match=commit_key(3)):
                call()
        assert [one.set_aside for one in store.repair().commits] == [False]
    with ckptstore.open(place, single_writer=True) as store:
        assert store.repair(tmp_path / "copy").ok
    _check_goes_on(place, [1, 2, 3])


def test_a_record_that_proves_sound_later_stays_set_aside(place: Path) -> None:
    """A storage that showed it torn for a while: the log decides, for every reader alike."""
    last = place / commit_key(3)
    whole = last.read_bytes()
    DAMAGES["torn"](last)
    with ckptstore.open(place) as store:
        assert store.repair().ok
    last.write_bytes(whole)
    _check_goes_on(place, [1, 2])
    last.unlink()
    with ckptstore.open(place) as store:
        assert _steps(store) == [1, 2, 9]
        assert store.verify().ok


def test_a_record_of_another_history_is_no_damage(place: Path, tmp_path: Path) -> None:
    """It is whole and follows something else: nothing reads past it, and repair says why not."""
    with ckptstore.open(tmp_path / "o", create=True) as other:
        for step in (1, 2, 3):
            other.run("r").save({"w": torch.zeros(4)}, step=step)
    shutil.copy(tmp_path / "o" / commit_key(3), place / commit_key(3))
    with ckptstore.open(place) as store:
        for call in (store.versions, store.repair, store.verify):
            with pytest.raises(errors.CkptStoreError, match="history was changed"):
                call()


CHUNK_BYTES = 1 << 17


@pytest.fixture
def superblock_place(tmp_path: Path) -> Path:
    """Return a store with two versions, closed."""
    with ckptstore.open(tmp_path / "s", create=True, chunk_bytes=CHUNK_BYTES) as store:
        for step in (1, 2):
            store.run("r").save({"x": torch.full((50_000,), float(step))}, step=step)
    return tmp_path / "s"


def superblock(place: Path) -> dict[str, object]:
    """Return what ``store.json`` says."""
    body: dict[str, object] = json.loads((place / STORE_KEY).read_bytes())["body"]
    return body


def test_a_missing_one_is_made_from_what_is_there(superblock_place: Path) -> None:
    """Chunk size and time come back, the storage is asked, the id is new; everything loads."""
    before = superblock(superblock_place)
    (superblock_place / STORE_KEY).unlink()
    with pytest.raises(errors.StoreNotFoundError, match=r"but no store\.json .* ckptstore repair"):
        ckptstore.open(superblock_place)
    dry = ckptstore.mend_superblock(superblock_place, dry_run=True)
    assert not (superblock_place / STORE_KEY).exists()
    found = ckptstore.mend_superblock(superblock_place)

    assert found == dry
    assert found is not None
    assert (found.what, found.mended, found.source) == ("missing", True, "rebuilt")
    assert found.new == ("store_id", "by")
    after = superblock(superblock_place)
    assert after["chunk_bytes"] == CHUNK_BYTES
    assert after["put_if_absent"] == "atomic"
    assert after["probe"]
    assert after["store_id"] != before["store_id"]
    with ckptstore.open(superblock_place) as store:
        assert store.verify().ok
        assert store.load("r@1")["x"][0] == 1
        store.run("r").save({"x": torch.ones(3)}, step=3)
    assert ckptstore.mend_superblock(superblock_place) is None


def test_forks_from_other_stores_do_not_say_the_size_of_chunks(superblock_place: Path) -> None:
    """Only versions that were saved here do, however many newer ones came from elsewhere."""
    with (
        ckptstore.open(
            superblock_place.parent / "a", create=True, chunk_bytes=CHUNK_BYTES * 4
        ) as other,
        ckptstore.open(superblock_place) as store,
    ):
        other.run("x").save({"x": torch.ones(5)}, step=1)
        for name in ("one", "two", "three"):
            other.fork("x@1", name, store=store)
    (superblock_place / STORE_KEY).unlink()
    found = ckptstore.mend_superblock(superblock_place)

    assert found is not None
    assert found.new == ("store_id", "by")
    assert superblock(superblock_place)["chunk_bytes"] == CHUNK_BYTES


def test_a_size_of_chunks_that_is_a_guess_is_said_to_be_one(superblock_place: Path) -> None:
    """Where manifests disagree, or all came from elsewhere: among the new, with the candidates."""
    path = superblock_place / STORE_KEY
    said = decode_superblock(path.read_bytes(), where=STORE_KEY)
    path.unlink()
    path.write_bytes(encode_superblock(msgspec.structs.replace(said, chunk_bytes=CHUNK_BYTES * 2)))
    with ckptstore.open(superblock_place) as store:
        store.run("r").save({"x": torch.ones(5)}, step=3)
    path.unlink()
    found = ckptstore.mend_superblock(superblock_place)
    assert found is not None
    assert found.new == ("store_id", "by", "chunk_bytes")
    assert f"saved here say {CHUNK_BYTES} (2), {CHUNK_BYTES * 2} (1)" in found.why
    assert superblock(superblock_place)["chunk_bytes"] == CHUNK_BYTES

    with (
        ckptstore.open(superblock_place.parent / "b", create=True) as target,
        ckptstore.open(superblock_place) as store,
    ):
        store.fork("r@3", "fork", store=target)
    (superblock_place.parent / "b" / STORE_KEY).unlink()
    found = ckptstore.mend_superblock(superblock_place.parent / "b")
    assert found is not None
    assert found.new == ("store_id", "by", "chunk_bytes")
    assert f"from other stores, and there are no others, say {CHUNK_BYTES * 2} (1)" in found.why


def test_a_copy_of_the_store_brings_all_of_it_back(superblock_place: Path) -> None:
    """With the id; a second store with another log is not taken for a copy."""
    before = superblock(superblock_place)
    copy, other = superblock_place.parent / "copy", superblock_place.parent / "other"
    shutil.copytree(superblock_place, copy)
    (superblock_place / STORE_KEY).unlink()
    with ckptstore.open(other, create=True) as store:
        store.run("r").save({"x": torch.ones(3)}, step=1)
        found = ckptstore.mend_superblock(superblock_place, source=store, dry_run=True)
    assert found is not None
    assert found.source == "rebuilt"
    with ckptstore.open(copy, read_only=True) as store:
        found = ckptstore.mend_superblock(superblock_place, source=store)

    assert found is not None
    assert (found.source, found.new) == ("copy", ())
    same = ("store_id", "created_at_ms", "chunk_bytes", "by")
    assert [superblock(superblock_place)[name] for name in same] == [before[name] for name in same]


def test_a_damaged_one_is_replaced_for_who_vouches(superblock_place: Path) -> None:
    """Its name is taken; only a single writer may have it replaced."""
    path = superblock_place / STORE_KEY
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(errors.CorruptObjectError, match="ckptstore repair --single-writer"):
        ckptstore.open(superblock_place)
    found = ckptstore.mend_superblock(superblock_place)

    assert found is not None
    assert (found.what, found.mended) == ("damaged", False)
    assert path.read_bytes() == data
    found = ckptstore.mend_superblock(superblock_place, single_writer=True)
    assert found is not None
    assert found.mended
    with ckptstore.open(superblock_place) as store:
        assert store.verify().ok


def test_what_cannot_be_had_is_named(superblock_place: Path) -> None:
    """Without the first commit the time is new, without any manifest the size of chunks."""
    (superblock_place / STORE_KEY).unlink()
    (superblock_place / commit_key(1)).unlink()
    shutil.rmtree(superblock_place / "manifests")
    found = ckptstore.mend_superblock(superblock_place)
    assert found is not None
    assert found.new == ("store_id", "by", "created_at_ms", "chunk_bytes")


def test_nothing_is_made_where_there_was_no_store(tmp_path: Path, superblock_place: Path) -> None:
    """An empty place is no store; nor is one with a damaged ``store.json`` and nothing else."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.StoreNotFoundError, match="ckptstore init"):
        ckptstore.mend_superblock(tmp_path / "empty")
    (tmp_path / "empty" / STORE_KEY).write_bytes(b"{}")
    with pytest.raises(errors.CorruptObjectError, match="no commit"):
        ckptstore.mend_superblock(tmp_path / "empty", single_writer=True)
    shutil.rmtree(superblock_place / "commits")
    (superblock_place / STORE_KEY).unlink()
    with pytest.raises(errors.StoreNotFoundError, match="restore commits/"):
        ckptstore.mend_superblock(superblock_place)
    assert not (superblock_place / STORE_KEY).exists()


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
    with pytest.raises(errors.UnsafeBackendError):
        mend_superblock(memory, prober=careless)
    found = mend_superblock(memory, options=alone, prober=careless)
    assert found is not None
    with open_on(memory, prober=careless) as repo:
        assert repo.superblock.put_if_absent == "ignored"
        assert repo.superblock.single_writer
        body = {**msgspec.to_builtins(repo.superblock), "format": 99}
    memory.put(STORE_KEY, encode_envelope(msgspec.json.encode(body)))
    with pytest.raises(errors.UnsupportedFeatureError):
        mend_superblock(memory, options=alone, prober=careless)
