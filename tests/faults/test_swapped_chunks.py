"""Chunks that took each other's place, all their checksums right: every reader refuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from faultkit.stores import contents, create, memory_with, reopen
from faultkit.swaps import ELEMENTS, KINDS, RUN, Scene, differing, exchange, scene

from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import CorruptTensorError
from ckptstore.format.keys import pack_id
from ckptstore.integrations.safetensors_stream import export_safetensors
from ckptstore.store import Store

Read = Callable[[Store, Path], object]


@pytest.fixture(params=[False, True], ids=["whole", "disguised"])
def disguised(request: pytest.FixtureRequest) -> bool:
    """Say whether the chunks keep their headers, with a new checksum; or move with them."""
    return bool(request.param)


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> Scene:
    """Return the sound store of one kind of chunks."""
    return scene(request.param)


def _lazily(store: Store, _: Path) -> None:
    lazy = store.version(f"{RUN}@3")
    for name in [tensor.path for tensor in lazy.tensors()]:
        assert lazy[name][3:5].shape == (2,)


READERS: dict[str, Read] = {
    "load": lambda store, _: store.load(f"{RUN}@3"),
    "load into tensors": lambda store, _: store.load(f"{RUN}@3", into=_room()),
    "load_into": lambda store, _: store.load_into(f"{RUN}@3", _room()),
    "lazy": _lazily,
    "export": lambda store, folder: export_safetensors(
        store, f"{RUN}@3", folder / "out.safetensors"
    ),
}


def _room() -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of the sizes of the third version's."""
    large = {name: torch.zeros(ELEMENTS) for name in "abc"}
    return {"model": {**large, "s": torch.zeros(100), "t": torch.zeros(50)}}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.short(sample=24)
def test_readers_refuse_and_name_the_tensor(
    made: Scene, disguised: bool, reader: str, tmp_path: Path
) -> None:
    """An error that names a tensor that is hit, no values, and no file."""
    with (
        reopen(memory_with(made.swapped(disguised=disguised))) as store,
        pytest.raises(CorruptTensorError, match="does not match its chunk id") as caught,
    ):
        READERS[reader](store, tmp_path)
    assert any(f"tensor {name}:" in caught.value.message for name in made.kind.hits[3])
    assert list(tmp_path.iterdir()) == []


def test_verify_names_exactly_what_is_hit(made: Scene, disguised: bool) -> None:
    """Each tensor of each version, and no other; those others load bit by bit."""
    with reopen(memory_with(made.swapped(disguised=disguised))) as store:
        found: dict[int, set[str]] = {}
        for problem in store.verify().problems:
            assert problem.step is not None
            found.setdefault(problem.step, set()).add(problem.tensor)
        assert found == made.kind.hits
        if made is scene("base"):
            deltas = [p for p in store.verify(["gpt@2"]).problems if p.tensor != "model.c"]
            assert deltas
            assert all("its base is lost" in problem.message for problem in deltas)
        assert differing(store, made) == made.kind.hits


def test_replication_and_forks_leave_it_where_it_is(made: Scene, disguised: bool) -> None:
    """Versions that are hit do not arrive, the others do; the report names tensor and version."""
    target = memory_with({})
    with reopen(memory_with(made.swapped(disguised=disguised))) as store, create(target) as other:
        report = store.replicate(other)
        assert {failure.step for failure in report.failures} == made.kind.hits.keys()
        for failure in report.failures:
            assert any(name in failure.message for name in made.kind.hits[failure.step])
        assert differing(other, made) == {}
        assert other.verify().ok
        if not (disguised and made.kind.is_delta):
            with pytest.raises(CorruptTensorError, match="|".join(made.kind.hits[3])):
                store.fork(f"{RUN}@3", "away", store=other)
            assert not other.repo.refresh().has_run("away")


class _Misdirecting(WrapperBackend):
    """A storage in which two chunks change places, once both are durable."""

    def __init__(self, inner: MemoryBackend, made: Scene, *, disguised: bool) -> None:
        super().__init__(inner)
        self.memory, self.made, self.disguised = inner, made, disguised
        self.done = False

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read, after the exchange."""
        if not self.done:
            objects = contents(self.memory)
            self.done = exchange(objects, self.made.pair, disguised=self.disguised)
            for name, data in objects.items():
                self.memory.put(name, data)
        self.inner.read_into(key, offset, buffers)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("slab", "packs")])
def test_the_read_back_compares_content(kind: str, disguised: bool) -> None:
    """What the target exchanges between write and read-back is noticed before any commit."""
    made = scene(kind)
    target = _Misdirecting(memory_with({}), made, disguised=disguised)
    with reopen(memory_with(made.objects)) as store, create(target) as other:
        report = store.replicate(other, [f"{RUN}@3"])
        (failure,) = report.failures
        assert target.done
        assert "does not hold what was written there" in failure.message
        assert ("another chunk is there" in failure.message) != disguised
        assert other.repo.refresh().version(failure.version).level == "record"


def test_a_sound_copy_heals_it(made: Scene, disguised: bool) -> None:
    """Repair finds what is hit and brings the right bytes back: everything loads bit by bit."""
    storage = memory_with(made.swapped(disguised=disguised))
    with reopen(storage) as store, reopen(memory_with(made.objects)) as copy:
        report = store.repair(copy)
        assert not report.lost
        assert {one.step for one in report.mended} == made.kind.hits.keys()
        assert differing(store, made) == {}
        assert store.verify().ok


def test_a_copy_that_is_hit_heals_nothing_of_it(made: Scene, disguised: bool) -> None:
    """The other store gives what is sound there; what is hit in both stays lost, by name."""
    key = _pack_of(made, made.pair[0])
    storage = memory_with({k: data for k, data in made.objects.items() if k != key})
    with reopen(storage) as store, reopen(memory_with(made.swapped(disguised=disguised))) as copy:
        report = store.repair(copy)
        lost = {one.step: set(one.tensors) for one in report.lost}
        assert lost == differing(store, made)
        assert lost
        for step, names in lost.items():
            assert names <= made.kind.hits[step]


def _pack_of(made: Scene, chunk_id: bytes) -> str:
    """Return the pack that should hold a chunk."""
    return next(k for k, data in made.objects.items() if k[:5] == "packs" and chunk_id in data)


@pytest.mark.parametrize(
    ("kind", "disguised"),
    [(kind, how) for kind in KINDS for how in (False, True) if not (how and KINDS[kind].is_delta)],
)
def test_a_repack_leaves_such_a_pack_as_it_is(kind: str, disguised: bool) -> None:
    """The collector names the pack and keeps it, so that a repair can still put both right."""
    made = scene(kind)
    storage = memory_with(made.swapped(disguised=disguised))
    with reopen(storage) as store:
        store.remove([f"{RUN}@1", f"{RUN}@2"], force=True)
        report = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
        hit = {_pack_of(made, chunk_id) for chunk_id in made.pair}
        kept = hit & storage.objects.keys()
        assert kept
        skipped = report.repacked.skipped
        assert len(skipped) == len(kept)
        assert all(any(str(pack_id(key)) in text for text in skipped) for key in kept)
        if not disguised and len(hit) == 1:
            assert store.repair().ok
            assert differing(store, made) == {}
