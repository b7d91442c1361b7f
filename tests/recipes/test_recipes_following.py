"""Tensors made while their sources are read: any order of pieces, any setting of denormals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from damaging import flip_pack
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples

import ckptstore
from ckptstore.checkpoint import derived_decode, ranges
from ckptstore.checkpoint.derived_decode import DerivedDecode
from ckptstore.encodings.coding import cast_elements
from ckptstore.errors import CorruptTensorError
from ckptstore.events import Progress
from ckptstore.hashing import blake3_digest
from ckptstore.states import load
from ckptstore.store import Store
from ckptstore.tensors.bfloat16 import to_bfloat16

State = dict[str, torch.Tensor]
CHUNK = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return an open store on disk with small chunks."""
    with ckptstore.open(tmp_path / "ckpts", create=True, chunk_bytes=CHUNK) as opened:
        yield opened


def _state(seed: int = 0) -> State:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    masters = {
        "large": normal(900, 1000),  # four pieces
        "one": normal(300, 300),  # one piece, two that are cut alike
        "again": normal(300, 300),
        "small": normal(40, 40),  # in a slab with others
        "smaller": normal(30, 30),
        "turned": normal(500, 200).t(),
    }
    masters["again"].copy_(masters["one"])  # equal pieces are stored once, and read into both
    low = {f"{name}.low": master.to(torch.bfloat16) for name, master in masters.items()}
    low["large.half"] = masters["large"].to(torch.float16)
    return {**low, **masters}


