"""Damage that is known stays known until all of it was read; what others do meanwhile is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import VersionNotFoundError
from ckptstore.events import Progress
from ckptstore.format.keys import pack_key
from ckptstore.model import Version
from ckptstore.store import Store

_ELEMENTS = 300_000


class _StoppedError(Exception):
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the location of a new store."""
    ckptstore.open(tmp_path / "s", create=True).close()
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """Return that store, open."""
    with ckptstore.open(path) as opened:
        yield opened


def _random(seed: int, count: int = _ELEMENTS) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _pack(store: Store, version: Version, index: int, path: Path) -> tuple[Path, int]:
    """Return the file that holds the first piece of a tensor, and where it begins there."""
    manifest = store.repo.manifests.load(version)
    table, row = manifest.pieces, manifest.first[index]
    return path / pack_key(table.packs[int(table.pack[row])]), int(table.offset[row])


def _rot(place: tuple[Path, int]) -> None:
    file, offset = place
    data = bytearray(file.read_bytes())
    data[offset + 5000] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def _is_damaged(store: Store, version: Version) -> bool:
    return store.repo.refresh().version(version.id).damaged


def test_a_repair_that_reads_no_chunk_clears_no_mark(path: Path, tmp_path: Path) -> None:
    """It brings a lost pack back, and says nothing of a rotten one: nothing is shared with that."""
    kept = _random(1)
    with ckptstore.open(path) as store:
        run = store.run("r")
        run.save({"a": kept}, step=1)
        version = run.save({"a": kept, "b": _random(2)}, step=2)
        store.remove(["r@1"])
        rotten, (lost, _) = (_pack(store, version, index, path) for index in range(2))
    shutil.copytree(path, tmp_path / "copy")
    _rot(rotten)
    lost.unlink()
    with ckptstore.open(path) as store, ckptstore.open(tmp_path / "copy") as copy:
        assert not store.repair().ok
        assert [one.tensors for one in store.repair(source=copy, level="records").mended] == [
            ("b",)
        ]
        assert _is_damaged(store, version)
        run = store.run("r")
        run.save({"a": kept, "b": _random(3)}, step=3)
        assert torch.equal(run.load("latest")["a"], kept)
        assert store.repair(source=copy).ok
        assert not _is_damaged(store, version)


def test_a_check_that_goes_on_reads_damaged_versions_again(
    store: Store, path: Path, tmp_path: Path
) -> None:
    """What it found before a repair put a version into quarantine says nothing of it."""
    run, kept, state = store.run("r"), _random(1), tmp_path / "state"
    version = run.save({"a": kept}, step=1)
    store.run("z").save({"t": _random(2)}, step=1)

    def stop(seen: Progress) -> None:
        if seen.done > 4 * _ELEMENTS:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        store.verify(resume=state, record=True, progress=stop)
    assert state.read_bytes().count(b"\n") >= 2
    _rot(_pack(store, version, 0, path))
    assert not store.repair().ok
    report = store.verify(resume=state, record=True)
    assert (report.ok, len(report.recorded)) == (False, 1)
    assert _is_damaged(store, version)
    run.save({"a": kept, "n": 2}, step=2)
    assert torch.equal(run.load("latest")["a"], kept)


def test_damage_found_during_a_check_is_not_recorded_as_sound(store: Store, path: Path) -> None:
    """A check that read a version before another found it rotten leaves the mark."""
    version = store.run("r").save({"a": _random(1)}, step=1)

    def rot_at_the_end(seen: Progress) -> None:
        """Have another process find damage once every byte was read."""
        if seen.done >= seen.total and not _is_damaged(store, version):
            _rot(_pack(store, version, 0, path))
            with ckptstore.open(path) as other:
                assert not other.repair().ok

    report = store.verify(record=True, progress=rot_at_the_end)
    assert (report.ok, report.recorded) == (True, ())
    assert _is_damaged(store, version)
    assert not store.verify(record=True).ok
    assert _is_damaged(store, version)


