"""What is saved as a delta, to what, and what it costs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deltakit import deltas_of, manifest_of, open_store, packs_of, same, state_of
from metered import Meter, MeteredBackend

from ckptstore.backends.memory import MemoryBackend
from ckptstore.codecs.codec_table import DELTAS
from ckptstore.errors import NotFoundError, StorageError
from ckptstore.format.keys import pack_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES, parse_chunk_header
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend

Backends = Callable[[], MemoryBackend]


def saves(store: Store, steps: range, run: str = "gpt") -> list[Version]:
    """Save the states of some steps."""
    return [store.run(run).save(state_of(step), step=step) for step in steps]


def test_versions_come_back_bit_for_bit(store: Store, backend: MemoryBackend) -> None:
    """All versions of a run load, here and with a store that is opened anew; and verify."""
    versions = saves(store, range(5))

    assert [deltas_of(store, version) > 0 for version in versions] == [False, *[True] * 4]
    for opened in (store, open_store(backend, codec="auto")):
        for step in range(5):
            assert same(opened.load(f"gpt@{step}"), state_of(step))
        assert opened.verify().ok


def test_deltas_take_less(store: Store) -> None:
    """Weights and counters are stored in less than half of what they take by themselves."""
    first, second = saves(store, range(2))

    assert second.roles["weights"].stored < 0.5 * first.roles["weights"].stored
    assert second.roles["weights"].logical == first.roles["weights"].logical
    assert "base" not in second.roles


def test_first_moments_are_no_deltas(store: Store) -> None:
    """What is new noise at each step is stored as planes."""
    _, second = saves(store, range(2))
    manifest = manifest_of(store, second)
    content = store.version("gpt@1")._content
    for index, label in enumerate(content.labels):
        rows = range(manifest.first[index], manifest.first[index + 1])
        found = [manifest.pieces.base_of(row) is not None for row in rows]
        if "exp_avg" in label or "frozen" in label:
            assert not any(found), label
        else:
            assert all(found), label


def test_every_delta_is_one_step_from_a_keyframe(store: Store, backend: MemoryBackend) -> None:
    """Chunks say so too: of codec 3, beginning with the id of a piece that is none."""
    versions = saves(store, range(4))
    for version in versions[1:]:
        table = manifest_of(store, version).pieces
        assert table.base is not None
        for row in range(len(table)):
            pack = backend.objects[pack_key(table.packs[int(table.pack[row])])].data
            at = int(table.offset[row])
            header = parse_chunk_header(pack[at : at + CHUNK_HEADER_BYTES], where="")
            base = table.base_of(row)
            assert (header.codec in DELTAS) == (base is not None)
            if base is not None:
                body = pack[at + CHUNK_HEADER_BYTES :]
                assert body[:32] == table.ids[base].tobytes()
                assert header.chunk_id == table.ids[row].tobytes()


def test_a_new_keyframe_begins_where_a_delta_is_no_less_than_the_mean(store: Store) -> None:
    """The pieces of a cycle take less, in the mean, than those of one that is a piece shorter."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16_384, generator=generator) * 0.02
    sizes: list[tuple[bool, int]] = []
    for step in range(12):
        version = store.run("drift").save({"w": weight}, step=step)
        sizes.append((deltas_of(store, version) > 0, version.roles["weights"].stored))
        weight = weight + torch.randn(16_384, generator=generator) * 3e-4

    keyframes = [step for step, (delta, _) in enumerate(sizes) if not delta]
    assert keyframes[0] == 0
    assert len(keyframes) >= 2
    for start, end in itertools.pairwise(keyframes):
        cycle = [size for _, size in sizes[start:end]]
        means = [sum(cycle[:n]) / n for n in range(1, len(cycle) + 1)]
        assert means == sorted(means, reverse=True)
        assert end - start > 1


def test_equal_pieces_share_a_delta_and_what_it_refers_to(store: Store) -> None:
    """A state that is saved again writes nothing, and loads without its parent."""
    _, second = saves(store, range(2))
    third = store.run("gpt").save(state_of(1), step=2)

    assert third.roles["weights"].stored == 0
    assert packs_of(store, third) == packs_of(store, second)
    assert deltas_of(store, third) == deltas_of(store, second)
    assert same(store.load("gpt@2"), state_of(1))


def test_a_state_that_comes_back_is_shared_with_the_keyframe(store: Store) -> None:
    """What a manifest lists as a base is known, too: going back to it stores no weights."""
    saves(store, range(2))
    third = store.run("gpt").save(state_of(0), step=2)

    assert third.roles["weights"].stored == 0
    assert deltas_of(store, third) == 0


