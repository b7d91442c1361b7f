"""Every dtype, shape and memory layout comes back bit by bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.format.dtypes import ITEM_BYTES, QUANTIZED_PER_BYTE, bytes_of
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text, tensor_over

Same = Callable[[object, object], None]
Make = Callable[..., Any]

# torch says so once whenever it makes a complex32 tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")

QUANTIZED = sorted(QUANTIZED_PER_BYTE)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0, 2), (2, 1, 3), (1, 1, 1, 1), (2, 3, 2, 5)]


def _noise(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a contiguous tensor of any dtype with random bits, NaN payloads included."""
    item = ITEM_BYTES[str(dtype).removeprefix("torch.")]
    count = int(np.prod(shape, dtype=np.int64)) * item
    bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
    strides = torch.empty(shape, device="meta").stride()
    if dtype == torch.bool:
        bits &= 1
    return tensor_over(bits.clone().untyped_storage(), dtype, 0, shape, strides)


def _quantize(dtype: torch.dtype, shape: tuple[int, ...], *, channel: bool) -> torch.Tensor:
    if channel:
        scales = torch.rand(shape[0], dtype=torch.float64) + 0.1
        zeros = torch.zeros(shape[0], dtype=torch.int64)
        if dtype in (torch.quint4x2, torch.quint2x4):
            scales, zeros = scales.float(), zeros.float()
        return torch.quantize_per_channel(torch.randn(shape), scales, zeros, 0, dtype)
    return torch.quantize_per_tensor(torch.randn(shape), 0.07, 1, dtype)


def test_every_dtype_of_torch_is_known() -> None:
    """The format's list is the installed torch's, quantized types included."""
    found = {str(v).removeprefix("torch.") for v in vars(torch).values() if type(v) is torch.dtype}
    assert found == {*ITEM_BYTES, *QUANTIZED_PER_BYTE}
    for name in ITEM_BYTES:
        assert dtype_named(name).itemsize == ITEM_BYTES[name]
        assert dtype_text(dtype_named(name)) == name


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_and_shape(name: str, shelf: Make, assert_same: Same) -> None:
    """Random bits of each dtype survive in every shape, 0-d and empty ones included."""
    state = [_noise(dtype_named(name), shape) for shape in SHAPES]
    kept = shelf(state)
    assert_same(state, kept.load())
    assert all(record.dtype == name and record.order is None for record in kept.records)
    for tensor, record in zip(state, kept.records, strict=True):
        assert ctypes.string_at(tensor.data_ptr(), record.nbytes) == record.data


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_strided(name: str, shelf: Make, assert_same: Same) -> None:
    """Slices, transposes and expansions of each dtype keep their values, and dense ones strides."""
    base = _noise(dtype_named(name), (4, 6, 5))
    dense = base.permute(2, 0, 1)
    gappy = base[:, 1:5:2].permute(1, 2, 0)
    wide = base[:1, :1].expand(3, 2, 5)
    back = shelf({"dense": dense}).load()["dense"]
    assert_same(dense, back)
    loaded = shelf({"gappy": gappy}).load()["gappy"]
    item = ITEM_BYTES[name]
    for index in itertools.product(*map(range, gappy.shape)):
        mine, theirs = gappy[index], loaded[index]
        assert _element(mine, item) == _element(theirs, item)
    kept = shelf({"wide": wide})
    assert_same(wide, kept.load()["wide"])
    assert sum(record.nbytes for record in kept.records) == 5 * item


def _element(scalar: torch.Tensor, item: int) -> bytes:
    return ctypes.string_at(scalar.data_ptr(), item)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_permuted_memory_is_kept_without_a_copy(
    order: tuple[int, ...], shelf: Make, assert_same: Same
) -> None:
    """A dense tensor in any order of dims is read from its own memory and keeps its strides."""
    tensor = _noise(torch.float32, (2, 3, 4)).permute(order)
    kept = shelf(tensor)
    view = kept.sources[0].payload.view()
    assert view is not None
    assert np.frombuffer(view, np.uint8).ctypes.data == tensor.data_ptr()
    assert_same(tensor, kept.load())


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 1), (1, 1, 1, 1)])
def test_channels_last(shape: tuple[int, ...], shelf: Make, assert_same: Same) -> None:
    """channels_last strides come back exactly, also where sizes of 1 make them ambiguous."""
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    assert_same(tensor, shelf(tensor).load())


@pytest.mark.parametrize("strides", [(100, 1), (1, 1), (7, 1)])
def test_odd_strides_of_size_one(strides: tuple[int, ...], shelf: Make, assert_same: Same) -> None:
    """Strides that no element depends on, but that torch shows, come back too."""
    tensor = torch.randn(8).as_strided((1, 3), strides)
    assert_same(tensor, shelf(tensor).load())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_quantized(name: str, shelf: Make, assert_same: Same) -> None:
    """Quantized tensors of every type keep integers, scheme, scales and zero points."""
    dtype = getattr(torch, name)
    schemes = [True] if QUANTIZED_PER_BYTE[name] > 1 else [False, True]
    for channel in schemes:
        tensor = _quantize(dtype, (3, 5), channel=channel)
        back = shelf({"w": tensor}).load()["w"]
        assert_same(tensor, back)
        assert back.qscheme() == tensor.qscheme()
        if channel:
            assert back.q_per_channel_axis() == tensor.q_per_channel_axis()
            assert_same(tensor.q_per_channel_scales(), back.q_per_channel_scales())
            assert_same(tensor.q_per_channel_zero_points(), back.q_per_channel_zero_points())
        else:
            assert (back.q_scale(), back.q_zero_point()) == (
                tensor.q_scale(),
                tensor.q_zero_point(),
            )


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_quantized_layouts_and_ties(shelf: Make, assert_same: Same) -> None:
    """A transposed quantized tensor keeps its strides, one object that occurs twice stays one."""
    tensor = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
    back = shelf([tensor, tensor, tensor.t()]).load()
    assert back[0] is back[1]
    assert_same(tensor.t(), back[2])
    assert back[2].data_ptr() == back[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_conjugate_views(dtype: torch.dtype, shelf: Make) -> None:
    """Lazy conjugates and negatives are saved as the values that they stand for."""
    tensor = torch.randn(4, 5, dtype=torch.complex64).to(dtype)
    state = {"c": tensor.conj(), "i": tensor.conj().imag, "plain": tensor, "s": tensor.conj()[:, 2]}
    back = shelf(state).load()
    for key, value in state.items():
        assert torch.equal(torch.view_as_real(back[key].to(torch.complex64)), torch.view_as_real(
            value.resolve_conj().resolve_neg().to(torch.complex64)))  # fmt: skip
        assert not back[key].is_conj()
        assert not back[key].is_neg()


def test_read_only_and_shared_memory(shelf: Make, assert_same: Same) -> None:
    """Tensors over memory that torch did not allocate are read like all others."""
    array = np.arange(12, dtype=np.int16)
    state = [torch.from_numpy(array)[3:], torch.zeros(4).share_memory_()]  # type: ignore[no-untyped-call]
    assert_same(state, shelf(state).load())


def test_bytes_of_refuses_nonsense() -> None:
    """Sizes of records are computed without overflow, and refused where there are none."""
    assert bytes_of("float64", (1 << 40, 1 << 40)) == 1 << 83
    with pytest.raises(Exception, match="unknown dtype"):
        bytes_of("float7", ())
    with pytest.raises(Exception, match="negative"):
        bytes_of("float32", (-1,))
