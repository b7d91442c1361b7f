"""Flattening: shared memory, errors by path, and loads into existing tensors."""

from __future__ import annotations

import enum
import functools
import threading
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples

from ckptstore import errors
from ckptstore.format.paths import PathFilter
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.flatten import flatten
from ckptstore.tensors.restore import Restorer

Same = Callable[[object, object], None]
Make = Callable[..., Any]


def _bytes(kept: Any) -> int:  # noqa: ANN401
    return sum(record.nbytes for record in kept.records)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tied_weights_stay_tied(shelf: Make, assert_same: Same) -> None:
    """Two leaves of one tensor cost its bytes once and share memory again, as two objects."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    state = {"embed": weight.detach(), "head": weight.detach()}
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 8 * 4 * 4
    assert back["embed"] is not back["head"]
    back["embed"][0, 0] = 42.0
    assert back["head"][0, 0] == 42.0


def test_one_object_stays_one(shelf: Make) -> None:
    """A Parameter that occurs twice is one again, and its detached twin shares its memory."""
    weight = torch.nn.Parameter(torch.randn(3))
    back = shelf([weight, {"again": weight}, weight.detach()]).load()
    assert back[0] is back[1]["again"]
    assert type(back[0]) is torch.nn.Parameter
    assert type(back[2]) is torch.Tensor
    assert not back[2].requires_grad
    assert back[2].data_ptr() == back[0].data_ptr()


def test_views_share_their_base(shelf: Make, assert_same: Same) -> None:
    """Overlapping views of several dtypes and layouts are views of one stored tensor again."""
    flat = torch.randn(24)
    state = {
        "head": flat[2:9], "flat": flat, "grid": flat.view(4, 6).t(),
        "bits": flat.view(torch.int32)[5:], "tail": flat[7:20:3],
    }  # fmt: skip
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 24 * 4
    assert len({_storage(tensor) for tensor in back.values()}) == 1
    back["flat"].zero_()
    assert not back["grid"].any()
    assert not back["tail"].any()


def test_views_without_a_whole(shelf: Make, assert_same: Same) -> None:
    """Views that overlap, none of which holds the others, cost only the run of bytes they cover."""
    flat = torch.randn(1000)
    state = [flat[100:200], flat[150:260]]
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 160 * 4
    back[0][60] = 7.0
    assert back[1][10] == 7.0


def test_mixed_dtypes_at_odd_offsets(shelf: Make, assert_same: Same) -> None:
    """A base begins where every view's offset is a whole number of its own elements."""
    raw = torch.arange(64, dtype=torch.uint8)
    state = [raw[5:30], raw[8:40].view(torch.int64), raw[6:20].view(torch.int16)]
    back = shelf(state).load()
    assert_same(state, back)
    back[0].zero_()
    assert back[1][0] == 0


def test_slices_apart_are_apart(shelf: Make, assert_same: Same) -> None:
    """Rows, and interleaved columns, of one large tensor cost their own bytes and no more."""
    big = torch.randn(1000, 100)
    rows = shelf([big[3], big[500]])
    assert _bytes(rows) == 2 * 100 * 4
    columns = shelf([big[:, 0:2], big[:, 50:52]])
    assert _bytes(columns) == 2 * 2 * 1000 * 4
    back = columns.load()
    assert torch.equal(back[1], big[:, 50:52])
    assert _storage(back[0]) != _storage(back[1])
    assert_same([big[3], big[500]], rows.load())


def test_many_views_are_bounded(monkeypatch: pytest.MonkeyPatch, shelf: Make) -> None:
    """Past the number of pairs that are tested, views count as overlapping; values stay right."""
    monkeypatch.setattr("ckptstore.limits.ALIAS_PAIRS_MAX", 10)
    big = torch.randn(50, 20)
    state = [big[:, column] for column in range(20)]
    back = shelf(state).load()
    assert all(torch.equal(a, b) for a, b in zip(state, back, strict=True))


