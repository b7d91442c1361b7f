"""Versions whose content only a replica has, in every form: loaded, compared and forked."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.errors import ColdObjectError, TransientStorageError, VersionNotFoundError
from ckptstore.maintenance.replicas.copy_manifest import ORIGIN_KEY
from ckptstore.repo import create_on
from ckptstore.store import Store

ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"w": torch.full((30_000,), float(step)), "same": torch.arange(30_000.0)},
        "optimizer": {"m": torch.full((60_000,), float(step) / 7)},
    }


class _Reads(MemoryBackend):
    """Counts bytes that are read from packs; may refuse to give any."""

    pack_bytes = 0
    refusal: Exception | None = None

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if key.startswith("packs/"):
            if self.refusal is not None:
                raise self.refusal
            self.pack_bytes += sum(map(len, buffers))
        super().read_into(key, offset, buffers)


@pytest.fixture
def cold(tmp_path: Path) -> Store:
    """Return an empty replica."""
    backend = _Reads(f"lineage-cold/{tmp_path}")
    return Store(create_on(backend, chunk_bytes=1 << 16))


@pytest.fixture
def hot(tmp_path: Path, cold: Store) -> Store:
    """Return a store of three versions, of which the first is in its replica alone."""
    repo = create_on(MemoryBackend(f"lineage-hot/{tmp_path}"), chunk_bytes=1 << 16)
    store = Store(repo, replicas={"cold": cold})
    _name(store, "cold", cold)
    run = store.run("gpt", metrics={"loss": "min"})
    for step in (1, 2, 3):
        run.save(_state(step), step=step, metrics={"loss": 1 / step})
    store.replicate(cold)
    assert len(store.evict(["gpt@1"], replica="cold").evicted) == 1
    store.gc(**ZERO)
    return store


def _name(store: Store, name: str, other: Store) -> None:
    store_id = other.info.store_id
    url = f"memory://{name}"
    store.repo.log.append_any(lambda now: name_replica(now, name=name, url=url, store=store_id))


def _reads(store: Store) -> _Reads:
    backend: Backend = store.repo.backend
    while not isinstance(backend, _Reads):
        backend = backend.inner  # type: ignore[attr-defined]
    return backend


def _down(cold: Store, error: Exception) -> None:
    _reads(cold).refusal = error


def test_a_difference_to_what_was_evicted(hot: Store, cold: Store) -> None:
    """By digest without any tensor, as if it were here; by value those that are asked for."""
    whole = cold.diff("gpt@1", "gpt@2")
    before = _reads(cold).pack_bytes
    found = hot.diff("gpt@1", "gpt@2")
    assert _reads(cold).pack_bytes == before
    assert found.changes == whole.changes
    assert [change.path for change in found.same] == ["model.same"]
    assert found.errors() == whole.errors()
    back = hot.diff("gpt@2", "gpt@1").errors("model.w")
    assert back["model.w"] is not None
    assert back["model.w"].max_abs == 1.0


def test_a_difference_that_no_replica_helps_with(hot: Store, cold: Store) -> None:
    """The error is of what is wrong here, and has the replica's reason."""
    cold.unpin("gpt@1")
    cold.remove(["gpt@1"])
    with pytest.raises(VersionNotFoundError, match="deleted the version"):
        hot.diff("gpt@1", "gpt@2")


def test_a_fork_of_what_was_evicted(hot: Store, cold: Store) -> None:
    """It begins here, with its source for a parent, and needs the replica no more."""
    source = hot.resolve("gpt@1")
    run = hot.fork("gpt@1", "ft")
    head = run.head
    assert head is not None
    assert (head.parent, head.step, head.content) == (source.id, 1, source.content)
    assert hot.resolve("gpt@1").level == "record"
    hot.remove_replica("cold")
    assert torch.equal(hot.load("ft")["optimizer"]["m"], _state(1)["optimizer"]["m"])
    assert hot.verify().ok
    hot.gc(**ZERO)
    assert torch.equal(hot.load("ft")["model"]["w"], _state(1)["model"]["w"])
    cold_head = hot.replicate(cold, ["ft"])
    assert not cold_head.failures


