"""A log that was exchanged for another of the same length, under a process that has it open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CorruptObjectError
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend


def _trained(place: Path, note: str) -> Path:
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
    mine, other = _trained(tmp_path / "mine", "mine"), _trained(tmp_path / "other", note)
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
    mine, other = tmp_path / "mine", _trained(tmp_path / "other", "longer than mine")
    with ckptstore.open(mine, create=True) as store:
        for step in (1, 2, 3):
            store.run("gpt").save({"w": [1.0]}, step=step, metadata={"note": "mine"})
        _exchange(mine, other)
        with pytest.raises(CorruptObjectError, match="not the commit that was there"):
            store.versions()


def test_the_same_commit_put_back(tmp_path: Path) -> None:
    """Restored by a person, or by a repair, with another time: nothing is wrong."""
    mine = _trained(tmp_path / "mine", "mine")
    with ckptstore.open(mine) as store:
        before = store.versions()
        for moment in (1_000_000_000, 1_100_000_000):
            os.utime(_last(mine), (moment, moment))
            assert store.versions() == before
        store.run("gpt").save({"w": [2.0]}, step=4)
        assert len(store.versions()) == 4


def test_damage_is_no_exchange(tmp_path: Path) -> None:
    """What is known stays readable; the damage is told by verify, and by whoever opens it anew."""
    mine = _trained(tmp_path / "mine", "mine")
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
