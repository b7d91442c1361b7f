"""Casts between float types: torch's own bits, in the thread that asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ckptstore
from ckptstore.encodings.casts import FLOATS, Rounding, raw_dtype, recast, to_float64
from ckptstore.encodings.coding import decode_elements
from ckptstore.format.tables import CASTS
from ckptstore.states import load, save
from ckptstore.tensors import bfloat16
from ckptstore.tensors.bfloat16 import to_bfloat16

PAIRS = list(permutations(FLOATS, 2))
_TORCH_RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _patterns(dtype: str) -> npt.NDArray[Any]:
    """Return every element of a format of up to 16 bits; of a wider one, those that matter."""
    kind = raw_dtype(dtype)
    if kind.itemsize <= 2:
        return np.arange(1 << 8 * kind.itemsize, dtype=np.uint32).astype(kind)
    random = np.random.default_rng(8)
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    single = np.concatenate(
        [
            upper,  # every sign, exponent and first bits of the mantissa ...
            upper | np.uint32(0x8000),  # ... in the middle between two bfloat16
            upper | np.uint32(0x7FFF),
            upper | np.uint32(0x8001),
            np.arange(1 << 20, dtype=np.uint32) << np.uint32(12),  # ties of narrow formats
            random.integers(0, 1 << 32, 1 << 20, dtype=np.uint32),
        ]
    )
    if kind.itemsize == 4:
        return single
    low = random.integers(0, 1 << 29, len(single), dtype=np.uint64)
    exact = to_float64("float32", single).view(np.uint64)
    return np.concatenate([exact, exact | low, random.integers(0, 1 << 64, 1 << 18, np.uint64)])


def _as_torch(dtype: str, raw: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(raw.copy()).view(getattr(torch, dtype))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: str(name))
@pytest.mark.short(sample=8)
def test_casts_are_those_of_torch(source: str, target: str) -> None:
    """Every pattern becomes what torch makes of it; a NaN stays one."""
    raw = _patterns(source)
    made = recast(source, target, raw)
    asked = _as_torch(source, raw).to(getattr(torch, target))
    wanted = asked.view(_TORCH_RAW[FLOATS[target]]).numpy()
    missing = np.isnan(to_float64(target, wanted))
    assert np.array_equal(made[~missing], wanted[~missing])
    assert np.isnan(to_float64(target, made[missing])).all()


def _rounded(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Return float32 bits as bfloat16 ones, as the definition says: element by element."""
    made = []
    for one in bits.tolist():
        if one & 0x7FFF_FFFF > 0x7F80_0000:
            made.append(one >> 31 << 15 | 0x7FC0)
        else:
            made.append((one + 0x7FFF + (one >> 16 & 1)) >> 16)
    return np.array(made, np.uint16)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 65_535, 65_536, 65_537, 140_000])
@pytest.mark.parametrize("ties", [0, 1, 63, 64, 65, 66, 5000])
@pytest.mark.short(sample=12)
def test_ties_and_nan_are_found_wherever_they_are(size: int, ties: int) -> None:
    """Few ties or many, at the ends of the steps of the cast, beside NaN or alone."""
    random = np.random.default_rng(size + ties)
    bits = random.integers(0, 1 << 32, size, np.uint32) & np.uint32(0xBF7F_FFFF) | np.uint32(1)
    ends = [place for place in (0, 65_535, 65_536, size - 1) if place < size]
    places = np.concatenate([ends, random.permutation(size)]).astype(np.int64)[:ties]
    bits[places] = bits[places] & np.uint32(0xFFFF_0000) | np.uint32(0x8000)
    for missing in (0, 2):
        bits[random.integers(0, size, missing)] = np.uint32(0xFFFF_8000)
        bits[random.integers(0, size, missing)] = np.uint32(0x7F80_0001)
        assert np.array_equal(recast("float32", "bfloat16", bits), _rounded(bits))


