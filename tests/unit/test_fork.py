"""Forks, within a store and across: a state of other versions under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from damaging import flip_object
from metered import MeteredBackend

import ckptstore
from ckptstore import errors
from ckptstore.backends.base import Backend, Buffer
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog import content_ops, run_ops
from ckptstore.config import Options
from ckptstore.format import manifest as manifests
from ckptstore.format import skeleton
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import manifest_key
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.hashing import blake3_hex
from ckptstore.limits import KIB
from ckptstore.repo import create_on, open_on


def _store(backend: Backend) -> ckptstore.Store:
    return ckptstore.Store(create_on(backend, exist_ok=True))


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory."""
    return _store(memory)


def _state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    embed = torch.randn(200, 300)
    return {
        "model": {
            "backbone.0.weight": torch.randn(300, 300),
            "backbone.0.bias": torch.randn(300),
            "embed.weight": embed,
            "head.weight": embed,
        },
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(300, 300)}},
            "param_groups": [{"lr": 1}],
        },
        "rng": torch.get_rng_state(),
        "step": 3,
    }


def _new_bytes(version: ckptstore.Version) -> int:
    return sum(part.new for part in version.roles.values())


def test_a_fork_shares_everything_and_knows_its_parent(store: ckptstore.Store) -> None:
    """The whole state is there under the new run; nothing is new, and lineage is recorded."""
    source = store.run("gpt", metrics={"loss": "min"}).save(_state(), step=7, metrics={"loss": 2.0})

    run = store.fork("gpt", "ft", metrics={"acc": "max"}, metadata={"why": "test"})

    first = run.head
    assert first is not None
    assert (first.run, first.step, first.parent, first.metadata) == (
        "ft", 7, source.id, {"why": "test"},
    )  # fmt: skip
    assert (first.metrics, first.tags, first.content) == ({}, (), source.content)
    assert _new_bytes(first) == 0
    assert run.info.origin == source.id
    assert run.info.metrics == {"loss": "min", "acc": "max"}
    loaded, expected = run.load(), _state()
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"]
    )
    assert loaded["model"]["embed.weight"] is loaded["model"]["head.weight"]
    assert store.verify().ok


def test_no_tensor_is_read_or_written(memory: MemoryBackend) -> None:
    """One manifest is read and one written, then one commit; packs are not touched."""
    _store(memory).run("gpt").save(_state(), step=1)
    metered = MeteredBackend(memory)
    store = _store(metered)
    store.runs()
    before = metered.snapshot()

    store.fork("gpt", "ft", include=["model"], rename={"model": "net"})

    calls = {
        name: meter.calls - (before[name].calls if name in before else 0)
        for name, meter in metered.snapshot().items()
    }
    assert {name: count for name, count in calls.items() if count and name != "list"} == {
        "get": 1,
        "put": 1,
        "put_if_absent": 1,
    }


def test_the_new_runs_saves_share_with_the_fork(store: ckptstore.Store) -> None:
    """What the fork holds is not written again, under whatever name it is saved."""
    state = _state()
    store.run("gpt").save(state, step=1)
    run = store.fork("gpt", "ft", roles=["weights"], rename={"model.backbone": "model.encoder"})
    state["model"]["encoder.0.weight"] = state["model"].pop("backbone.0.weight")
    state["model"]["new"] = torch.ones(1000)

    version = run.save({"model": state["model"]}, step=2)

    assert _new_bytes(version) == 4000
    assert version.parent == store.versions("ft")[0].id


@pytest.mark.parametrize(
    ("wish", "paths"),
    [
        ({"roles": ["rng"]}, ["rng"]),
        ({"roles": ["rng", "extra"]}, ["rng", "step"]),
        ({"include": ["model"], "exclude": ["*embed*", "*head*"]}, ["model"]),
        ({"include": ["optimizer.param_groups"]}, ["optimizer"]),
        ({"roles": ["optimizer"], "rename": {"optimizer": "opt"}}, ["opt"]),
    ],
)
def test_a_part_can_be_taken_over(
    store: ckptstore.Store, wish: dict[str, Any], paths: list[str]
) -> None:
    """By pattern and by role, values that are no tensors too; only what is needed is named."""
    store.run("gpt").save(_state(), step=1)
    run = store.fork("gpt", "part", **wish)

    assert list(run.load()) == paths
    version = run.version()
    assert {info.role for info in version.tensors()} == set(version.info.roles)
    assert store.verify(["part"]).ok


