"""A damaged store is healed from its replica: every object, and it says what it did."""

from __future__ import annotations

import json
import random  # noqa: TID251 - seeded: which objects are hit
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore

MAIN = "from ckptstore.cli.main import main; main()"
VERSIONS = 40
OBJECTS = 50


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


def _damage(store: Path, seed: int) -> list[str]:
    """Flip a bit of, or delete, many packs and manifests; return which."""
    chance = random.Random(seed)
    objects = sorted((*store.glob("packs/*/*.pack"), *store.glob("manifests/*/*.manifest")))
    chosen = chance.sample(objects, OBJECTS)
    for path in chosen:
        path.chmod(0o644)
        if chance.random() < 0.5:
            path.unlink()
            continue
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    return [path.name for path in chosen]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 7))]
)
def test_fifty_damaged_objects_come_back(
    pair: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    """Verify --heal-from restores every one of 50 random objects; all versions load as before."""
    source, cold = pair
    hot = tmp_path / "hot"
    subprocess.run(["cp", "-r", source, hot], check=True)
    with ckptstore.open(source, read_only=True) as sound:
        expected = {v.id: sound.load(f"#{v.id}") for v in sound.versions()}
    _damage(hot, seed)

    command = [sys.executable, "-c", MAIN, "verify", "--json", "--quiet"]
    alone = subprocess.run([*command, "-s", hot], capture_output=True, check=False)
    assert alone.returncode == 5
    done = subprocess.run(
        [*command, "--heal-from", cold, "-s", hot], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert not document["ok"]
    (healed,) = document["healed"]
    assert healed["ok"]
    damaged = set(document["damaged_versions"])
    assert {found["version"] for found in healed["mended"]} == damaged
    assert not healed["lost"]

    with ckptstore.open(hot) as store:
        assert store.verify().ok
        found = {v.id: store.load(f"#{v.id}") for v in store.versions()}
    assert found.keys() == expected.keys()
    for version, state in expected.items():
        for name, tensor in state["model"].items():
            assert torch.equal(found[version]["model"][name], tensor), version