def _wrong(change: Callable[[npt.NDArray[np.uint16]], None]) -> Rounding:
    def rounding(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        to_bfloat16(values, out)
        change(out)

    return rounding


def _flip(out: npt.NDArray[np.uint16]) -> None:
    out[-1] ^= 1


def _away(out: npt.NDArray[np.uint16]) -> None:
    out[(out & 0x7F80) == 0] &= np.uint16(0x8000)  # denormals become zero


@pytest.mark.parametrize("change", [_flip, _away])
def test_a_rounding_that_is_wrong_is_not_used(change: Any) -> None:  # noqa: ANN401
    """A processor that flushes denormals, or takes the last element otherwise, is found out."""
    bits = _patterns("float32")[:200_000]
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(recast, "float32", "bfloat16", bits, _wrong(change)).result()
    assert np.array_equal(made, _rounded(bits))


def test_a_setting_that_changes_later_is_noticed() -> None:
    """A thread that flushes denormals from now on, after the rounding was tried, is found out."""
    bits = _patterns("float32")[:70_000]
    flushes: list[bool] = []

    def rounding(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        to_bfloat16(values, out)
        if flushes:
            _away(out)

    def later() -> Any:  # noqa: ANN401 - an array
        recast("float32", "bfloat16", bits, rounding)
        flushes.append(True)
        return recast("float32", "bfloat16", bits, rounding)

    with ThreadPoolExecutor(1) as pool:
        assert np.array_equal(pool.submit(later).result(), _rounded(bits))


@pytest.mark.parametrize("together", [True, False])
def test_torch_rounds_as_defined(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """It is used, in a thread of its own too, and every NaN is the one that is defined."""
    if not together:
        monkeypatch.delattr(torch, "_foreach_copy_")
    bits = _patterns("float32")
    calls: list[int] = []

    def counted(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        calls.append(len(values))
        to_bfloat16(values, out)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(recast, "float32", "bfloat16", bits, counted).result()
    assert len(bits) in calls
    assert np.array_equal(made, _rounded(bits))


def test_a_rounding_is_used_by_the_callers_that_hand_it_in_alone(tmp_path: Path) -> None:
    """A save and a load by torch leave nothing behind: a cast without a rounding is NumPy's."""
    calls: list[int] = []

    def counted(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        calls.append(len(values))
        to_bfloat16(values, out)

    master = torch.linspace(-3, 3, 20_000)
    state = {"master": master, "weight": master.bfloat16()}
    with (
        patch.object(save, "to_bfloat16", counted),
        patch.object(load, "to_bfloat16", counted),
        ckptstore.open(tmp_path / "store", create=True) as store,
    ):
        store.run("gpt").save(state, step=0)
        saved = calls.count(20_000)
        assert torch.equal(store.load("gpt@0")["weight"], state["weight"])
    assert saved
    assert calls.count(20_000) > saved
    calls.clear()
    raw = master.numpy().view(np.uint32)
    assert np.array_equal(recast("float32", "bfloat16", raw), _rounded(raw))
    assert not calls


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: str(name))
def test_zeros_and_infinities_keep_their_sign(source: str, target: str) -> None:
    """-0 is -0 in every format; an infinity stays where there is one, else the largest value."""
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).to(getattr(torch, source))
    raw = values.view(_TORCH_RAW[FLOATS[source]]).numpy()
    made = to_float64(target, recast(source, target, raw))
    assert np.array_equal(np.signbit(made), [False, True, False, True])
    largest = 448.0 if "float8_e4m3fn" in (source, target) else np.inf
    assert made.tolist() == [0, 0, largest, -largest]


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "float8_e5m2"])
def test_a_nan_made_anew_is_quiet(dtype: str) -> None:
    """What is left of a NaN of float32 is its sign, on every processor."""
    raw = np.array([0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0xFFC0_0000], np.uint32)
    made = recast("float32", dtype, raw)
    assert made[0] == made[2]
    assert made[1] == made[3]
    assert int(made[0]) ^ int(made[1]) == 1 << 8 * FLOATS[dtype] - 1


def test_decoding_a_cast_is_the_cast() -> None:
    """What a load restores is what was measured, from any element on and in any number."""
    raw = _patterns("bfloat16")
    whole = recast("bfloat16", "float32", raw)
    for start, stop in ((0, len(raw)), (1, 2), (7, 65_530), (65_536, 65_536)):
        out = np.zeros(stop - start, np.uint32)
        codes = raw[start:stop].view(np.uint8).data
        decode_elements(
            "cast", "", 0, "float32", "bfloat16", start, codes, None, out.view(np.uint8).data
        )
        assert np.array_equal(out, whole[start:stop])


def test_the_format_knows_the_same_types() -> None:
    """What a manifest may say of a cast is what can be cast."""
    assert set(FLOATS) == CASTS


@pytest.mark.parametrize(
    ("kind", "code", "dtype", "source"),
    [
        ("cast", "", "int8", "float32"),
        ("cast", "", "float32", "int8"),
        ("scaled", "cubic", "float32", "int8"),
        ("folded", "", "float32", "float16"),
    ],
)
def test_what_is_unknown_is_refused(kind: str, code: str, dtype: str, source: str) -> None:
    """Names that no manifest holds are an error, not a guess."""
    out = memoryview(bytearray(4))
    with pytest.raises(ValueError, match=r"unknown|restores"):
        decode_elements(kind, code, 8, dtype, source, 0, memoryview(b"\0"), out, out)


def test_lengths_that_do_not_fit_are_refused() -> None:
    """Fewer codes than elements, or fewer scales than blocks, are an error."""
    out = memoryview(bytearray(64))
    with pytest.raises(ValueError, match="elements for"):
        decode_elements("cast", "", 0, "float32", "float16", 0, out[:30], None, out)
    with pytest.raises(ValueError, match="scales"):
        decode_elements("scaled", "linear", 8, "float32", "int8", 4, out[:16], out[:8], out)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.short(sample=6)
def test_flushed_denormals_change_no_cast(source: str, target: str) -> None:
    """A processor that takes denormal numbers for zero makes the same bits of each element.

    Or what is derived where they are flushed could not be read where they are not.
    """
    raw = _patterns(source)
    if source == "float64":  # ties between the denormals of float32, and what is near the least
        random = np.random.default_rng(4)
        ties = random.integers(0, 1 << 25, 1 << 16) * 2.0**-150
        near = np.nextafter(2.0**-126, [0, 1]), ties, np.nextafter(ties, 0), np.nextafter(ties, 1)
        raw = np.concatenate([raw, *(part.view(np.uint64) for part in near)])
    wanted = recast(source, target, raw.copy())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        found = recast(source, target, raw.copy())
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found, wanted)