def test_tensors_that_overlap_themselves(shelf: Make, assert_same: Same) -> None:
    """Expanded and unfolded tensors cost the bytes that they really have and keep their strides."""
    expanded = torch.randn(3, 1).expand(3, 1000)
    kept = shelf(expanded)
    assert _bytes(kept) == 3 * 4
    assert_same(expanded, kept.load())
    windows = torch.randn(10).unfold(0, 4, 1)
    kept = shelf(windows)
    assert _bytes(kept) == 10 * 4
    assert_same(windows, kept.load())
    crossed = torch.randn(16).as_strided((4, 4), (2, 3))  # as many elements as it spans, two shared
    kept = shelf(crossed)
    assert _bytes(kept) == 16 * 4
    assert_same(crossed, kept.load())
    mixed = torch.randn(5, 6)[:, ::2].unsqueeze(1).expand(5, 4, 3)
    kept = shelf(mixed)
    assert _bytes(kept) == 5 * 3 * 4
    assert torch.equal(mixed, kept.load())


def test_gaps_are_left_out(shelf: Make) -> None:
    """A slice with gaps is stored densely: its own bytes, in the memory order of its dims."""
    part = torch.randn(64, 64)[:, :3].t()
    kept = shelf(part)
    assert kept.sources[0].payload.view() is None
    assert (_bytes(kept), kept.records[0].order) == (64 * 3 * 4, (1, 0))
    back = kept.load()
    assert torch.equal(part, back)
    assert back.stride() == (1, 3)


def test_empty_tensors_of_one_storage(shelf: Make, assert_same: Same) -> None:
    """Empty slices share nothing and hide nothing: their neighbours still find each other."""
    flat = torch.randn(10)
    state = [flat[0:6], flat[3:3], flat[2:2], flat[4:9]]
    back = shelf(state).load()
    assert_same(state, back)
    back[0][5] = 3.0
    assert back[3][1] == 3.0


def test_paths_and_order_of_records() -> None:
    """Records come in the order of their first leaf and name all leaves that read them."""
    flat = torch.randn(6)
    state = {"z": torch.zeros(2), "a": flat[1:3], "b": [flat], "c": flat}
    tensors = flatten(state).tensors
    assert [tensor.paths for tensor in tensors] == [(("z",),), (("a",), ("b", 0), ("c",))]


def test_row_bytes() -> None:
    """A row is one step of the outermost dimension in memory, never less than an element."""
    grid = torch.zeros(3, 5, dtype=torch.int16)
    state = [grid, grid.t().clone(memory_format=torch.preserve_format), torch.tensor(1.0)]
    rows = [tensor.row_bytes for tensor in flatten([*state, torch.zeros(0, 7)]).tensors]
    assert rows == [10, 10, 4, 4]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_random_views_of_one_storage(shelf: Make, data: st.DataObject) -> None:
    """Whatever views of one storage a state holds, a write through one is seen by all others."""
    base = torch.arange(60, dtype=torch.int16)
    views = []
    for _ in range(data.draw(st.integers(1, 6))):
        rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
        strides = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
        offset = data.draw(st.integers(0, 15))
        views.append(base.as_strided((rows, columns), strides, offset))
    back = shelf(views).load()
    for mine, theirs in zip(views, back, strict=True):
        assert torch.equal(mine, theirs)
    chosen = data.draw(st.integers(0, len(views) - 1))
    if not views[chosen].numel():
        return
    element = (0,) * 2
    views[chosen][element] = back[chosen][element] = -1
    for mine, theirs in zip(views, back, strict=True):
        assert torch.equal(mine, theirs)


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the kind that is refused


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


class Word(str):
    """A text that is more than a text."""

    __slots__ = ("source",)


class Other(torch.Tensor):
    """A tensor subclass that nobody knows."""


class Known:
    """An object without an adapter."""


