"""Logs that were lost or replaced under a store, and who saved in between."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import lifecycle_ops
from ckptstore.catalog.log import Build, Log
from ckptstore.errors import CorruptObjectError
from ckptstore.format.keys import commit_key
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend

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


def _replaced_trained(place: Path, note: str) -> Path:
    """Make a store of three versions; the sizes of its commits follow from the note."""
    with ckptstore.open(place, create=True) as store:
        for step in (1, 2, 3):
            store.run("gpt").save({"w": [1.0]}, step=step, metadata={"note": note})
    return place


def _last(place: Path) -> Path:
    return max((place / "commits").rglob("*.json"))


def _exchange(place: Path, other: Path) -> None:
    """Put another store's log in the place of one, as long as it."""
    assert _last(place).name == _last(other).name
    shutil.rmtree(place / "commits")
    shutil.copytree(other / "commits", place / "commits")  # times are those of the other


@pytest.mark.parametrize("note", ["mine", "of another length"])
def test_it_is_noticed_by_the_next_look(tmp_path: Path, note: str) -> None:
    """Another size, or the same and another time: nothing is read from it, nothing committed."""
    mine, other = (
        _replaced_trained(tmp_path / "mine", "mine"),
        _replaced_trained(tmp_path / "other", note),
    )
    with ckptstore.open(mine) as store:
        before = [version.id for version in store.versions()]
        _exchange(mine, other)
        for _ in range(2):
            with pytest.raises(CorruptObjectError, match="not the commit that was there") as caught:
                store.versions()
            assert "open it again" in caught.value.hint
        with pytest.raises(CorruptObjectError):
            store.run("gpt").save({"w": [2.0]}, step=4)
        assert store.resolve(f"#{before[0]}").step == 1  # what is known still resolves by id
    assert _last(mine).name == _last(other).name
    with ckptstore.open(mine) as store:
        assert [v.id for v in store.versions()] != before


def test_after_a_commit_of_its_own(tmp_path: Path) -> None:
    """No listing has told of that one yet: its size is known."""
    mine, other = tmp_path / "mine", _replaced_trained(tmp_path / "other", "longer than mine")
    with ckptstore.open(mine, create=True) as store:
        for step in (1, 2, 3):
            store.run("gpt").save({"w": [1.0]}, step=step, metadata={"note": "mine"})
        _exchange(mine, other)
        with pytest.raises(CorruptObjectError, match="not the commit that was there"):
            store.versions()


def test_the_same_commit_put_back(tmp_path: Path) -> None:
    """Restored by a person, or by a repair, with another time: nothing is wrong."""
    mine = _replaced_trained(tmp_path / "mine", "mine")
    with ckptstore.open(mine) as store:
        before = store.versions()
        for moment in (1_000_000_000, 1_100_000_000):
            os.utime(_last(mine), (moment, moment))
            assert store.versions() == before
        store.run("gpt").save({"w": [2.0]}, step=4)
        assert len(store.versions()) == 4


def test_damage_is_no_exchange(tmp_path: Path) -> None:
    """What is known stays readable; the damage is told by verify, and by whoever opens it anew."""
    mine = _replaced_trained(tmp_path / "mine", "mine")
    with ckptstore.open(mine) as store:
        before = store.versions()
        last = _last(mine)
        last.chmod(0o600)
        last.write_bytes(last.read_bytes()[:-20])
        assert store.versions() == before
        with pytest.raises(CorruptObjectError, match="cut off"):
            store.verify()


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "encrypted"])
def test_looking_costs_one_listing(tmp_path: Path, secret: bool) -> None:
    """Nothing is read again that did not change, after commits of its own and of others."""
    every, lists = Fault(at=0), Fault(calls=frozenset({"list"}), at=0)
    memory = MemoryBackend(f"log-cost/{tmp_path}/{secret}")
    key = b"\7" * 31 + b"\1" if secret else None
    if secret:
        place = tmp_path / "store"
        ckptstore.open(place, create=True, encryption_key=key).close()
        store = ckptstore.open(place, encryption_key=key)
        other = ckptstore.open(place, encryption_key=key)
    else:
        store = ckptstore.Store(create_on(FaultyBackend(memory, every, lists)))
        other = ckptstore.Store(create_on(memory, exist_ok=True))
    read = store.repo.log._reader.read
    numbers: list[int] = []

    def counted(number: int) -> object:
        numbers.append(number)
        return read(number)

    store.repo.log._reader.read = counted  # type: ignore[assignment, method-assign]
    for step in (1, 2, 3):
        store.run("gpt").save({"w": [1.0]}, step=step)
        store.versions()
    assert numbers == []
    other.run("vit").save({"w": [1.0]}, step=1)
    store.versions()
    seen = list(numbers)
    assert len(seen) == len(set(seen))
    for _ in range(3):
        store.versions()
    assert numbers == seen
    if not secret:
        before = every.seen, lists.seen
        store.repo.refresh()
        assert (every.seen - before[0], lists.seen - before[1]) == (1, 1)
    store.close()
    other.close()


Saving = Callable[..., Build]


@pytest.fixture
def logs(memory: MemoryBackend, environment: SimulatedEnvironment) -> tuple[Log, Log]:
    """Return the logs of two processes."""
    return Log(memory, environment, by="ann@a 1"), Log(memory, environment, by="bob@b 2")


def test_it_is_said_once_who_saved_in_between(
    logs: tuple[Log, Log], saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """The second save of a run after another's names that other; later ones are silent."""
    ann, bob = logs
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1))
        bob.append(saving("gpt", 2))  # continues a run: nothing strange about that
        bob.append(saving("gpt", 3))
        assert caplog.messages == []
        ann.append(saving("gpt", 4))
        assert len(caplog.messages) == 1
        assert "run gpt: bob@b 2 saved step 3 between two saves" in caplog.messages[0]
        bob.append(saving("gpt", 5))
        ann.append(saving("gpt", 6))

    assert len(caplog.messages) == 2, "each process says it once"
    assert "ann@a 1 saved step 4" in caplog.messages[1]


def test_who_saves_for_this_process_is_no_other(
    memory: MemoryBackend,
    environment: SimulatedEnvironment,
    saving: Saving,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that was befriended may save in between; a third one may not."""
    ann, child = (Log(memory, environment, by=f"ann@a {pid}") for pid in (1, 7))
    ann.others.befriend(7)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1))
        child.append(saving("gpt", 2))
        ann.append(saving("gpt", 3))
        assert caplog.messages == []
        Log(memory, environment, by="ann@b 7").append(saving("gpt", 4))
        ann.append(saving("gpt", 5))

    assert "ann@b 7 saved step 4" in caplog.messages[0]


def test_other_runs_and_rollbacks_are_nothing_strange(
    logs: tuple[Log, Log], saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither saves to another run, nor another's rollback of this one, are mistaken for it."""
    ann, bob = logs
    with caplog.at_level(logging.WARNING, "ckptstore"):
        ann.append(saving("gpt", 1, version="1" * 32))
        ann.append(saving("gpt", 2))
        bob.append(saving("lora", 1))
        bob.append(lambda now: lifecycle_ops.rollback(now, run="gpt", version="1" * 32))
        ann.append(saving("gpt", 3))

    assert caplog.messages == []
