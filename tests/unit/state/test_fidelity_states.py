"""States come back as they were: every dtype, kind of tensor, container and value."""

from __future__ import annotations

import ctypes
import datetime as dt
import itertools
import math
import pathlib
import random  # noqa: TID251 - its state is what is saved here
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from shortening import examples

from ckptstore.errors import StateError
from ckptstore.format.dtypes import ITEM_BYTES, QUANTIZED_PER_BYTE, bytes_of
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.tensor_bytes import dtype_named, dtype_text, tensor_over

Same = Callable[[object, object], None]
Make = Callable[..., Any]
PLAIN = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**400, 0.0, -0.0, 1e-310,
    math.inf, -math.inf, math.nan, "", "päth/\U0001f600", "lone \udcff surrogate", b"", b"\x00\xff",
    bytearray(b"ab"), 1 + 2j, complex(math.nan, -0.0), range(3), range(10, 0, -3), slice(None, 5),
    slice(2**70, None, 3), torch.float8_e4m3fn, torch.device("cuda:3"), torch.Size([2, 0, 3]),
    torch.Size([]), pathlib.Path("/a/b c"), pathlib.PurePosixPath("x"),
    pathlib.PureWindowsPath("C:\\x"), dt.date(2026, 2, 3), dt.timedelta(days=-1, microseconds=3),
    dt.datetime(2026, 2, 3, 4, 5, 6, 7), dt.datetime(2026, 2, 3, fold=1),  # noqa: DTZ001
    dt.datetime(2026, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
    set(), {1, 2, "x", (3, (b"y", None))}, frozenset({2.5, False}), {2**80, "\udc80"},
]  # fmt: skip
CONTAINERS: list[Any] = [
    {}, [], (), deque(), deque([1, 2], maxlen=3), OrderedDict(b=1, a=2), Counter({"x": 2, 3: -1}),
    defaultdict(int, {"a": 1}), defaultdict(None, {"a": 1}), defaultdict(list, a=[1]),
    {1: "a", "1": "b", 1.5: "c", None: "d", b"k": "e", (1, "z", (2,)): "f", True + 1: "g"},
    {True: 1, 0: 2}, {2**90: 1, "\udc81": 2, (2**90, "\udc82"): 3}, [[[[[]]]]], ({"a": ({},)},),
]  # fmt: skip
ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(24, dtype=np.uint16).reshape(2, 3, 4).transpose(1, 2, 0), np.array(3.5),
    np.arange(10)[::-2], np.arange(20).reshape(4, 5)[1:3, ::2], np.zeros((0, 3), np.float16),
    np.broadcast_to(np.arange(3), (2, 3)), np.array(["a", "bcd"]), np.array([b"a", b"bc"]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"), np.array([5], dtype="m8[25s]"),
    np.zeros(2, dtype=[("a", "<i4"), ("b", ">f8", (2, 2)), ("c", [("d", "S3"), ("e", "?")])]),
    np.zeros((2, 2), dtype=np.dtype([("a", "u1"), ("b", "<i8")], align=True), order="F"),
    np.zeros(3, dtype={"names": ["x"], "formats": ["<i2"], "offsets": [4], "itemsize": 16}),
    np.zeros(2, dtype=[(("title", "name"), "<i4")]), np.array([1 + 2j], dtype=np.complex64),
    np.array([True, False]), np.zeros(2, "V5"), np.zeros(2, "V0"), np.array([np.nan, -0.0]),
    np.zeros((2, 0), "S4"),
]  # fmt: skip
if np.dtype(np.longdouble).itemsize > 8:
    ARRAYS.append(np.array([1.25, -2.5], dtype=np.longdouble))
SCALARS = [
    np.float32(1.5), np.float64("nan"), np.int64(-3), np.uint8(200), np.bool_(True), np.str_("né"),
    np.str_(""), np.bytes_(b"ab"), np.datetime64("2020-02-02T03:04", "s"), np.timedelta64(5, "D"),
    np.complex128(1 - 2j), np.float16(0.1), np.dtype(">f4"),
    np.zeros(1, dtype=[("a", "<i4"), ("b", "<f8")])[0], np.void(b"abc"),
    np.bytes_(b"a\0"), np.str_("b\0\0"), np.str_("\ud800"),
]  # fmt: skip


def _numbers() -> Iterator[str]:
    return map(str, itertools.count())


@pytest.mark.parametrize("value", [*PLAIN, *CONTAINERS], ids=_numbers())
def test_plain_values(value: object, shelf: Make, assert_same: Same) -> None:
    """A value is the same at the top, in a dict and in a list."""
    assert_same(value, shelf(value).load())
    state = {"k": value, "l": [value, (value,)]}
    assert_same(state, shelf(state).load())