def test_packs_of_damaged_versions_are_not_copied_again_and_again(store: Store, path: Path) -> None:
    """They are not relocated, so that a copy would be of no use; a dry run says the same."""
    run = store.run("r")
    big = {f"t{number}": _random(number) for number in range(4)}
    run.save(big, step=1)
    version = run.save({"t0": big["t0"], "x": _random(7)}, step=2)
    run.save({"t0": big["t0"], "y": _random(8)}, step=3)
    _pack(store, version, 1, path)[0].unlink()
    assert not store.repair().ok
    store.remove(["r@1"])
    sizes = set()
    for _ in range(3):
        foreseen, done = store.gc(dry_run=True, grace_s=0.0), store.gc(grace_s=0.0)
        assert (foreseen.repacked.packs_count, done.repacked.packs_count) == (0, 0)
        sizes.add(sum(file.stat().st_size for file in (path / "packs").rglob("*.pack")))
    assert len(sizes) == 1
    run.load(3)


def test_a_rotten_pack_leaves_no_copies(store: Store, path: Path) -> None:
    """A sparse pack with damage that nobody knows of stays; what was copied of it goes again."""
    run = store.run("r")
    big = {f"t{number}": _random(number) for number in range(6)}
    run.save(big, step=1)
    version = run.save({name: big[name] for name in ("t0", "t5")}, step=2)
    places = [_pack(store, version, index, path) for index in range(2)]
    _rot(max(places, key=lambda place: place[1]))
    store.remove(["r@1"])
    before = sorted((path / "packs").rglob("*.pack"))
    for _ in range(2):
        report = store.gc(grace_s=0.0)
        assert "stays as it is" in report.repacked.skipped[0]
        assert sorted((path / "packs").rglob("*.pack")) == before
    assert not store.verify().ok


def test_a_second_collection_is_foreseen(store: Store) -> None:
    """A dry run that would rewrite a pack says when the old one goes."""
    run = store.run("r")
    big = {f"t{number}": _random(number) for number in range(4)}
    run.save(big, step=1)
    run.save({"t0": big["t0"], "x": 1}, step=2)
    store.remove(["r@1"])
    store.gc(grace_s=0.0, repack_below=None)
    foreseen, done = store.gc(dry_run=True), store.gc()
    assert foreseen.repacked.packs_count == done.repacked.packs_count == 1
    assert (foreseen.again_s > 0, done.again_s > 0) == (True, True)


def test_snapshots_that_go_meanwhile_are_no_damage(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy store prunes those that a check has listed while it reads the log."""
    run = store.run("r")
    run.save({"a": torch.zeros(4)}, step=1)
    for number in range(210):
        run.annotate(1, {"m": float(number)})
    real = store.repo.log.commits

    def commits(**words: Any) -> Iterator[Any]:  # noqa: ANN401 - as it is
        yield from real(**words)
        with ckptstore.open(path) as other:
            for number in range(250):
                other.run("r").annotate(1, {"m": float(number)})

    monkeypatch.setattr(store.repo.log, "commits", commits)
    report = store.verify()
    assert (report.ok, report.problems) == (True, ())


@pytest.mark.parametrize("check", ["verify", "repair"])
def test_versions_that_go_meanwhile_are_not_lost(store: Store, path: Path, check: str) -> None:
    """Somebody deleted them, and a collection was there before the check."""
    for step in range(5):
        store.run("r").save({"t": _random(step, 100_000)}, step=step)
    gone: list[bool] = []

    def remove(seen: Progress) -> None:
        if seen.stage == "verify" and not gone:
            gone.append(True)
            with ckptstore.open(path) as other:
                other.remove(["r@2", "r@3"])
                other.gc(grace_s=0.0)

    work: Callable[..., Any] = getattr(store, check)
    report = work(progress=remove)
    assert gone
    assert report.ok
    assert not (report.problems if check == "verify" else report.lost)
    with pytest.raises(VersionNotFoundError):
        store.resolve("r@2")
