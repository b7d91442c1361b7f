"""Loads that fall through, of versions in every form that pieces and tensors are stored in."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.errors import VersionNotFoundError

KEY = bytes(range(32))
STEPS = range(5)


def _saved(hot: ckptstore.Store) -> dict[int, Any]:
    """Save versions of deltas, derived and rounded tensors; return what each loads as."""
    run = hot.run("gpt")
    chance = torch.Generator().manual_seed(0)
    master = torch.randn(300, 300, generator=chance)
    for step in STEPS:
        master = master + torch.randn(300, 300, generator=chance) * 1e-4
        state = {
            "master": master.clone(),
            "model": master.bfloat16(),
            "opt": {"v": torch.randn(200, 200, generator=chance).abs()},
        }
        run.save(state, step=step, codec="delta", encodings={"opt.*": "bf16"})
    return {step: hot.load(f"gpt@{step}") for step in STEPS}


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert torch.equal(found["master"], wanted["master"])
    assert torch.equal(found["model"], wanted["model"])
    assert torch.equal(found["opt"]["v"], wanted["opt"]["v"])


def test_deltas_recipes_and_an_encrypted_replica(tmp_path: Path) -> None:
    """Evicted, then with bytes of every pack flipped here: bit by bit what was saved."""
    options = {"cold": {"encryption_key": KEY}}
    with ckptstore.open(tmp_path / "hot", create=True, chunk_bytes=1 << 16) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True, encryption_key=KEY)
        wanted = _saved(hot)
        hot.replicate("replica:cold")
        assert len(hot.evict(replica="cold", keep="last 2").evicted) == len(STEPS) - 2
        hot.gc(grace_s=0.0, orphan_age_s=0.0)
        for step in STEPS:
            _assert_same(hot.load(f"gpt@{step}"), wanted[step])
        lazy = hot.version("gpt@1")
        for name, tensor in (("model", wanted[1]["model"]), ("opt.v", wanted[1]["opt"]["v"])):
            assert torch.equal(lazy[name][5:9], tensor[5:9])
        chance = random.Random(1)
        for pack in (tmp_path / "hot" / "packs").rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            for _ in range(3):
                data[chance.randrange(len(data))] ^= 255
            pack.chmod(0o600)
            pack.write_bytes(data)
        for step in STEPS:
            _assert_same(hot.load(f"gpt@{step}"), wanted[step])
    with ckptstore.open(tmp_path / "hot") as without:
        try:
            without.load("gpt@1")
        except VersionNotFoundError as error:
            told = str(error)
        assert "no key was given" in told
        assert "encryption_key" in told
    with ckptstore.open(tmp_path / "hot", replicas=options) as again:
        assert again.repair("replica:cold").ok
        _assert_same(again.load("gpt@1", refill=True), wanted[1])
        assert again.verify().ok
    for commit in (tmp_path / "hot" / "commits").rglob("*.json"):
        assert "encryption_key" not in commit.read_text()
        assert KEY.hex() not in commit.read_text()