def test_records_without_a_leaf_are_dropped(store: ckptstore.Store) -> None:
    """A fork of one tensor names one record, one piece, and one pack."""
    run = store.run("gpt")
    first = _state(1)
    run.save(first, step=1)
    run.save({**first, "model": {**first["model"], "new": torch.randn(300, 300)}}, step=2)

    store.fork("gpt", "part", include=["model.new"])

    manifest = store.version("part")._content.manifest
    assert (len(manifest.tensors), len(manifest.pieces), len(manifest.pieces.packs)) == (1, 1, 1)


def test_tied_tensors_stay_tied_when_one_of_them_goes(store: ckptstore.Store) -> None:
    """A tensor stays as long as one of its paths does; views keep their base."""
    base = torch.randn(100, 100)
    store.run("gpt").save({"a": {"base": base}, "b": {"rows": base[3:5]}}, step=1)
    run = store.fork("gpt", "views", include=["b"], rename={"b": "c"})

    assert torch.equal(run.load()["c"]["rows"], base[3:5])


def test_refusals_write_nothing(store: ckptstore.Store, memory: MemoryBackend) -> None:
    """A name that is taken, patterns that match nothing, collisions, roles, deleted sources."""
    run = store.run("gpt")
    run.save(_state(), step=1)
    run.save(_state(2), step=2)
    store.remove(["gpt@1"])
    before = [info.key for info in memory.list("")]
    wrong: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (errors.ConflictError, "gpt", "gpt", {}),
        (errors.InvalidInputError, "gpt", "no@name", {}),
        (errors.VersionNotFoundError, "gpt@1", "x", {}),
        (errors.TensorNotFoundError, "gpt", "x", {"include": ["modle"]}),
        (errors.TensorNotFoundError, "gpt", "x", {"exclude": ["*"]}),
        (errors.TensorNotFoundError, "gpt", "x", {"rename": {"modle": "m"}}),
        (errors.InvalidInputError, "gpt", "x", {"rename": {"model": "rng"}}),
        (errors.InvalidInputError, "gpt", "x", {"roles": ["wieghts"]}),
        (errors.InvalidInputError, "gpt", "x", {"roles": "weights"}),
        (errors.InvalidInputError, "gpt", "x", {"metrics": {"loss": "up"}}),
    ]
    for error, ref, name, options in wrong:
        with pytest.raises(error):
            store.fork(ref, name, **options)
    assert [info.key for info in memory.list("")] == before
    reader = ckptstore.Store(open_on(memory, options=Options(read_only=True)))
    with pytest.raises(errors.ReadOnlyError):
        reader.fork("gpt", "x")


def test_a_version_of_which_parts_are_lost_is_not_forked(
    store: ckptstore.Store, memory: MemoryBackend
) -> None:
    """A fork would spread the damage to a run that looks sound."""
    version = store.run("gpt").save(_state(), step=1)
    lost = {version.id: version.manifest_digest}
    store.repo.log.append(lambda now: content_ops.quarantine(now, lost))

    with pytest.raises(errors.CorruptObjectError, match="lost"):
        store.fork("gpt", "ft")


class _Before(WrapperBackend):
    """Calls back once, before a manifest is written."""

    def __init__(self, inner: Backend, call: Callable[[], object]) -> None:
        super().__init__(inner)
        self._call: Callable[[], object] | None = call

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith("manifests/") and self._call is not None:
            call, self._call = self._call, None
            call()
        self.inner.put(key, data)


def _collect(store: ckptstore.Store) -> None:
    store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)


def test_a_source_that_is_repacked_meanwhile_is_read_again(memory: MemoryBackend) -> None:
    """The packs that the fork names were condemned before its commit: it names the new ones."""
    other = _store(memory)
    run = other.run("gpt")
    kept = torch.randn(300, 300)
    run.save({"model": {"kept": kept, "dropped": torch.randn(300, 300)}}, step=1)
    run.save({"model": {"kept": kept}}, step=2)
    other.remove(["gpt@1"])
    before = set(other.version("gpt")._content.manifest.pieces.packs)

    store = _store(_Before(memory, lambda: _collect(other)))
    fork = store.fork("gpt", "ft")

    assert not before & set(fork.version()._content.manifest.pieces.packs)
    assert torch.equal(fork.load()["model"]["kept"], kept)
    _collect(other)
    assert torch.equal(_store(memory).load("ft")["model"]["kept"], kept)


