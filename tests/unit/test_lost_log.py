"""A log that lost its end, or all of it: nothing is collected, and verify says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import CorruptObjectError
from ckptstore.format.keys import commit_key

_ZERO = {"grace_s": 0.0, "orphan_age_s": 0.0}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a store of thirty versions, closed."""
    return _trained(tmp_path / "s", 30)


def _trained(place: Path, count: int) -> Path:
    with ckptstore.open(place, create=True) as store:
        for step in range(count):
            store.run("r").save({"x": torch.full((50,), float(step))}, step=step)
    return place


def _objects(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("count", "kept", "ages"), [(30, 0, _ZERO), (30, 5, _ZERO), (30, 5, {}), (3, 0, {}), (1, 0, {})]
)
def test_objects_of_lost_commits_are_not_collected(
    tmp_path: Path, count: int, kept: int, ages: dict[str, Any]
) -> None:
    """Collection refuses and deletes nothing; with the commits back, every version loads.

    Without any commit one old manifest is enough, at the ages that are the default.
    """
    place = _trained(tmp_path / "s", count)
    away = place.parent / "away"
    shutil.copytree(place / "commits", away)
    for number in range(kept + 1, count + 1):
        (place / commit_key(number)).unlink()
    before = _objects(place)
    for path in before:
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10 * 86_400))
    with ckptstore.open(place) as store:
        for dry_run in (True, False):
            with pytest.raises(CorruptObjectError, match="commits seem to be lost"):
                store.gc(**ages, dry_run=dry_run)
        report = store.verify()

    assert not report.ok
    assert "commits seem to be lost" in report.problems[-1].message
    assert before == _objects(place)
    shutil.copytree(away, place / "commits", dirs_exist_ok=True)
    with ckptstore.open(place) as store:
        assert store.verify().ok
        assert len(store.versions()) == count


@pytest.mark.parametrize("kept", [0, 5])
@pytest.mark.short(sample=1)
def test_repair_says_what_verify_says(place: Path, kept: int) -> None:
    """Commits that nothing can bring back are no "no damage"; the hint's way brings versions."""
    with ckptstore.open(place) as store:
        store.replicate(place.parent / "cold")
    for number in range(kept + 1, 32):  # one more than saves: what has a replica is noted
        (place / commit_key(number)).unlink()
    with ckptstore.open(place) as store:
        for dry_run in (True, False):
            report = store.repair(place.parent / "cold", dry_run=dry_run)
            assert not report.ok
            assert report.commits_lost.startswith("commits seem to be lost: ")
            assert "ckptstore replicate" in report.commits_lost
            assert report.problems[-1].message in report.commits_lost
    with ckptstore.open(place.parent / "cold") as cold:
        cold.replicate(place)
    with ckptstore.open(place) as store:
        assert len(store.versions()) == 30
        assert all(int(store.load(f"r@{step}")["x"][0]) == step for step in range(30))


def test_it_can_be_forced(place: Path) -> None:
    """Whoever knows that the objects are of no use can have them collected."""
    shutil.rmtree(place / "commits")
    with ckptstore.open(place) as store:
        report = store.gc(grace_s=0, orphan_age_s=0, force=True)

    assert report.condemned["manifests"].count == 30
    assert not list(place.rglob("*.pack"))


def test_a_save_that_died_before_its_commit_is_no_lost_log(place: Path) -> None:
    """One manifest without a commit, in a store with versions, is collected as ever."""
    manifest = next(place.rglob("*.manifest"))
    stray = place / "manifests" / "ab" / f"{'ab' * 16}.manifest"
    stray.parent.mkdir(exist_ok=True)
    shutil.copy(manifest, stray)
    with ckptstore.open(place) as store:
        assert store.verify().ok
        report = store.gc(grace_s=0, orphan_age_s=0)

    assert report.condemned["manifests"].count == 1
    assert not stray.exists()


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_many_saves_that_died_are_no_lost_log(place: Path, together: bool) -> None:
    """Manifests of unknown versions are collected if commits came between them, else refused."""
    with ckptstore.open(place.parent / "other", create=True) as other:
        for step in range(24):
            other.run("x").save({"x": torch.full((50,), -1.0 - step)}, step=step)
    commits = sorted((place / "commits").rglob("*.json"))
    for number, commit in enumerate(commits):
        os.utime(commit, (10_000 + number, 10_000 + number))
    for number, manifest in enumerate(sorted((place.parent / "other").rglob("*.manifest"))):
        stray = place / "manifests" / manifest.parent.name / manifest.name
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(manifest, stray)
        at = 10_010.5 if together else 10_000.5 + number % 20
        os.utime(stray, (at, at))
    with ckptstore.open(place) as store:
        if together:
            with pytest.raises(CorruptObjectError, match=r"24 manifests .* no commit between"):
                store.gc(grace_s=0, orphan_age_s=0)
        else:
            assert store.verify().ok
            assert store.gc(grace_s=0, orphan_age_s=0).condemned["manifests"].count == 24


def test_a_repack_that_died_before_its_commit_is_no_lost_log(place: Path) -> None:
    """Many manifests without a commit, of versions that the log knows, are collected as ever."""
    manifest = next(place.rglob("*.manifest"))
    for number in range(40):
        stray = place / "manifests" / "ab" / f"ab{number:030x}.manifest"
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(manifest, stray)
    with ckptstore.open(place) as store:
        assert store.verify().ok
        report = store.gc(grace_s=0, orphan_age_s=0)

    assert report.condemned["manifests"].count == 40
    with ckptstore.open(place) as store:
        assert store.verify().ok
        assert len(store.versions()) == 30