def test_a_fork_brings_only_what_it_takes_over(hot: Store, cold: Store) -> None:
    """Tensors that are left out do not travel, nor what is here already."""
    before = _reads(cold).pack_bytes
    head = hot.fork("gpt@1", "ft", include=["model.**"]).head
    assert head is not None
    travelled = _reads(cold).pack_bytes - before
    assert head.roles["weights"].new == 120_000  # model.w; model.same is here
    assert 0 < travelled < 120_000
    assert set(hot.load("ft")) == {"model"}


def test_a_fork_into_another_store(hot: Store, tmp_path: Path) -> None:
    """Of what is in the replica of the source alone; it says where it came from."""
    with ckptstore.open(tmp_path / "third", create=True) as third:
        head = hot.fork("gpt@1", "ft", store=third).head
        assert head is not None
        origin = head.metadata[ORIGIN_KEY]
        assert (origin["store_id"], origin["run"]) == (hot.info.store_id, "gpt")
        assert torch.equal(third.load("ft")["model"]["w"], _state(1)["model"]["w"])


def test_a_fork_from_the_next_replica(hot: Store, cold: Store, tmp_path: Path) -> None:
    """What one replica cannot give, the next may."""
    second = Store(create_on(MemoryBackend(f"lineage-second/{tmp_path}")))
    cold.replicate(second, ["gpt@1"])
    _down(cold, TransientStorageError("503"))
    with pytest.raises(VersionNotFoundError, match="503") as caught:
        hot.fork("gpt@1", "ft")
    assert "try again when" in caught.value.hint
    _name(hot, "second", second)
    hot._session.replicas.given["second"] = second
    assert hot.fork("gpt@1", "ft").head is not None
    assert torch.equal(hot.load("ft")["model"]["w"], _state(1)["model"]["w"])


def test_a_fork_of_what_is_cold_there(hot: Store, cold: Store) -> None:
    """The error has the command that thaws it, and no run is begun."""
    _down(cold, ColdObjectError("in GLACIER"))
    with pytest.raises(VersionNotFoundError, match="archive class") as caught:
        hot.fork("gpt@1", "ft")
    version = hot.resolve("gpt@1")
    assert caught.value.hint.startswith(f"ckptstore thaw {version.id[:12]} --store")
    assert [info.name for info in hot.runs()] == ["gpt"]


def test_a_fork_whose_chunks_are_condemned_meanwhile(hot: Store, cold: Store) -> None:
    """A collection without patience between the copy and the commit makes it copy again."""
    inner = hot.repo.backend
    while not isinstance(inner, MemoryBackend):
        inner = inner.inner  # type: ignore[attr-defined]
    other = Store(create_on(inner, exist_ok=True))
    append = hot.repo.log.append
    calls: list[object] = []

    def collected(build):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if not calls:
            calls.append(other.gc(**ZERO))
        return append(build)

    hot.repo.log.append = collected  # type: ignore[method-assign]
    hot.fork("gpt@1", "ft")
    assert len(calls) == 1
    hot.repo.log.append = append  # type: ignore[method-assign]
    assert torch.equal(hot.load("ft")["optimizer"]["m"], _state(1)["optimizer"]["m"])
    assert hot.verify().ok
    assert cold.verify().ok


def test_a_damaged_manifest_here(tmp_path: Path) -> None:
    """Both work from the replica's."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True)
        for step in (1, 2):
            hot.run("gpt").save(_state(step), step=step)
        hot.replicate("replica:cold")
        hot_manifest = tmp_path / "hot" / hot.resolve("gpt@1").manifest_key
    hot_manifest.chmod(0o600)
    hot_manifest.write_bytes(b"x" * 100)
    with ckptstore.open(tmp_path / "hot") as hot:
        assert len(hot.diff("gpt@1", "gpt@2").changed) == 2
        hot.fork("gpt@1", "ft")
        assert torch.equal(hot.load("ft")["model"]["w"], _state(1)["model"]["w"])


KEY = bytes(range(32))
STEPS = range(5)


def _saved(hot: Store) -> dict[int, Any]:
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
