"""Decisions of ``codec="auto"``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix_settings import SETTINGS
from ckptstore.config import SYSTEM, Options
from ckptstore.objects.auto_codec import auto_codec
from ckptstore.repo import create_on
from ckptstore.store.store import Store

LOCAL = SETTINGS["local"].capabilities.write_bytes_per_s
NFS = SETTINGS["nfs"].capabilities.write_bytes_per_s
OBJECTS = limits.WRITE_BYTES_PER_S_DEFAULT


@pytest.mark.parametrize(
    ("speed", "workers", "codec"),
    [
        (LOCAL, 1, "raw"),
        (LOCAL, 2, "raw"),
        (LOCAL, 8, "planes"),
        (NFS, 1, "planes"),
        (NFS, 2, "planes"),
        (OBJECTS, 1, "planes"),
        (10 * LOCAL, 8, "raw"),
    ],
)
def test_threads_that_outrun_the_storage_compress(speed: float, workers: int, codec: str) -> None:
    """Few threads are too slow for a disk and not for S3 or NFS; many outrun a disk too."""
    assert auto_codec(speed, workers=workers) == codec


def test_ties_take_fewer_bytes() -> None:
    """Raw saves that are faster only by as much as they are larger are not worth their room."""
    encoding = limits.AUTO_ENCODE_BYTES_PER_S
    assert auto_codec(encoding, workers=1) == "planes"
    assert auto_codec(1.1 * encoding, workers=1) == "planes"
    assert auto_codec(1.3 * encoding, workers=1) == "raw"


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_saves_follow_the_declared_speed(codec: str) -> None:
    """Saves of one store have one codec, which the receipt names; a codec of the user counts."""
    memory = MemoryBackend(SYSTEM.random_hex(8))

    class Declared(MemoryBackend):
        @property
        def capabilities(self) -> object:  # type: ignore[override]
            speed = 5e9 if codec == "raw" else 1e8
            return replace(memory.capabilities, write_bytes_per_s=speed)

    backend = Declared(SYSTEM.random_hex(8))
    options = Options(workers=1, engine="thread")
    with Store(create_on(backend, options=options)) as store:
        for step in range(3):
            state = {"w": torch.randn(1 << 20)}
            version = store.run("a").save(state, step=step)
            assert version.receipt["auto_planes"] == (codec == "planes")
            assert (version.receipt["stored_bytes"] < 0.95 * (4 << 20)) == (codec == "planes")
            assert torch.equal(store.load("a@latest")["w"], state["w"])
        chosen = store.run("a").save({"w": torch.randn(1 << 20)}, step=3, codec="zstd")
        assert "auto_planes" not in chosen.receipt


def test_the_codec_does_not_decide_what_is_shared(tmp_path: Path) -> None:
    """Pieces are named before the codec: an unchanged state costs nothing."""
    state = {"w": torch.randn(1 << 20)}
    with ckptstore.open(tmp_path / "store", create=True, engine="thread") as store:
        store.run("a").save(state, step=0, codec="planes")
        assert store.run("a").save(state, step=1, codec="raw").receipt["new_bytes"] == 0
        assert store.run("a").save(state, step=2).receipt["new_bytes"] == 0


def test_the_receipt_says_what_was_chosen(tmp_path: Path) -> None:
    """``Receipt.auto`` of a pending save; empty where the user chose."""
    with ckptstore.open(tmp_path / "store", create=True, engine="thread") as store:
        state = {"w": torch.randn(1000)}
        pending = store.run("a").save_async(state, step=0)
        pending.result()
        assert pending.receipt.auto in {"raw", "planes"}
        chosen = store.run("a").save_async(state, step=1, codec="raw")
        chosen.result()
        assert chosen.receipt.auto == ""
