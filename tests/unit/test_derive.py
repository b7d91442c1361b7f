"""Derived tensors: only what is another tensor rounded, in every bit, is found; and cheaply."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples

import ckptstore
from ckptstore.checkpoint.derived_check import KnownCasts, derived_pairs, prove
from ckptstore.checkpoint.encoded_sources import source_of
from ckptstore.encodings.coding import decode_elements
from ckptstore.format.blocks import Blocks
from ckptstore.format.manifest import TensorRecord
from ckptstore.objects.sources import PieceSource

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Bytes:
    """The bytes of a tensor, which count how many of them are read."""

    def __init__(self, tensor: torch.Tensor, *, in_place: bool = True) -> None:
        self._data = memoryview(
            bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        )
        self._in_place = in_place
        self.read_bytes = 0

    def view(self) -> memoryview | None:
        return self._data if self._in_place else None

    def copy_into(self, start: int, out: memoryview) -> None:
        self.read_bytes += len(out)
        out[:] = self._data[start : start + len(out)]


class Candidate(NamedTuple):
    """A tensor of a state."""

    record: TensorRecord
    payload: _Bytes
    wished: bool = False
    """Whether a rule asks for a lossy form of it."""

    @property
    def source(self) -> PieceSource:
        return source_of(self.record, self.payload)


def _candidate(
    tensor: torch.Tensor,
    *,
    in_place: bool = True,
    wished: bool = False,
    shape: tuple[int, ...] | None = None,
    order: tuple[int, ...] | None = None,
    blocks: Blocks | None = None,
) -> Candidate:
    record = TensorRecord(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape) if shape is None else shape, order=order, role="",
        nbytes=tensor.nbytes, blocks=blocks,
    )  # fmt: skip
    return Candidate(record, _Bytes(tensor, in_place=in_place), wished)


def _is_cast_of(low: Candidate, high: Candidate) -> bool:
    """Return whether a save would store a tensor as a recipe over another one."""
    known, grid = KnownCasts(None), high.record.nbytes
    return prove(low.source, high.source, low.record, known, grid) is not None


def _pairs(state: list[Candidate]) -> dict[int, int]:
    """Return which tensors of a state are found to be another one, each pair compared in full."""
    return derived_pairs(
        [one.source for one in state],
        [one.record for one in state],
        [place for place, one in enumerate(state) if one.wished],
        lambda low, high: _is_cast_of(state[low], state[high]),
    )


def _floats(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _state(layers: int, low: torch.dtype) -> list[Candidate]:
    """Return weights, masters and two moments of some layers, all weights first."""
    masters = [_floats((64, 48), seed) for seed in range(layers)]
    return [
        *(_candidate(master.to(low)) for master in masters),
        *(_candidate(master) for master in masters),
        *(_candidate(_floats((64, 48), 1000 + seed)) for seed in range(2 * layers)),
    ]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_weights_are_found_to_be_their_masters(low: torch.dtype) -> None:
    """Each weight is its own master, among many tensors of one shape."""
    found = _pairs(_state(20, low))
    assert found == {place: 20 + place for place in range(20)}


def test_one_bit_is_enough_to_differ() -> None:
    """One element of a million that is one unit off, anywhere, and nothing is derived."""
    master = _floats((1024, 1024), 1)
    for at in (0, 1, 524_289, 1024 * 1024 - 1):
        low = master.to(torch.bfloat16)
        bits = low.view(torch.int16).reshape(-1)
        bits[at] ^= 1
        assert _pairs([_candidate(low), _candidate(master)]) == {}
        bits[at] ^= 1
        assert _pairs([_candidate(low), _candidate(master)]) == {0: 1}


def test_a_nan_with_another_payload_differs() -> None:
    """All bits count: what a load would give is compared, not what the numbers mean."""
    master = _floats((64, 64), 1)
    master[3, 4] = float("nan")
    low = master.to(torch.bfloat16)
    bits = low.view(torch.int16)
    restored = memoryview(bytearray(2))
    nan = memoryview(master[3, 4].reshape(1).view(torch.uint8).numpy().tobytes())
    decode_elements("cast", "", 0, "bfloat16", "float32", 0, nan, None, restored)
    bits[3, 4] = int(np.frombuffer(restored, np.int16)[0])
    assert _pairs([_candidate(low), _candidate(master)]) == {0: 1}
    bits[3, 4] ^= 1
    assert torch.isnan(low[3, 4])
    assert _pairs([_candidate(low), _candidate(master)]) == {}


def test_zeros_denormals_and_infinities_round_as_torch_does() -> None:
    """Every special value of float32 that a cast meets, against torch's own cast."""
    values = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.3895314e38, 3.4e38, float("inf"), -float("inf"),
         65504.0, 65519.9, 65520.0, 5.9e-8, 2.9e-8, 6.1e-5, 1.00390625, 1.01171875],
    ).repeat(64)  # fmt: skip
    for low in (torch.bfloat16, torch.float16):
        assert _pairs([_candidate(values.to(low)), _candidate(values)]) == {0: 1}