def test_a_source_that_is_collected_meanwhile_is_gone(memory: MemoryBackend) -> None:
    """No run appears that names what was deleted; what was written is an orphan."""
    other = _store(memory)
    run = other.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)

    def vanish() -> None:
        other.remove(["gpt@1"])
        _collect(other)

    store = _store(_Before(memory, vanish))
    with pytest.raises(errors.VersionNotFoundError):
        store.fork("gpt@1", "ft")
    assert [info.name for info in store.runs()] == ["gpt"]
    _collect(other)
    assert len(list(memory.list("manifests/"))) == 1


def test_a_manifest_that_is_condemned_before_its_commit_is_written_again(
    memory: MemoryBackend,
) -> None:
    """A collector that spares no orphan takes the fork's manifest: the fork goes on."""
    other = _store(memory)
    other.run("gpt").save(_state(), step=1)

    class _After(_Before):
        def put(self, key: str, data: Buffer) -> None:
            self.inner.put(key, data)
            if key.startswith("manifests/") and self._call is not None:
                call, self._call = self._call, None
                call()

    store = _store(_After(memory, lambda: _collect(other)))
    fork = store.fork("gpt", "ft")

    assert fork.load()["step"] == 3
    assert store.verify().ok


def test_lineage_outlives_the_source(store: ckptstore.Store) -> None:
    """A deleted and collected source stays the parent; the fork loads as before."""
    run = store.run("gpt")
    source = run.save(_state(), step=1)
    fork = store.fork("gpt", "ft")
    store.remove(["gpt@1"], force=True)
    _collect(store)
    _collect(store)

    assert fork.head is not None
    assert fork.head.parent == source.id
    assert fork.info.origin == source.id
    assert torch.equal(fork.load()["rng"], _state()["rng"])