Functions = tuple[Callable[[], int], Callable[[int], None]]
# None: no OpenMP in the process. The other one is not the library that torch is made with.
WITHOUT: list[Functions | None] = [None, (lambda: 7, lambda _count: None)]
SIZES = (0, 1, 32_704, 32_705, 32_768, 1 << 20, (1 << 20) + 17)


def _cast(size: int) -> bool:
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    made = np.zeros(size, np.uint16)
    to_bfloat16(values, made)
    wanted = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    return np.array_equal(made, wanted.view(np.uint16))


@pytest.mark.parametrize("size", SIZES)
def test_it_gives_what_torch_gives(size: int) -> None:
    """Arrays of every size are rounded whole, whether or not torch would call threads for them."""
    assert _cast(size)


@pytest.mark.parametrize("functions", WITHOUT)
@pytest.mark.parametrize("size", SIZES)
def test_no_openmp_changes_nothing(size: int, functions: Functions | None) -> None:
    """Where torch's threads cannot be set from outside, the result is the same."""
    with patch.object(bfloat16, "_openmp", lambda: functions):
        assert _cast(size)


def test_the_setting_of_the_thread_is_kept() -> None:
    """A cast leaves the number of torch's threads as it was, in its thread and in others."""
    before = torch.get_num_threads()
    found: list[int] = []

    def own() -> None:
        torch.set_num_threads(3)
        _cast(1 << 20)
        found.append(torch.get_num_threads())

    try:
        thread = threading.Thread(target=own)
        thread.start()
        thread.join()
        _cast(1 << 20)
        assert found == [3]
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_a_cast_that_fails_keeps_the_setting() -> None:
    """Arrays that do not fit each other raise, and the number of threads is as it was."""
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        to_bfloat16(np.zeros(1 << 20, np.float32), np.zeros(7, np.uint16))
    assert torch.get_num_threads() == before