def test_truncated_weights_are_not_derived() -> None:
    """Who cuts bits off instead of rounding gets his bytes stored, not other ones back."""
    master = _floats((64, 64), 1)
    cut = (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert _pairs([_candidate(cut), _candidate(master)]) == {}


def test_shape_and_order_must_agree() -> None:
    """Other shapes, and the same elements in another order, are other tensors."""
    master = _floats((64, 48), 1)
    low = master.to(torch.bfloat16)
    assert _pairs([_candidate(low.reshape(48, 64)), _candidate(master)]) == {}
    turned = _candidate(low, shape=(64, 48), order=(1, 0))
    assert _pairs([turned, _candidate(master)]) == {}
    whole = _candidate(master, shape=(64, 48), order=(1, 0))
    assert _pairs([turned, whole]) == {0: 1}


def test_no_source_is_derived_itself() -> None:
    """Of float64, float32 and bfloat16 in a chain each is followed for one step at most."""
    wide = _floats((64, 48), 1, torch.float64)
    middle = wide.to(torch.float32)
    state = [_candidate(wide), _candidate(middle), _candidate(middle.to(torch.bfloat16))]
    assert _pairs(state) == {2: 1}
    assert _pairs(state[:2]) == {1: 0}
    found = _pairs([state[0], _candidate(wide.to(torch.bfloat16)), state[1]])
    assert not found.keys() & set(found.values())


def test_what_may_not_is_left_alone() -> None:
    """Masters in fewer bits give nothing, weights under a rule take nothing, nor do small ones."""
    master = _floats((64, 48), 1)
    low = master.to(torch.bfloat16)
    assert _pairs([_candidate(low), _candidate(master, wished=True)]) == {}
    cut = Blocks.of([((0, 0), (32, 48)), ((32, 0), (32, 48))])
    assert _pairs([_candidate(low, blocks=cut), _candidate(master)]) == {}
    for shape in ((0,), (0, 7), (), (7,), (511,)):
        few = _floats(shape, 1)
        assert _pairs([_candidate(few.to(torch.float16)), _candidate(few)]) == {}
    enough = _floats((512,), 1)
    assert _pairs([_candidate(enough.to(torch.float16)), _candidate(enough)]) == {0: 1}


def test_two_weights_of_one_master_both_follow() -> None:
    """A copy of the weights in each precision, and an equal copy of one, cost nothing."""
    master = _floats((64, 48), 1)
    half = master.to(torch.float16)
    state = [half, master.to(torch.bfloat16), half.clone(), master]
    assert _pairs([_candidate(one) for one in state]) == {0: 3, 1: 3, 2: 3}


def test_integers_and_equal_copies_are_not_looked_at() -> None:
    """Equal pieces are stored once anyway; only what differs in precision is compared."""
    master = _floats((64, 48), 1)
    state = [_candidate(one, in_place=False) for one in (master, master.clone())]
    state.append(_candidate(torch.ones(64, 48, dtype=torch.int32), in_place=False))
    assert _pairs(state) == {}
    assert all(one.payload.read_bytes == 0 for one in state)


def test_where_nothing_matches_hardly_anything_is_read() -> None:
    """Of a tensor that is no other's rounding, 1,024 elements are read; of lone shapes none."""
    lows = [_candidate(_floats((512, 512), n).bfloat16(), in_place=False) for n in range(9)]
    highs = [_candidate(_floats((512, 512), 50 + n), in_place=False) for n in range(9)]
    assert _pairs([*lows, *highs]) == {}
    for one in (*lows, *highs):
        read = one.payload.read_bytes
        assert read == 1024 * (2 if one.record.dtype == "bfloat16" else 4)


def test_tensors_of_zeros_are_compared_a_few_times_at_most() -> None:
    """Moments before the first step and sparse gradients agree in samples: the search stays linear.

    Ten rounded tensors whose samples are all zero meet ten of zeros: two full comparisons each.
    """
    lows = []
    for place in range(10):
        sparse = torch.zeros(512, 512, dtype=torch.bfloat16)
        sparse[100 + place, 3] = 1
        lows.append(_candidate(sparse, in_place=False))
    highs = [_candidate(torch.zeros(512, 512), in_place=False) for _ in range(10)]
    assert _pairs([*lows, *highs]) == {}
    compared = sum(one.payload.read_bytes for one in lows)
    looked_at, sample = 8 * 1024 * 2, 1024 * 2
    assert compared <= 10 * (2 * (512 * 512 * 2 + looked_at) + sample)


def test_a_tensor_on_a_device_is_read_in_pieces() -> None:
    """Without memory to look at in place the result is the same."""
    master = _floats((1024, 700), 1)
    state = [_candidate(one, in_place=False) for one in (master.to(torch.bfloat16), master)]
    assert _pairs(state) == {0: 1}


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(min_size=2048, max_size=2048), st.sampled_from(["bfloat16", "float16"]))
def test_what_is_derived_is_what_a_load_gives(data: bytes, low: str) -> None:
    """For any bits: the pair is found if and only if the cast that restores gives these bits."""
    master = torch.frombuffer(bytearray(data), dtype=torch.float32)
    restored = bytearray(1024)
    decode_elements("cast", "", 0, low, "float32", 0, memoryview(data), None, memoryview(restored))
    right = torch.frombuffer(restored, dtype=LOW[low])
    high = _candidate(master)
    assert _pairs([_candidate(right), high]) == {0: 1}
    ours, theirs = _candidate(right), _candidate(master.to(LOW[low]))
    same = bytes(restored) == master.to(LOW[low]).view(torch.uint8).numpy().tobytes()
    assert _is_cast_of(ours, high)
    assert _is_cast_of(theirs, high) == same