def test_a_terabyte_is_forked_by_its_manifest_alone(memory: MemoryBackend) -> None:
    """250,000 chunks of 4 MiB, of which not one is there: no more than two manifests move."""
    version, tensors, each = "ab" * 16, 2000, 125
    count = tensors * each
    pieces = PieceTable(
        ids=np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8),
        raw=np.full(count, 4 << 20, np.uint32),
        pack=(np.arange(count) // 32).astype(np.uint32),
        offset=(np.arange(count) % 32 * (4 << 20) + 32).astype(np.uint64),
        stored=np.full(count, 3 << 20, np.uint32),
        inner=np.zeros(count, np.uint32),
        slab=np.full(count, 4 << 20, np.uint32),
        packs=[f"{at:032x}" for at in range(count // 32 + 1)],
    )
    record = TensorRecord(
        dtype="float32", shape=(each << 10, 1024), order=None, role="weights",
        nbytes=each * (4 << 20),
    )  # fmt: skip
    leaves: list[Any] = []
    for at in range(tensors):
        leaves += [f"layer{at}", ["T", at]]
    manifest = Manifest(
        version=version, chunk_bytes=4 << 20,
        skeleton=skeleton.encode(["d", "model", ["d", *leaves]]), tensors=(record,) * tensors,
        first=tuple(range(0, count + 1, each)), pieces=pieces,
    )  # fmt: skip
    data = manifests.encode(manifest)
    store = _store(memory)
    memory.put(manifest_key(version), data)
    pointer = ManifestPointer(
        key=manifest_key(version), stored_bytes=len(data), digest=blake3_hex(data)
    )
    store.repo.log.append(
        lambda now: run_ops.save(
            now, run="big", version=version, step=1, manifest=pointer, content="0" * 64
        )
    )
    metered = MeteredBackend(memory)
    reader = _store(metered)
    reader.runs()
    before = metered.snapshot()["get"].bytes_moved

    first = reader.fork("big", "ft", rename={"model": "net"}).head

    assert first is not None
    assert first.roles["weights"].logical == count * (4 << 20)
    meters = metered.snapshot()
    assert "read_into" not in meters
    assert meters["get"].bytes_moved - before == len(data)
    assert meters["put"].bytes_moved == first.manifest_bytes
    assert meters["put_if_absent"].bytes_moved < 1000


Backends = Callable[[], MemoryBackend]


def _across_store(backend: Backend, *, chunk_bytes: int = 64 * KIB) -> ckptstore.Store:
    return ckptstore.Store(create_on(backend, exist_ok=True, chunk_bytes=chunk_bytes))


def _across_state(seed: int = 0) -> dict[str, Any]:
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
    here, there = _across_store(backends()), _across_store(backends(), chunk_bytes=chunk_bytes)
    source = here.run("gpt", metrics={"loss": "min"}).save(_across_state(), step=5)

    run = here.fork("gpt", "copy", store=there, metadata={"note": "x"})

    version = run.head
    assert version is not None
    assert (version.parent, version.step, version.content) == ("", 5, source.content)
    assert version.metadata["note"] == "x"
    assert version.metadata["forked_from"] == {
        "store_id": here.info.store_id, "url": here.url, "version": source.id, "run": "gpt",
        "step": 5,
    }  # fmt: skip
    assert run.info.metrics == {"loss": "min"}
    assert {r: part.stored for r, part in version.roles.items()} == {
        r: part.stored for r, part in source.roles.items()
    }
    _assert_equal(run.load(), _across_state())
    assert there.verify().ok
    assert here.runs()[0].versions_count == len(here.runs())


def test_only_missing_chunks_travel(backends: Backends) -> None:
    """What the other store holds, under any run and however it came there, is shared."""
    memory = backends()
    metered = MeteredBackend(memory)
    _across_store(memory).run("gpt").save(_across_state(), step=1)
    here, there = _across_store(metered), _across_store(backends())
    mine = _across_state()
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
    here, there = _across_store(backends()), _across_store(backends())
    here.run("gpt").save(_across_state(), step=1)
    run = here.fork("gpt", "gpt", store=there)
    state = _across_state()
    state["lr"] = 0.2

    assert sum(part.new for part in run.save(state, step=2).roles.values()) == 0


def test_refusals_come_before_anything_travels(backends: Backends) -> None:
    """A taken name, the reserved key of the metadata, metadata that is too large."""
    memory = backends()
    here, there = _across_store(backends()), _across_store(memory)
    here.run("gpt").save(_across_state(), step=1)
    there.run("taken").save({"x": 1}, step=1)
    before = [info.key for info in memory.list("")]

    with pytest.raises(errors.ConflictError):
        here.fork("gpt", "taken", store=there)
    with pytest.raises(errors.InvalidInputError):
        here.fork("gpt", "x", store=there, metadata={"forked_from": 1})
    with pytest.raises(errors.LimitError):
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
    _across_store(memory).run("gpt").save({"w": torch.randn(300, 300)}, step=1)
    flipped = _Flipped(memory)
    flipped.at = at
    there = _across_store(backends())

    with pytest.raises(errors.CorruptTensorError, match="tensor w"):
        _across_store(flipped).fork("gpt", "copy", store=there)
    assert there.runs() == []


def test_a_chunk_that_lies_about_its_content_does_not_travel(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored bytes that fit their checksum, but not the id in the manifest, are refused."""
    here, there = _across_store(backends()), _across_store(backends())
    run = here.run("gpt")
    run.save({"w": torch.zeros(300, 300)}, step=1)
    lazy = here.version("gpt")
    table = lazy._content.manifest.pieces
    ids = table.ids.copy()
    ids[0] ^= 1
    monkeypatch.setattr(type(table), "ids", ids)

    with pytest.raises(errors.CorruptTensorError, match="does not match its chunk id"):
        here.fork("gpt", "copy", store=there)


@pytest.mark.parametrize("way", ["fork", "replicate", "save"])
@pytest.mark.parametrize("twin", ["sound", "damaged", "deleted", "reduced", "evicted"])
def test_nothing_is_shared_with_a_twin_that_lost_its_chunks(
    backends: Backends, twin: str, way: str
) -> None:
    """Beside a version with the same state, of which chunks are gone, all chunks are written."""
    memory = backends()
    here, there = _across_store(backends()), _across_store(memory)
    for step in (1, 2):
        here.run("gpt").save(_across_state(), step=step)
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
        there.run("gpt").save(_across_state(), step=2)

    fresh, ref = _across_store(memory), "copy@2" if way == "fork" else "gpt@2"
    _assert_equal(fresh.load(ref), _across_state())
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
    here, other = _across_store(backends()), _across_store(memory)
    here.run("gpt").save(_across_state(), step=1)
    there = _across_store(_Collecting(memory, other))

    run = here.fork("gpt", "copy", store=there)

    _assert_equal(run.load(), _across_state())
    other.gc(grace_s=0, orphan_age_s=0)
    assert other.verify().ok
    _assert_equal(other.load("copy"), _across_state())
