"""Fork into another store: only missing chunks travel, each checked on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from damaging import flip_object
from metered import MeteredBackend

import ckptstore
from ckptstore.backends.base import Backend, Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog import content_ops
from ckptstore.errors import ConflictError, CorruptTensorError, InvalidInputError, LimitError
from ckptstore.limits import KIB
from ckptstore.repo import create_on

Backends = Callable[[], MemoryBackend]


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> Backends:
    """Return a function that makes memory backends of this test alone."""
    numbers = itertools.count()
    return lambda: MemoryBackend(f"across/{request.node.nodeid}/{next(numbers)}")


def _store(backend: Backend, *, chunk_bytes: int = 64 * KIB) -> ckptstore.Store:
    return ckptstore.Store(create_on(backend, exist_ok=True, chunk_bytes=chunk_bytes))


def _state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    small = {f"bias{i}": torch.randn(30) for i in range(50)}
    return {
        "model": {"big": torch.randn(300, 300), **small, "zeros": torch.zeros(200, 200)},
        "optimizer": {"m": torch.randn(300, 300), "v": torch.zeros(200, 200)},
        "lr": 0.1,
    }


def _assert_equal(found: Any, expected: Any) -> None:  # noqa: ANN401 - nested dicts
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            _assert_equal(found[key], value)
    else:
        assert found == expected


@pytest.mark.parametrize("chunk_bytes", [64 * KIB, 256 * KIB])
def test_a_version_travels_whole(backends: Backends, chunk_bytes: int) -> None:
    """It loads there bit-identical, whatever that store's chunk size; the origin is recorded."""
    here, there = _store(backends()), _store(backends(), chunk_bytes=chunk_bytes)
    source = here.run("gpt", metrics={"loss": "min"}).save(_state(), step=5)

    run = here.fork("gpt", "copy", store=there, metadata={"note": "x"})

    version = run.head
    assert version is not None
    assert (version.parent, version.step, version.content) == ("", 5, source.content)
    assert version.metadata["note"] == "x"
    assert version.metadata["forked_from"] == {
        "store_id": here.info.store_id,
        "url": here.url,
        "version": source.id,
        "run": "gpt",
        "step": 5,
    }
    assert run.info.metrics == {"loss": "min"}
    assert {r: part.stored for r, part in version.roles.items()} == {
        r: part.stored for r, part in source.roles.items()
    }
    _assert_equal(run.load(), _state())
    assert there.verify().ok
    assert here.runs()[0].versions_count == len(here.runs())


def test_only_missing_chunks_travel(backends: Backends) -> None:
    """What the other store holds, under any run and however it came there, is shared."""
    memory = backends()
    metered = MeteredBackend(memory)
    _store(memory).run("gpt").save(_state(), step=1)
    here, there = _store(metered), _store(backends())
    mine = _state()
    there.run("other").save({"x": mine["model"]["big"]}, step=1)

    first = here.fork("gpt", "first", include=["model"], store=there).head
    read = metered.snapshot()["read_into"].bytes_moved
    again = here.fork("gpt", "again", include=["model"], rename={"model": "net"}, store=there)

    assert first is not None
    # The biases, and of the zeros one full piece of 81 rows and the shorter last one.
    assert first.roles["weights"].new == 50 * 120 + 81 * 800 + 38 * 800
    assert metered.snapshot()["read_into"].bytes_moved == read
    assert again.head is not None
    assert again.head.roles["weights"].new == 0
    _assert_equal(again.load()["net"], mine["model"])
    assert len(set(again.version()._content.manifest.pieces.packs)) == 2


def test_saves_share_with_what_came(backends: Backends) -> None:
    """The next save of the new run writes only what changed."""
    here, there = _store(backends()), _store(backends())
    here.run("gpt").save(_state(), step=1)
    run = here.fork("gpt", "gpt", store=there)
    state = _state()
    state["lr"] = 0.2

    assert sum(part.new for part in run.save(state, step=2).roles.values()) == 0


def test_refusals_come_before_anything_travels(backends: Backends) -> None:
    """A taken name, the reserved key of the metadata, metadata that is too large."""
    memory = backends()
    here, there = _store(backends()), _store(memory)
    here.run("gpt").save(_state(), step=1)
    there.run("taken").save({"x": 1}, step=1)
    before = [info.key for info in memory.list("")]

    with pytest.raises(ConflictError):
        here.fork("gpt", "taken", store=there)
    with pytest.raises(InvalidInputError):
        here.fork("gpt", "x", store=there, metadata={"forked_from": 1})
    with pytest.raises(LimitError):
        here.fork("gpt", "x", store=there, metadata={"long": "x" * 300 * KIB})
    assert [info.key for info in memory.list("")] == before