REFUSED: list[tuple[str, object, str]] = [
    ("function", lambda: 0, "leave it out"),
    ("builtin", len, "leave it out"),
    ("class", int, "leave it out"),
    ("module", torch.nn.Linear(1, 1), r"state_dict\(\)"),
    ("optimizer", torch.optim.SGD([torch.zeros(1)], lr=0.1), r"state_dict\(\)"),
    ("scaler", torch.amp.GradScaler("cpu"), r"state_dict\(\)"),
    ("partial", functools.partial(int), "TypeAdapter"),
    ("object", Known(), "TypeAdapter"),
    ("namedtuple", Pair(1, 2), r"save tuple\(value\)"),
    ("text", Word("a"), r"save str\(value\)"),
    ("enum", Colour.RED, "value or name"),
    ("object array", np.array([None]), "numbers"),
    ("object field", np.zeros(1, dtype=[("a", "O")]), "numbers"),
    ("masked", np.ma.masked_array([1, 2], [False, True]), "mask beside it"),
    ("string array", np.array(["a"], dtype=np.dtypes.StringDType()), "numbers"),
    ("numpy generator", np.random.default_rng(), "bit_generator.state"),
    ("numpy random state", np.random.RandomState(), "get_state"),
    ("storage", torch.zeros(1).untyped_storage(), "tensor over it"),
    ("mkldnn", torch.eye(2).to_mkldnn(), "to_dense"),
    ("meta", torch.empty(2, device="meta"), "materialize"),
    ("lazy", torch.nn.LazyLinear(2).weight, "run the lazy module"),
    ("subclass", torch.zeros(2).as_subclass(Other), "TypeAdapter"),
    ("default factory", defaultdict(lambda: 0), "only int"),
    ("ellipsis", ..., "TypeAdapter"),
    ("NaN key", {float("nan"): 1}, "not NaN"),
    ("object key", {Colour.RED: 1}, "keys and set"),
    ("numpy key", {np.int64(1): 1}, "keys and set"),
    ("frozenset key", {frozenset({1}): 1}, "keys and set"),
    ("tensor in a set", {torch.zeros(1)}, "keys and set"),
    ("enormous int", 1 << 100_000, "to_bytes"),
]


@pytest.mark.parametrize(("name", "value", "hint"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(name: str, value: object, hint: str) -> None:
    """The error is a StateError that names the path and says what to do."""
    with pytest.raises(errors.StateError, match=hint) as caught:
        flatten({"model": [0, {"x y": value}]})
    assert "model.1.x y" in str(caught.value), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_refused_nested() -> None:
    """Nested tensors of both layouts are refused."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        with pytest.raises(errors.StateError, match="'w'"):
            flatten({"w": nested})


def test_refused_fake() -> None:
    """A fake tensor has no bytes to save."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(errors.StateError, match="materialize"):
        flatten({"w": fake})


def test_cycles() -> None:
    """A container that holds itself is refused; one that merely occurs twice is not."""
    shared = [1]
    assert flatten({"a": shared, "b": [shared, shared]}).skeleton
    loop: list[object] = []
    loop.append({"deep": loop})
    with pytest.raises(errors.StateError, match="holds itself"):
        flatten(loop)
    odd = OrderedDict(a=1)
    odd.me = odd  # type: ignore[attr-defined]
    with pytest.raises(errors.CkptStoreError, match=r"itself|deeper"):
        flatten(odd)


def test_depth() -> None:
    """Nesting is limited on save, so that every saved state can be read."""
    state: object = 1
    for _ in range(63):
        state = [state]
    assert flatten(state).skeleton
    for _ in range(2):
        state = {"k": state}
    with pytest.raises(errors.LimitError, match="nested deeper"):
        flatten(state)


def test_bombs_of_shared_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is small in memory, but has endless values when written out, meets a limit."""
    monkeypatch.setattr("ckptstore.limits.STATE_NODES_MAX", 10_000)
    state: list[Any] = [0] * 10
    for _ in range(4):
        state = [state] * 10
    with pytest.raises(errors.LimitError, match="more than 10000 values"):
        flatten(state)


def _adapter(**changes: object) -> TypeAdapter:
    fields: dict[str, Any] = {
        "name": "known", "type": Known, "to_state": lambda _: 1, "from_state": lambda _: Known(),
    }  # fmt: skip
    return TypeAdapter(**{**fields, **changes})


def test_adapters_must_be_there_again(shelf: Make) -> None:
    """A load without the adapter names the path and the adapter, before anything is read."""
    kept = shelf({"a": [Known()]}, [_adapter()])
    with pytest.raises(errors.StateError, match=r"'a\.0' was saved by the adapter 'known'"):
        kept.load()
    assert type(kept.load(adapters=[_adapter()])["a"][0]) is Known


def test_adapters_are_checked() -> None:
    """Doubled names or types, and things that are no adapters, are refused."""
    wrongs: list[list[Any]] = [
        [_adapter(), _adapter(type=int)],
        [_adapter(), _adapter(name="other")],
        ["known"],
        [_adapter(name="")],
    ]
    for wrong in wrongs:
        with pytest.raises(errors.InvalidInputError):
            flatten({}, wrong)


def test_adapters_that_fail(shelf: Make) -> None:
    """An adapter's own errors arrive as StateError with the path, on save and on load."""

    def fail(_: object) -> object:
        raise ZeroDivisionError("no")

    with pytest.raises(errors.StateError, match=r"'k'.*no"):
        flatten({"k": Known()}, [_adapter(to_state=fail)])
    with pytest.raises(errors.StateError, match="itself"):
        flatten({"k": Known()}, [_adapter(to_state=lambda known: known)])
    kept = shelf({"k": Known()}, [_adapter()])
    with pytest.raises(errors.StateError, match=r"'k'.*no"):
        kept.load(adapters=[_adapter(from_state=fail)])


def test_subclasses_are_not_adapted() -> None:
    """An adapter stands for its exact type: a subclass would come back as its base."""

    class Special(Known):
        pass

    with pytest.raises(errors.StateError, match="Special"):
        flatten([Special()], [_adapter()])


def test_into_decodes_in_place(shelf: Make) -> None:
    """A tensor of the record's layout is decoded into directly, and is what comes back."""
    kept = shelf({"m": {"w": torch.arange(12.0).view(3, 4)}, "step": 3})
    target = torch.zeros(3, 4)
    restorer = Restorer(kept.node, kept.records, into={"m": {"w": target}})
    destination = restorer.destination(0)
    assert np.frombuffer(destination.view, np.uint8).ctypes.data == target.data_ptr()
    destination.view[:] = kept.records[0].data
    back = restorer.build()
    assert back["m"]["w"] is target
    assert torch.equal(target, torch.arange(12.0).view(3, 4))
    assert back["step"] == 3


def test_into_other_layouts(shelf: Make) -> None:
    """Targets with gaps, other strides, offsets or lazy negation get the values all the same."""
    source = torch.randn(4, 3)
    kept = shelf([source] * 4)
    room = torch.zeros(40)
    negated = torch.zeros(4, 3, dtype=torch.complex64).conj().imag
    targets = [torch.zeros(3, 4).t(), torch.zeros(4, 9)[:, 1::3], room[5:17].view(4, 3)]
    back = kept.load(into=targets)
    for target, value in zip(targets, back, strict=False):
        assert value is target
        assert torch.equal(target, source)
    assert torch.equal(back[3], source)
    assert not room[:5].any()
    assert not room[17:].any()
    kept.load(into=[negated])
    assert torch.equal(negated.resolve_neg(), source)


def test_into_a_live_model(shelf: Make, assert_same: Same) -> None:
    """Parameters of a model are filled through its state dict, tied and requiring grad ones too."""
    saved, live = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)) for _ in "ab")
    for model in (saved, live):
        model[1].weight = model[0].weight
    kept = shelf(saved.state_dict())
    kept.load(into=dict(live.named_parameters(remove_duplicate=False)))
    assert_same(dict(saved.state_dict()), dict(live.state_dict()))
    assert live[1].weight is live[0].weight


