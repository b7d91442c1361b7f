"""Nested states come back value by value, type by type, in order."""

from __future__ import annotations

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

from ckptstore.tensors.adapters import TypeAdapter

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
]  # fmt: skip


def _numbers() -> Iterator[str]:
    return map(str, itertools.count())


@pytest.mark.parametrize("value", [*PLAIN, *CONTAINERS], ids=_numbers())
def test_plain_values(value: object, shelf: Make, assert_same: Same) -> None:
    """A value is the same at the top, in a dict and in a list."""
    assert_same(value, shelf(value).load())
    state = {"k": value, "l": [value, (value,)]}
    assert_same(state, shelf(state).load())


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
        "p": weight,
        "g": torch.nn.Parameter(torch.ones(1)),
        "leaf": leaf,
        "result": leaf * 2,
        "b": torch.nn.Buffer(torch.ones(1)),
        "t": torch.nn.Buffer(torch.ones(1), persistent=False),
    }
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