class _Flipped(WrapperBackend):
    """Flips one bit of everything that is read of packs, at some place."""

    at = 0

    def read_into(self, key: str, offset: int, buffers: Any) -> None:  # noqa: ANN401 - as above
        self.inner.read_into(key, offset, buffers)
        view = buffers[0]
        view[self.at % len(view)] ^= 1


@pytest.mark.parametrize("at", [3, 70, 30_000])
def test_damage_does_not_travel(backends: Backends, at: int) -> None:
    """A chunk with a damaged header or damaged bytes is named; no run appears."""
    memory = backends()
    _store(memory).run("gpt").save({"w": torch.randn(300, 300)}, step=1)
    flipped = _Flipped(memory)
    flipped.at = at
    there = _store(backends())

    with pytest.raises(CorruptTensorError, match="tensor w"):
        _store(flipped).fork("gpt", "copy", store=there)
    assert there.runs() == []


def test_a_chunk_that_lies_about_its_content_does_not_travel(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored bytes that fit their checksum, but not the id in the manifest, are refused."""
    here, there = _store(backends()), _store(backends())
    run = here.run("gpt")
    run.save({"w": torch.zeros(300, 300)}, step=1)
    lazy = here.version("gpt")
    table = lazy._content.manifest.pieces
    ids = table.ids.copy()
    ids[0] ^= 1
    monkeypatch.setattr(type(table), "ids", ids)

    with pytest.raises(CorruptTensorError, match="does not match its chunk id"):
        here.fork("gpt", "copy", store=there)


@pytest.mark.parametrize("way", ["fork", "replicate", "save"])
@pytest.mark.parametrize("twin", ["sound", "damaged", "deleted", "reduced", "evicted"])
def test_nothing_is_shared_with_a_twin_that_lost_its_chunks(
    backends: Backends, twin: str, way: str
) -> None:
    """Beside a version with the same state, of which chunks are gone, all chunks are written."""
    memory = backends()
    here, there = _store(backends()), _store(memory)
    for step in (1, 2):
        here.run("gpt").save(_state(), step=step)
    here.replicate(there, ["gpt@1"])
    lost = there.resolve("gpt@1")
    packs = [info.key for info in memory.list("packs/")]
    if twin == "damaged":
        for key in packs:
            flip_object(memory, key)
        digests = {lost.id: lost.manifest_digest}
        there.repo.log.append(lambda now: content_ops.quarantine(now, digests))
    elif twin == "deleted":
        there.remove(["gpt@1"], force=True)
    elif twin != "sound":
        there.age(["gpt@1"], "weights" if twin == "reduced" else "record", force=True)
    if twin not in ("sound", "damaged"):
        there.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
    if way == "fork":
        here.fork("gpt@2", "copy", store=there)
    elif way == "replicate":
        here.replicate(there, ["gpt@2"])
    else:
        there.run("gpt").save(_state(), step=2)

    fresh, ref = _store(memory), "copy@2" if way == "fork" else "gpt@2"
    _assert_equal(fresh.load(ref), _state())
    shared = [role for role, part in fresh.resolve(ref).roles.items() if not part.new]
    assert shared == {"sound": ["optimizer", "weights"], "reduced": ["weights"]}.get(twin, [])


class _Collecting(WrapperBackend):
    """Lets a collector run, once, when a manifest is written."""

    def __init__(self, inner: Backend, other: ckptstore.Store) -> None:
        super().__init__(inner)
        self._other: ckptstore.Store | None = other

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)
        other, self._other = self._other, None
        if key.startswith("manifests/") and other is not None:
            other.gc(grace_s=0, orphan_age_s=0)


def test_what_is_condemned_on_arrival_travels_again(backends: Backends) -> None:
    """A collector that spares no orphan takes the new packs: they are written again."""
    memory = backends()
    here, other = _store(backends()), _store(memory)
    here.run("gpt").save(_state(), step=1)
    there = _store(_Collecting(memory, other))

    run = here.fork("gpt", "copy", store=there)

    _assert_equal(run.load(), _state())
    other.gc(grace_s=0, orphan_age_s=0)
    assert other.verify().ok
    _assert_equal(other.load("copy"), _state())