@pytest.mark.parametrize("bound", [torch.tensor(1), np.arange(3), "a" * 5000], ids=_numbers())
def test_a_slice_of_more_than_numbers_is_refused(bound: object, shelf: Make) -> None:
    """No path would lead to what it holds; a NumPy number is one."""
    with pytest.raises(StateError, match="slice that holds"):
        shelf({"w": torch.ones(3), "s": [slice(None, bound)]})
    assert shelf(slice(np.int64(3), None)).load() == slice(3, None)


@pytest.mark.parametrize("payload", [0x7FF8_0000_0000_0001, 0xFFF8_DEAD_BEEF_0001])
def test_nan_payloads(payload: int, shelf: Make) -> None:
    """The bits of a NaN are kept."""
    value = struct.unpack("<d", struct.pack("<Q", payload))[0]
    back = shelf([value]).load()[0]
    assert struct.unpack("<Q", struct.pack("<d", back))[0] == payload


@pytest.mark.parametrize("value", [*ARRAYS, *SCALARS], ids=_numbers())
def test_numpy(value: Any, shelf: Make, assert_same: Same) -> None:  # noqa: ANN401
    """Arrays and scalars of every dtype without objects keep dtype, shape and bits."""
    back = shelf({"a": value}).load()["a"]
    assert_same(value, back)
    if isinstance(value, np.ndarray) and value.size and value.flags.f_contiguous:
        assert back.flags.f_contiguous
    if isinstance(value, np.ndarray):
        assert back.flags.writeable


def test_numpy_memory_maps_and_identity(
    tmp_path: pathlib.Path, shelf: Make, assert_same: Same
) -> None:
    """A memory map comes back as an array; one array that occurs twice stays one."""
    np.save(tmp_path / "a.npy", np.arange(5))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert_same(np.arange(5), shelf(mapped).load())
    array = np.zeros(3)
    kept = shelf([array, {"again": array}])
    back = kept.load()
    assert back[0] is back[1]["again"]
    assert len(kept.records) == 1