def _same(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _empty(state: State) -> State:
    return {name: torch.full_like(tensor, 9) for name, tensor in state.items()}


def _no_second_reading() -> Any:  # noqa: ANN401 - a patch
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was made after the reading")

    return patch.object(ranges, "_Making", refuse)


@pytest.mark.parametrize("codec", ["raw", "planes", "delta"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.short(sample=2)
def test_whole_loads_make_all_while_they_read(store: Store, codec: str, into: bool) -> None:
    """Raw, encoded, in slabs, as differences, shared: the bits of the state come back."""
    state = _state()
    run = store.run("gpt")
    run.save(state, step=0, codec=codec)
    for step in range(1, 3):
        for name, tensor in state.items():
            if "." not in name:
                tensor[::7] *= 1.001
                for low in (f"{name}.low", f"{name}.half"):
                    if low in state:
                        state[low].copy_(tensor)
        version = run.save(state, step=step, codec=codec)
        assert version.receipt["derived_count"] == 7
    target = _empty(state) if into else None
    seen: list[Progress] = []
    with _no_second_reading():
        loaded = store.load("gpt@2", into=target, progress=seen.append)
    assert _same(loaded, state)
    assert target is None or _same(target, state)
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert seen[-1].done == seen[-1].total == sum(tensor.nbytes for tensor in state.values())


def test_without_what_they_follow_from_they_are_made_as_ever(store: Store) -> None:
    """A load of the weights alone, or into strided memory, still gives their bits."""
    state = _state()
    store.run("gpt").save(state, step=0)
    loaded = store.load("gpt@0", include=["*.low", "large.half"])
    assert set(loaded) == {name for name in state if "." in name}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    strided = {
        name: torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        for name, tensor in state.items()
    }
    store.load("gpt@0", into=strided)
    assert _same(strided, state)


@pytest.mark.parametrize("made", ["large.low", "large.half", "small.low", "one.low"])
def test_arithmetic_that_differs_is_noticed(store: Store, made: str) -> None:
    """What is made is compared with the digest of the recipe, whichever thread made it."""
    state = _state()
    store.run("gpt").save(state, step=0)
    dtype = str(state[made].dtype).removeprefix("torch.")

    def wrong(*args: Any) -> None:  # noqa: ANN401 - as the function
        cast_elements(*args)
        one_piece = len(args[2]) != CHUNK // 4000 * 4000  # of "large" the last
        if args[1] == dtype and one_piece:
            np.frombuffer(args[3], np.uint8)[-1] ^= 1

    with (
        patch.object(derived_decode, "cast_elements", wrong),
        patch.object(load, "to_bfloat16", None),
        pytest.raises(CorruptTensorError, match=r"another digest"),
    ):
        store.load("gpt@0")


@pytest.mark.parametrize("what", [0, -1, slice(None)])
@pytest.mark.short(sample=1)
def test_rough_arithmetic_is_followed_by_the_exact_one(store: Store, what: Any) -> None:  # noqa: ANN401
    """What is faster may be wrong, in one element or all: then the definition decides."""
    state = _state()
    state["large"][7, 7] = float("nan")
    state["large.low"][7, 7] = float("nan")
    state["large.half"][7, 7] = float("nan")
    version = store.run("gpt").save(state, step=0)
    assert version.receipt["derived_count"] == 7
    asked = []

    def rough(values: np.ndarray, out: np.ndarray) -> None:
        asked.append(len(values))
        to_bfloat16(values, out)
        out[what] ^= 1

    target = _empty(state)
    with patch.object(load, "to_bfloat16", rough), _no_second_reading():
        store.load("gpt@0", into=target)
    assert sum(asked) >= 900_000
    for name, tensor in state.items():
        assert torch.equal(target[name].isnan(), tensor.isnan())
        assert torch.equal(target[name].nan_to_num(), tensor.nan_to_num())
    with (
        patch.object(load, "to_bfloat16", rough),
        patch.object(derived_decode, "cast_elements", lambda *_: None),
        pytest.raises(CorruptTensorError, match="another digest"),
    ):
        store.load("gpt@0")


def test_damage_is_told_before_anything_is_returned(store: Store, tmp_path: Path) -> None:
    """A flipped bit in a piece that others follow from is an error of the load."""
    state = _state()
    store.run("gpt").save(state, step=0, codec="raw")
    (pack,) = (path for path in tmp_path.rglob("*") if path.stat().st_size > CHUNK)
    flip_pack(pack)
    with pytest.raises(CorruptTensorError, match=r"large|one|again|turned"):
        store.load("gpt@0")


# --- one tensor ---------------------------------------------------------------------------------
def _one(values: np.ndarray, cuts: list[int]) -> tuple[DerivedDecode, list[memoryview], bytearray]:
    """Return a tensor that is to be made, the pieces of its source, and where it goes."""
    ends = np.array([4 * at for at in cuts] or [values.nbytes], np.int64)
    record = SimpleNamespace(
        dtype="bfloat16",
        nbytes=values.nbytes // 2,
        recipe=SimpleNamespace(sources=(0,), kind="cast", digest=blake3_digest(_wanted(values))),
    )
    manifest: Any = SimpleNamespace(tensors=[SimpleNamespace(dtype="float32"), record])
    out = bytearray(values.nbytes // 2)
    one = DerivedDecode(manifest, 1, ends, memoryview(out))
    data = values.view(np.uint8).data
    starts = [0, *ends[:-1].tolist()]
    return one, [data[a:b] for a, b in zip(starts, ends.tolist(), strict=True)], out


def _wanted(values: np.ndarray) -> bytes:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 400), st.data())
def test_any_order_of_pieces_gives_the_digest(count: int, data: st.DataObject) -> None:
    """Pieces come in any order; their digest is taken in that of the tensor."""
    values = np.random.default_rng(count).standard_normal(count, np.float32)
    cuts = sorted({*data.draw(st.lists(st.integers(1, count), max_size=9)), count})
    one, pieces, out = _one(values, cuts)
    for piece in data.draw(st.permutations(range(len(pieces)))):
        one.taking(piece)(pieces[piece])
    assert bytes(out) == _wanted(values)
    assert one.made(values.view(np.uint8).data).digest() == blake3_digest(bytes(out))


def test_many_threads_make_the_pieces_of_one_tensor() -> None:
    """Each piece is made and digested once, whoever comes first."""
    values = np.random.default_rng(5).standard_normal(64 * 5000, np.float32)
    for turn in range(20):
        one, pieces, out = _one(values, list(range(5000, len(values) + 1, 5000)))
        together = threading.Barrier(4)
        order = np.random.default_rng(turn).permutation(len(pieces)).tolist()

        def make(
            part: list[int],
            one: DerivedDecode = one,
            pieces: list[memoryview] = pieces,
            together: threading.Barrier = together,
        ) -> None:
            together.wait()
            for piece in part:
                one.taking(piece)(pieces[piece])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(make, order[at::4]) for at in range(4)]:
                done.result()
        assert one.made(values.view(np.uint8).data).digest() == blake3_digest(bytes(out))
        assert bytes(out) == _wanted(values)


@pytest.mark.parametrize("flushed_when_saved", [True, False])
def test_what_is_derived_is_read_whatever_becomes_of_denormals(
    tmp_path: Path, *, flushed_when_saved: bool
) -> None:
    """A float32 copy of float64 masters loads bit for bit where the processor is set otherwise."""
    seed = torch.Generator().manual_seed(5)
    masters = torch.randn(4096, dtype=torch.float64, generator=seed)
    masters[::3] *= 1e-40
    if not torch.set_flush_denormal(flushed_when_saved):
        pytest.skip("this processor cannot")
    try:
        state = {"masters": masters, "weights": masters.to(torch.float32)}
        with ckptstore.open(tmp_path / "s", create=True) as store:
            store.run("r").save(state, step=1)
        torch.set_flush_denormal(not flushed_when_saved)
        with ckptstore.open(tmp_path / "s") as store:
            found = store.load("r")
    finally:
        torch.set_flush_denormal(False)
    for name, tensor in state.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()
