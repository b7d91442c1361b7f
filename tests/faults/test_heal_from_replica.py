"""A damaged store is healed from its replica: every object, and it says what it did."""

from __future__ import annotations

import json
import random  # noqa: TID251 - seeded: which objects are hit
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from soaking import soak_rounds, soak_seed

import ckptstore

MAIN = "from ckptstore.cli.main import main; main()"
VERSIONS = 40
OBJECTS = 50
SOAKED = range(soak_seed(2), soak_seed(2) + soak_rounds(5))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a store of many versions in two runs, and its replica."""
    root = tmp_path_factory.mktemp("pair")
    torch.manual_seed(5)
    with ckptstore.open(root / "hot", create=True, chunk_bytes=65536) as hot:
        run = hot.run("gpt", metrics={"loss": "min"})
        state: dict[str, Any] = {
            "model": {"w": torch.randn(200, 200), "b": torch.randn(50)},
            "step": 0,
        }
        for step in range(VERSIONS):
            state["model"]["w"][step % 200] += 1
            state["step"] = step
            codec = "delta" if step % 3 == 0 else "auto"
            run.save(state, step=step, metrics={"loss": 1 / (step + 1)}, codec=codec)
        hot.fork("gpt@7", "ft", roles=["weights"])
        hot.replicate(root / "cold")
    return root / "hot", root / "cold"


def _damage(store: Path, seed: int, *, count: int = OBJECTS) -> Counter[str]:
    """Flip a bit of, or delete, many packs and manifests; return how many of each kind."""
    chance = random.Random(seed)
    objects = sorted((*store.glob("packs/*/*.pack"), *store.glob("manifests/*/*.manifest")))
    kinds: Counter[str] = Counter()
    for path in chance.sample(objects, count):
        path.chmod(0o644)
        if chance.random() < 0.5:
            path.unlink()
            kinds[f"{path.suffix} deleted"] += 1
            continue
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        kinds[f"{path.suffix} flipped"] += 1
    return kinds


def _copied(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of both stores, which may be harmed."""
    for store in pair:
        subprocess.run(["cp", "-r", store, tmp_path / store.name], check=True)
    return tmp_path / "hot", tmp_path / "cold"


def _healed(hot: Path, *replicas: Path, text: bool = False) -> tuple[int, Any]:
    """Run the command; return its exit code and what it said."""
    sources = [word for replica in replicas for word in ("--heal-from", str(replica))]
    form = [] if text else ["--json"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "verify", "--quiet", *form, *sources, "-s", hot],
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout[-2000:] + done.stderr[-2000:]
    said = done.stdout.decode()
    return done.returncode, said if text else json.loads(said)


def _assert_as_saved(hot: Path, source: Path, *, but: Collection[str] = ()) -> None:
    """Load all versions and compare them with what they were."""
    with ckptstore.open(source, read_only=True) as sound, ckptstore.open(hot) as store:
        assert {v.id for v in store.versions()} == {v.id for v in sound.versions()}
        for version in sound.versions():
            if version.id in but:
                with pytest.raises(ckptstore.CkptStoreError):
                    store.load(f"#{version.id}")
                continue
            meant, found = (each.load(f"#{version.id}")["model"] for each in (sound, store))
            assert all(torch.equal(found[name], tensor) for name, tensor in meant.items()), version


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in SOAKED)])
def test_fifty_damaged_objects_come_back(
    pair: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    """Verify --heal-from restores every one of 50 random objects; all versions load as before."""
    source, cold = pair
    hot = tmp_path / "hot"
    subprocess.run(["cp", "-r", source, hot], check=True)
    kinds = _damage(hot, seed)
    assert len(kinds) == 4, kinds  # packs and manifests, flipped and deleted
    assert _healed(hot)[0] == 5

    code, document = _healed(hot, cold)

    assert code == 0
    assert not document["ok"]
    (healed,) = document["healed"]
    assert healed["ok"]
    damaged = set(document["damaged_versions"])
    assert {found["version"] for found in healed["mended"]} == damaged
    assert not healed["lost"]

    assert sum(healed["pieces"].values()) > 0
    assert healed["written_bytes"] > 0
    _assert_as_saved(hot, source)
    assert _healed(hot, cold)[1]["ok"]


@pytest.mark.slow
def test_it_says_what_it_did(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The text names each version that was brought back, and where from."""
    hot, cold = _copied(pair, tmp_path)
    _damage(hot, 11)
    code, said = _healed(hot, cold, text=True)
    assert code == 0
    assert "mended" in said
    assert said.count("gpt@") > 20, said
    assert str(cold) in said


@pytest.mark.slow
def test_a_replica_that_keeps_less(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Of versions aged there what is left helps; what is lost is named, all else is as it was."""
    hot, cold = _copied(pair, tmp_path)
    with ckptstore.open(cold) as store:
        store.age(["gpt@3", "gpt@4", "gpt@5", "gpt@6"], "weights")
        store.age(["gpt@10", "gpt@11", "gpt@12", "gpt@13"], "record")
        store.gc(grace_s=0, orphan_age_s=0)
    _damage(hot, 12, count=60)
    code, document = _healed(hot, cold)
    (healed,) = document["healed"]
    lost = {one["version"]: set(one["tensors"]) for one in healed["lost"]}
    assert code == (5 if lost else 0)
    assert len(healed["mended"]) > len(lost)
    for one in healed["mended"]:  # perhaps in part
        assert not lost.get(one["version"], set()).intersection(one["tensors"])
    with ckptstore.open(hot, read_only=True) as store:
        steps = {version.step for version in store.versions() if version.id in lost}
    assert steps <= {3, 4, 5, 6, 10, 11, 12, 13}
    _assert_as_saved(hot, pair[0], but=lost)


@pytest.mark.slow
def test_a_replica_that_is_damaged_elsewhere(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Damage of the replica never travels; what both have lost is named, all else comes back.

    Of a second replica the rest comes.
    """
    hot, cold = _copied(pair, tmp_path)
    _damage(hot, 13)
    _damage(cold, 14, count=20)
    code, document = _healed(hot, cold)
    (healed,) = document["healed"]
    lost = {one["version"] for one in healed["lost"]}
    assert code == (5 if lost else 0)
    assert lost  # a seed with which both have lost something
    assert healed["mended"]
    _assert_as_saved(hot, pair[0], but=lost)

    code, document = _healed(hot, cold, pair[1])
    assert code == 0
    _assert_as_saved(hot, pair[0])
    with ckptstore.open(hot) as store:
        assert store.verify().ok


@pytest.mark.soak
def test_replicas_heal_each_other(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A replica mends the store, and the store then mends the replica: both are whole."""
    hot, cold = _copied(pair, tmp_path)
    _damage(hot, 15, count=30)
    assert _healed(hot, cold)[0] == 0
    _damage(cold, 16)
    assert _healed(cold, hot)[0] == 0
    for store in (hot, cold):
        _assert_as_saved(store, pair[0])