def test_into_an_untied_model(shelf: Make) -> None:
    """One tensor of the version fills two of a model that does not tie them."""
    weight = torch.randn(3)
    targets = {"a": torch.zeros(3), "b": torch.zeros(3)}
    shelf({"a": weight, "b": weight}).load(into=targets)
    assert torch.equal(targets["a"], weight)
    assert torch.equal(targets["b"], weight)


def test_into_views(shelf: Make) -> None:
    """A view of the version fills a tensor of its own."""
    flat = torch.randn(10)
    target = torch.zeros(4)
    back = shelf({"flat": flat, "part": flat[2:6]}).load(into={"part": target})
    assert back["part"] is target
    assert torch.equal(target, flat[2:6])
    assert torch.equal(back["flat"], flat)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"w": torch.zeros(3)}, r"'w' is float32\[2\].*but float32\[3\]"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, r"but float64\[2\]"),
        ({"w": torch.empty(2, device="meta")}, "'w' is not a plain"),
        ({"n": torch.zeros(2)}, "'n' is a numpy leaf"),
        ({"v": torch.zeros(3)}, r"'v' is float32\[1\]"),
        (torch.nn.Linear(1, 1), r"state_dict\(\)"),
    ],
    ids=["shape", "dtype", "meta", "numpy", "view", "module"],
)
def test_into_that_does_not_fit(into: object, message: str, shelf: Make) -> None:
    """A difference in shape, dtype or kind is an error that names the path, before any read."""
    weight = torch.ones(2)
    kept = shelf({"w": weight, "n": np.zeros(2), "v": weight[1:]})
    with pytest.raises(errors.InvalidInputError, match=message):
        Restorer(kept.node, kept.records, into=into)