def _bit_pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 and bfloat16 bits around every border of rounding, and what is right."""
    low = np.repeat(np.arange(1 << 16, dtype=np.uint32), 9)
    apart = np.array([-0x10000, -0x8001, -0x8000, -0x7FFF, 0, 1, 0x7FFF, 0x8000, 0x8001])
    high = ((low.astype(np.int64) << 16) + np.tile(apart, 1 << 16)).astype(np.uint32)
    made = np.empty(len(low), np.uint16)
    out, codes = made.data.cast("B"), high.data.cast("B")
    decode_elements("cast", "", 0, "bfloat16", "float32", 0, codes, None, out)
    return high, low.astype(np.uint16), made == low


def _is_proved(high: np.ndarray, low: np.ndarray) -> bool:
    """Return whether a save would store bfloat16 bits as a recipe over float32 bits."""
    given, other = (_candidate(torch.from_numpy(bits)) for bits in (low, high))
    source = given._replace(record=given.record.replace(dtype="bfloat16"))
    return _is_cast_of(source, other._replace(record=other.record.replace(dtype="float32")))


def test_rounding_is_told_from_its_neighbours() -> None:
    """Ties, infinities, NaN, both zeros: by their distance the same verdict as by making them."""
    high, low, right = _bit_pairs()
    assert right.any()
    assert not right.all()
    for start in range(0, len(low), 1 << 14):
        part = slice(start, start + (1 << 14))
        good = right[part]
        assert not good.any() or _is_proved(high[part][good], low[part][good])
        for place in np.flatnonzero(~good)[::97]:
            few = np.append(np.flatnonzero(good)[:50], place)
            assert not _is_proved(high[part][few], low[part][few])
    finite = right & ((low & 0x7F80) != 0x7F80)
    for place in np.flatnonzero(~right & ((low & 0x7F80) != 0x7F80))[::211]:
        few = np.append(np.flatnonzero(finite)[:50], place)
        assert not _is_proved(high[few], low[few])


def test_a_tensor_that_only_seems_to_follow_is_stored(tmp_path: Path) -> None:
    """Where the 64 elements agree and others do not, the next tensor is tried, or none."""
    master = torch.zeros(300, 100)
    master[7, 7] = 1.5
    other = torch.zeros(300, 100)
    lone = torch.zeros(300, 100, dtype=torch.bfloat16)
    lone[9, 9] = 3.0
    state = {
        "model": {"w": master.to(torch.bfloat16), "v": lone},
        "optimizer": {"first": other, "second": master},
    }
    with ckptstore.open(tmp_path / "store", create=True) as store:
        version = store.run("a").save(state, step=0)
        assert version.receipt["derived_count"] == 1
        loaded = store.load("a@latest")
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded[part][name], tensor)