@pytest.mark.parametrize("size", [0, 4095, 4096, 100_000])
def test_long_values_are_tensors(size: int, shelf: Make, assert_same: Same) -> None:
    """Long bytes and strings leave the skeleton, and come back as what they were."""
    state = [b"x" * size, bytearray(b"y" * size), "ü\udc80" * (size // 2)]
    kept = shelf(state)
    assert_same(state, kept.load())
    assert len(kept.skeleton) < 20_000


def test_training_state(shelf: Make, assert_same: Same) -> None:
    """Model, AdamW, scheduler, scaler, random states and a loader's position are as they were."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 2),
    )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    model(images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    model(images).sum().backward()
    optimizer.step()
    scheduler.step()
    rng = np.random.default_rng(5)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu", enabled=True).state_dict(),
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "generator": rng.bit_generator.state,
            "philox": np.random.Generator(np.random.Philox(3)).bit_generator.state,
            "torch": torch.get_rng_state(),
            "own": torch.Generator().manual_seed(3),
        },
        "data": {"epoch": 3, "order": torch.randperm(9), "seen": deque([1, 2], maxlen=5)},
    }
    back = shelf(state).load()
    assert_same(state, back)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    scheduler.load_state_dict(back["scheduler"])
    random.setstate(back["rng"]["python"])
    np.random.set_state(back["rng"]["numpy"])
    torch.set_rng_state(back["rng"]["torch"])
    assert back["model"]._metadata == model.state_dict()._metadata
    assert torch.equal(
        torch.rand(3, generator=back["rng"]["own"]),
        torch.rand(3, generator=torch.Generator().manual_seed(3)),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [3],
        ),
    ],
    ids=["step", "lambda", "onecycle", "restarts", "plateau", "cyclic", "sequential"],
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_schedulers(make: Callable[[Any], Any], shelf: Make, assert_same: Same) -> None:
    """The state dicts of torch's schedulers can be saved, a LambdaLR's without its function too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    state = scheduler.state_dict()
    assert_same(state, shelf(state).load())


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop,
        torch.optim.Rprop, torch.optim.LBFGS, torch.optim.NAdam, torch.optim.Adafactor,
    ],
)  # fmt: skip
def test_optimizers(make: Callable[..., Any], shelf: Make, assert_same: Same) -> None:
    """The state dicts of torch's optimizers can be saved after a step."""
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = make([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    assert_same(optimizer.state_dict(), shelf(optimizer.state_dict()).load())


def test_parameters_and_buffers(shelf: Make) -> None:
    """Parameter, Buffer and requires_grad are kept; a graph is not."""
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    state = {
        "p": weight, "g": torch.nn.Parameter(torch.ones(1)), "leaf": leaf, "result": leaf * 2,
        "b": torch.nn.Buffer(torch.ones(1)), "t": torch.nn.Buffer(torch.ones(1), persistent=False),
    }  # fmt: skip
    back = shelf(state).load()
    for key, value in state.items():
        assert type(back[key]) is type(value)
        assert back[key].requires_grad == value.requires_grad
        assert back[key].grad_fn is None
    assert isinstance(back["b"], torch.nn.Buffer)
    assert (back["b"].persistent, back["t"].persistent) == (True, False)


def test_attributes_of_ordered_dicts(shelf: Make, assert_same: Same) -> None:
    """The ``_metadata`` that state dicts carry comes back, and may hold tensors."""
    state = OrderedDict(a=1)
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    assert_same(state, shelf(state).load())


class Point:
    """A type that only an adapter can represent."""

    def __init__(self, x: Any) -> None:  # noqa: ANN401
        self.x = x


def test_adapters(shelf: Make) -> None:
    """An adapter represents its type on save and on load, tensors and nesting included."""
    adapter = TypeAdapter(
        name="point", type=Point, to_state=lambda p: {"x": p.x}, from_state=lambda s: Point(s["x"])
    )
    weight = torch.randn(3)
    kept = shelf({"p": Point([Point(weight), weight])}, [adapter])
    back = kept.load(adapters=[adapter])["p"]
    assert type(back) is Point
    assert torch.equal(back.x[0].x, weight)
    assert back.x[0].x is back.x[1]
    assert len(kept.records) == 1


_KEYS = (
    st.text(max_size=6)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.none()
    | st.binary(max_size=4)
    | st.tuples(st.text(max_size=3), st.integers())
)
_TENSORS = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.int8, np.float64, np.complex64, np.uint16, np.bool_]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
).map(lambda array: torch.from_numpy(array.copy()))
_PERMUTED = st.tuples(_TENSORS, st.randoms()).map(
    lambda pair: pair[0].permute(pair[1].sample(range(pair[0].ndim), pair[0].ndim))
)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=10)
    | st.binary(max_size=10)
    | st.sampled_from(PLAIN)
    | st.sampled_from(ARRAYS)
    | _PERMUTED
    | hnp.arrays(
        dtype=hnp.scalar_dtypes() | hnp.array_dtypes(),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    maps = st.dictionaries(_KEYS, children, max_size=4)
    return (
        lists
        | maps
        | lists.map(tuple)
        | lists.map(deque)
        | maps.map(OrderedDict)
        | maps.map(lambda entries: defaultdict(list, entries))
    )


@settings(
    max_examples=examples(250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=st.recursive(_LEAVES, _containers, max_leaves=12))
def test_any_state(state: object, shelf: Make, assert_same: Same) -> None:
    """Whatever can be built of these parts comes back bit by bit."""
    assert_same(state, shelf(state).load())


def test_small_tensors_cost_little(shelf: Make) -> None:
    """The skeleton of 2,000 tensors takes under 25 bytes each when compressed."""
    names = ["attn.q.weight", "attn.k.weight", "mlp.up.bias", "norm.weight"]
    state = {f"layers.{i // 4}.{names[i % 4]}": torch.randn(16) for i in range(2000)}
    skeleton = shelf({"model": state}).skeleton
    assert len(zstandard.ZstdCompressor(level=3).compress(skeleton)) < 25 * 2000


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
    row = tensor.conj()[0]
    state = {"c": tensor.conj(), "i": tensor.conj().imag, "plain": tensor, "s": tensor.conj()[:, 2],
             "u": row.unfold(0, 3, 1), "n": row.imag.unfold(0, 3, 1)}  # fmt: skip
    back = shelf(state).load()
    for key, value in state.items():
        assert torch.equal(torch.view_as_real(back[key].to(torch.complex64)), torch.view_as_real(
            value.resolve_conj().resolve_neg().to(torch.complex64)))  # fmt: skip
        assert not back[key].is_conj()
        assert not back[key].is_neg()
    alone = torch.randn(5, dtype=torch.complex64).to(dtype).conj().unfold(0, 3, 1)
    assert torch.equal(shelf(alone).load().to(torch.complex64), alone.to(torch.complex64))


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