def test_a_fork_goes_on_with_deltas_to_its_origin(store: Store) -> None:
    """The first version of a fork has the keyframes of the version that it began at."""
    saves(store, range(2))
    store.fork("gpt@1", "tuned")
    version = store.run("tuned").save(state_of(2), step=2)

    assert deltas_of(store, version) > 0
    assert same(store.load("tuned@2"), state_of(2))


def changed(state: dict[str, Any], how: str) -> dict[str, Any]:
    """Return a state whose weight is not where, or not what, it was."""
    model = state["model"]
    if how == "dtype":
        model["weight"] = model["weight"].to(torch.float64)
    elif how == "shape":
        model["weight"] = model["weight"].reshape(2, -1)
    elif how == "length":
        model["weight"] = torch.cat([model["weight"], model["weight"][:16384]])
    elif how == "order":
        model["weight"] = model["weight"].reshape(250, 200).t()
    else:
        model["renamed"] = model.pop("weight")
    return state


@pytest.mark.parametrize("how", ["dtype", "shape", "length", "order", "path"])
def test_only_the_same_tensor_is_a_base(store: Store, how: str) -> None:
    """Of another dtype, shape, order or path, a tensor is stored by itself; the rest is not."""
    store.run("gpt").save(state_of(0), step=0)
    version = store.run("gpt").save(changed(state_of(1), how), step=1)
    plain = open_store(MemoryBackend(f"plain {how}"))
    plain.run("gpt").save(state_of(0), step=0)

    whole = deltas_of(plain, plain.run("gpt").save(state_of(1), step=1))
    assert deltas_of(store, version) == whole - 4
    assert same(store.load("gpt@1"), changed(state_of(1), how))


def test_tensors_that_others_follow_from_are_deltas(store: Store) -> None:
    """Rounded weights are hidden, and weights that follow from masters are not stored at all."""
    for step in range(3):
        weight = state_of(step)["model"]["weight"]
        state = {"model": {"rounded": weight * 3, "low": weight.half()}, "masters": weight}
        run = store.run("mixed")
        version = run.save(state, step=step, encodings={"model.rounded": "bf16"})

    assert deltas_of(store, version) == 6
    found = store.load("mixed@2")
    assert torch.equal(found["model"]["rounded"], (weight * 3).bfloat16().float())
    assert torch.equal(found["model"]["low"], weight.half())
    assert torch.equal(found["masters"], weight)
    assert store.verify().ok


# --- what it costs --------------------------------------------------------------------------------
def reads(backend: MeteredBackend) -> Meter:
    """Return what was read of packs up to now."""
    return backend.snapshot().get("read_into", Meter())


def read_bytes(backends: Backends, *, reopen: bool, **options: Any) -> tuple[int, int, int]:  # noqa: ANN401
    """Return the reads of a second save, their bytes, and those of the keyframes of its deltas."""
    backend = backends()
    metered = MeteredBackend(backend)
    store = open_store(metered, **options)
    saves(store, range(1))
    if reopen:
        store = open_store(metered, **options)
        store.version("gpt@0")  # the manifest, and the log
        store.repo.manifests.load(store.repo.catalog.version(store.version("gpt@0").id))
    before = reads(metered)
    version = saves(store, range(1, 2))[0]
    after = reads(metered)
    table = manifest_of(store, version).pieces
    own = manifest_of(store, version).first[-1]
    size = int(table.stored[own:].sum()) + CHUNK_HEADER_BYTES * (len(table) - own)
    return after.calls - before.calls, after.bytes_moved - before.bytes_moved, size


def test_no_base_is_read_that_is_in_memory(backends: Backends) -> None:
    """The keyframes that this process saved are kept, so that the next save reads none."""
    calls, _, size = read_bytes(backends, reopen=False)

    assert calls == 0
    assert size > 0


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 1, "base_bytes": 0}])
def test_a_base_is_read_once(backends: Backends, options: dict[str, int]) -> None:
    """In a new process each is read once; of what does not become a delta, two of a kind."""
    calls, size, needed = read_bytes(backends, reopen=True, **options)

    moments = 3 * 65_536 * 2
    assert needed <= size <= needed + moments
    assert calls <= 12


def test_what_is_kept_is_bounded(backend: MemoryBackend) -> None:
    """Never more than ``base_bytes``; what finds no room is read, and the rest is not."""
    store = open_store(backend, base_bytes=150_000)
    saves(store, range(3))

    kept = store.repo.manifests.keyframes
    assert 65_536 <= sum(map(len, kept._data.values())) <= 150_000
    assert same(store.load("gpt@2"), state_of(2))