def test_into_unknown_path(shelf: Make) -> None:
    """A tensor that the version does not have would stay unfilled: it is an error."""
    kept = shelf({"w": torch.ones(2)})
    with pytest.raises(errors.TensorNotFoundError, match=r"'m\.w'") as told:
        kept.load(into={"m": {"w": torch.zeros(2)}})
    assert "Store.load_into fills what fits" in told.value.hint
    with pytest.raises(errors.TensorNotFoundError, match="'w'") as told:
        shelf({"m": {"w": torch.ones(2)}}).load(into={"w": torch.zeros(2)})
    assert told.value.hint == "the version has 'm.w': nest into as the state that was saved"
    with pytest.raises(errors.TensorNotFoundError, match="'w'"):
        kept.load(PathFilter([]), into={"w": torch.zeros(2)})


def test_into_shared_memory(shelf: Make) -> None:
    """Two tensors of the version cannot be read into one memory."""
    room = torch.zeros(6)
    kept = shelf({"a": torch.ones(4), "b": torch.zeros(4)})
    with pytest.raises(errors.InvalidInputError, match="'a' and 'b' share memory"):
        kept.load(into={"a": room[:4], "b": room[2:]})
    kept.load(into={"a": torch.zeros(4), "b": torch.zeros(8)[:4]})


def test_map_location(shelf: Make) -> None:
    """Strings, devices, dicts and torch.load's callables are taken; nonsense is refused."""
    kept = shelf({"w": torch.ones(2), "g": torch.Generator()})
    seen: list[tuple[int, str]] = []

    def record(storage: torch.UntypedStorage, saved: str) -> torch.UntypedStorage:
        seen.append((storage.nbytes(), saved))
        return storage

    named: list[Any] = [lambda *_: "cpu", lambda *_: torch.device("cpu")]
    given = (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cpu"}, record)
    for where in (*given, *named):
        assert kept.load(map_location=where)["w"].device.type == "cpu"
    assert seen == [(0, "cpu")]
    for wrong in ("nowhere", "meta", 3, {"cpu": 5}, lambda *_: 5):
        with pytest.raises(errors.InvalidInputError):
            kept.load(map_location=wrong)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "xpu", "hpu", "gpu", "vulkan"])
@pytest.mark.parametrize("kind", ["text", "device", "dict"])
def test_a_device_that_is_not_there_is_refused_before_reading(
    shelf: Make, device: str, kind: str
) -> None:
    """Named at once, with what loads instead, and not as memory that cannot be had."""
    if device.startswith(str(torch.accelerator.current_accelerator() or "none")):
        device = f"{device.partition(':')[0]}:99"
    where: Any = {"cpu": device} if kind == "dict" else device
    if kind == "device" and device != "gpu":  # torch makes no such device
        where = torch.device(device)
    kept = shelf({"w": torch.ones(16)})

    with pytest.raises(errors.InvalidInputError, match=f"map_location is '{device}'") as told:
        Restorer(kept.node, kept.records, map_location=where)

    assert "cpu" in told.value.hint


def test_generators_and_random_states_stay_on_the_cpu(shelf: Make) -> None:
    """What torch wants on the CPU is not sent to a device, whatever map_location says."""
    kept = shelf({"rng": torch.get_rng_state(), "n": np.zeros(1), "g": torch.Generator()})
    rng = kept.records[0].__class__(
        dtype="uint8", shape=kept.records[0].shape, order=None, nbytes=kept.records[0].nbytes,
        data=kept.records[0].data, role="rng",
    )  # fmt: skip
    restorer = Restorer(kept.node, [rng, *kept.records[1:]], map_location="cuda")
    for index in restorer.needed:
        restorer.destination(index).view[:] = kept.records[index].data
    assert restorer.build()["rng"].device.type == "cpu"


def test_destinations_from_many_threads(shelf: Make, assert_same: Same) -> None:
    """Destinations can be made and filled from several threads at once."""
    state = {str(i): torch.randn(50) for i in range(40)}
    kept = shelf(state)
    restorer = Restorer(kept.node, kept.records)

    def work(first: int) -> None:
        for index in range(first, 40, 4):
            restorer.destination(index).view[:] = kept.records[index].data

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(state, restorer.build())