def test_kinds_that_never_pay_are_left_alone(backends: Backends) -> None:
    """After two pieces no base of a first moment is read any more, in this save and the next."""
    metered = MeteredBackend(backends())
    store = open_store(metered, base_bytes=0)
    tensors = {f"m{n}": torch.zeros(1) for n in range(8)}

    def save(step: int) -> int:
        generator = torch.Generator().manual_seed(step)
        state = {name: torch.randn(16_384, generator=generator) for name in tensors}
        before = reads(metered).bytes_moved
        store.run("m").save({"moments": state}, step=step)
        return (reads(metered).bytes_moved) - before

    found = [save(step) for step in range(4)]
    assert 0 < found[1] <= 4 * 70_000
    assert found[2:] == [0, 0]


def test_states_under_numbers_are_told_apart_by_their_shapes(backend: MemoryBackend) -> None:
    """Of an optimizer's states the first are new noise: those of other shapes are deltas anyway."""
    store = open_store(backend, workers=1)
    run = store.run("gpt")
    for step in range(2):
        noise = torch.Generator().manual_seed(step)
        states = {n: torch.randn(50_000, generator=noise) for n in range(3)}
        states[3] = state_of(step)["model"]["weight"].reshape(-1, 2)
        version = run.save({"state": states}, step=step)
    assert deltas_of(store, version) == 4


def test_a_keyframe_that_is_left_behind_is_no_reason_to_stop(store: Store) -> None:
    """A version too far from its keyframe is stored by itself; the next, beside it, as deltas.

    A kind of tensor that has paid is not left alone because its cycle ends.
    """
    run = store.run("gpt")
    found = []
    for step in (0, 1, 1_000_000, 1_000_001):
        weight = state_of(step)["model"]["weight"]
        found.append(deltas_of(store, run.save({"weight": weight}, step=step)))
    assert found[0] == found[2] == 0
    assert found[1] == found[3] == 4
    assert same(store.load("gpt@1000001"), {"weight": weight})


# --- bases that cannot be had ---------------------------------------------------------------------
@pytest.mark.parametrize("how", ["gone", "damaged", "cut", "failing"])
def test_a_save_does_without_a_base(
    backends: Backends, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pack is gone, damaged, cut or cannot be read: a warning, and a version that loads."""
    backend = backends()
    first = saves(open_store(backend), range(1))[0]
    for pack in packs_of(open_store(backend), first):
        item = backend.objects[pack_key(pack)]
        if how == "gone":
            backend.delete(pack_key(pack))
        elif how != "failing":
            data = bytearray(item.data)
            data[40:] = bytes(len(data) - 40) if how == "damaged" else b""
            backend.delete(pack_key(pack))
            backend.put(pack_key(pack), bytes(data))
    fault = Fault(calls=frozenset({"read_into"}), times=0, error=lambda: StorageError("no"))
    inner = FaultyBackend(backend, fault) if how == "failing" else backend
    store = open_store(inner)
    state = state_of(1)
    del state["model"]["frozen"]  # which would be shared, unseen
    with caplog.at_level(logging.WARNING, "ckptstore"):
        version = store.run("gpt").save(state, step=1)

    assert deltas_of(store, version) == 0
    assert len([text for text in caplog.messages if "without deltas" in text]) == 1
    assert same(open_store(backend).load("gpt@1"), state)


def test_what_is_condemned_meanwhile_is_no_base(backends: Backends) -> None:
    """A base that a collection condemned while it was used: the deltas to it are written again."""
    backend = backends()
    store, other = open_store(backend), open_store(backend)
    first = saves(store, range(1))[0]

    def meddle() -> None:
        other.remove([f"#{first.id}"], force=True)
        other.gc(grace_s=0, orphan_age_s=3600)

    meddled: list[int] = []
    append = store.repo.log.append

    def late(build: Any) -> Any:  # noqa: ANN401
        if not meddled:
            meddled.append(1)
            meddle()
        return append(build)

    store.repo.log.append = late  # type: ignore[method-assign]
    version = store.run("gpt").save(state_of(1), step=1)

    assert meddled
    assert deltas_of(store, version) == 0
    assert same(store.load("gpt@1"), state_of(1))
    with pytest.raises(NotFoundError):
        store.load(f"#{first.id}")
    other.gc(grace_s=0, orphan_age_s=0)
    assert other.verify().ok


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.short(sample=1)
def test_background_saves_take_deltas(tmp_path: Any, engine: str) -> None:  # noqa: ANN401
    """Both engines do; the process keeps keyframes of its own."""
    import ckptstore

    with ckptstore.open(tmp_path / "s", create=True, codec="delta", engine=engine) as store:
        run = store.run("gpt")
        for step in range(3):
            version = run.save_async(state_of(step, elements=400_000), step=step).result()
        assert deltas_of(store, version) > 0
        assert same(run.load(1), state_of(1, elements=400_000))
        assert same(run.load(2), state_of(2, elements=400_000))
