"""Streams, sparse tensors, tensor subclasses, enums, named tuples and dataclasses in a state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.tensors import builtin
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.composed import build_sparse
from ckptstore.tensors.flatten import flatten

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

Make = Callable[..., Any]
DENSE = torch.tensor([[0.0, 1.5, 0.0, 0.0], [2.5, 0.0, 0.0, -0.0]] * 2)


class Colour(enum.Enum):
    """A plain enum."""

    RED = "r"
    BLUE = ("b", 1)


class Bits(enum.IntFlag):
    """A flag, whose members can be combined."""

    A = 1
    B = 2


class Pair(NamedTuple):
    """A named tuple with a tensor."""

    left: Any
    right: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that cannot be set, and computes a field."""

    rate: float
    colour: Colour
    twice: float = dataclasses.field(init=False, default=0.0)


@dataclasses.dataclass
class Open:
    """A dataclass that takes attributes."""

    weight: Any

    def __post_init__(self) -> None:
        """Change what was given: to be done once."""
        self.weight = self.weight * 2


class Scaled(torch.Tensor):
    """A subclass that is an inner tensor and plain values."""

    held: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls: type[Self], held: torch.Tensor, context: Any) -> Self:  # noqa: ANN401
        """Return a tensor without memory of its own."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, held.shape, dtype=torch.float64, device=held.device)
        made.held, made.context = held, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.context

    @classmethod
    def __tensor_unflatten__(
        cls,
        parts: dict[str, torch.Tensor],
        context: Any,  # noqa: ANN401
        _size: object,
        _stride: object,
    ) -> Scaled:
        return cls(parts["held"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, _types: object, args: tuple[Any, ...] = (), _kwargs: object = None
    ) -> Scaled:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].held, args[0].context)


def two(a: torch.Tensor, b: torch.Tensor) -> Any:  # noqa: ANN401
    """Return a tensor of torch's own that is made of two."""
    return TwoTensor(a, b)  # type: ignore[no-untyped-call]


def doubled() -> torch.Tensor:
    """Return a sparse tensor that has one place twice."""
    indices = torch.tensor([[0, 0], [1, 1]])
    return torch.sparse_coo_tensor(indices, [1.0, 2.0], (2, 2), check_invariants=True)


OF = [TypeAdapter.of(kind) for kind in (Colour, Bits, Pair, Frozen, Open, Scaled)]


def test_streams(shelf: Make) -> None:
    """Bytes and position, of short and long ones; what was one stream comes back as two."""
    stream = io.BytesIO(b"0123" * 3000)
    stream.seek(7)
    again = shelf({"a": [stream, stream], "b": io.BytesIO()}).load()
    first, second = again["a"]
    assert [(s.getvalue(), s.tell()) for s in (first, second)] == [(b"0123" * 3000, 7)] * 2
    assert first is not second
    assert (type(again["b"]), again["b"].read()) == (io.BytesIO, b"")


def test_streams_that_are_refused() -> None:
    """A position beyond the end, and a closed stream, by path."""
    beyond, closed = io.BytesIO(b"abc"), io.BytesIO()
    beyond.seek(4)
    closed.close()
    for stream in (beyond, closed):
        with pytest.raises(StateError, match=r"'deep\.s'"):
            flatten({"deep": {"s": stream}})


SPARSE: list[Callable[[], torch.Tensor]] = [
    lambda: DENSE.to_sparse(), doubled, lambda: torch.ones(2, 3, 4).to_sparse(2),
    lambda: torch.zeros(0, 5).to_sparse(),
    lambda: torch.nn.Parameter(DENSE.to(torch.bfloat16).to_sparse()),
    lambda: DENSE.to_sparse().requires_grad_(), lambda: DENSE.to_sparse_csr(),
    lambda: DENSE.to_sparse_csc(), lambda: DENSE.to_sparse_bsr((2, 2)),
    lambda: DENSE.to_sparse_bsc((2, 2)), lambda: torch.stack([DENSE, DENSE]).to_sparse_csr(),
]  # fmt: skip


@pytest.mark.parametrize("make", SPARSE, ids=map(str, range(len(SPARSE))))
def test_sparse_tensors(shelf: Make, assert_same: Make, make: Make) -> None:
    """Each layout comes back with its indices, values, shape and flags, coalesced or not."""
    tensor = make()
    again = shelf([tensor]).load()[0]
    names = ("layout", "shape", "dtype", "requires_grad")
    assert [getattr(again, name) for name in names] == [getattr(tensor, name) for name in names]
    assert type(again) is type(tensor)
    state, meant = builtin.SPARSE.to_state(again), builtin.SPARSE.to_state(tensor)
    assert_same(state, meant)


@pytest.mark.parametrize(
    ("part", "lie"),
    [
        ("context", ("coo", True)),
        ("shape", torch.Size([2, 1])),
        ("tensors", {"indices": torch.tensor([[0, 0], [1, -1]]), "values": torch.ones(2)}),
        ("tensors", {"indices": torch.tensor([[0, 2], [1, 1]]), "values": torch.ones(2)}),
        ("tensors", {"indices": torch.tensor([[0, 0], [1, 1]]), "values": torch.ones(3)}),
    ],
)
def test_sparse_tensors_are_checked(part: str, lie: object) -> None:
    """Indices out of range, doubled where they must not be, too few: nothing is made of them."""
    state: Any = builtin.SPARSE.to_state(doubled())
    assert build_sparse(state).to_dense()[0, 1] == 3
    with pytest.raises(RuntimeError):
        builtin.SPARSE.from_state({**state, part: lie})


def test_subclasses(shelf: Make, assert_same: Make) -> None:
    """One that is known, as Parameter too, in another; its inner tensors keep sharing memory."""
    shared = torch.arange(4.0)
    nested = two(two(shared, torch.ones(4)), two(shared, torch.zeros(4)))
    again = shelf({"p": torch.nn.Parameter(nested), "w": shared}).load()
    found = again["p"]

    assert (type(found), type(found.a)) == (TwoTensor, TwoTensor)
    assert isinstance(found, torch.nn.Parameter)
    assert found.requires_grad
    found = cast("Any", found)
    assert_same(found.b.b, torch.zeros(4))
    assert found.a.a.data_ptr() == found.b.a.data_ptr() == again["w"].data_ptr()


def test_classes_that_are_passed(shelf: Make, assert_same: Make) -> None:
    """Enums, flags, named tuples, dataclasses and subclasses, in each other, need no __init__."""
    pair = Pair(torch.arange(3), [Colour.RED])
    done = Open(torch.ones(2))
    scaled = Scaled(
        torch.ones(3, dtype=torch.int8), {"colour": Colour.BLUE, "size": torch.Size([3])}
    )
    state = {
        "enum": [Colour.RED, Colour.BLUE, Bits.A | Bits.B],
        "pair": pair,
        "frozen": Frozen(0.5, Colour.BLUE),
        "open": done,
        "scaled": torch.nn.Parameter(scaled, requires_grad=False),
    }
    again = shelf(state, OF).load(adapters=OF)

    assert again["enum"] == state["enum"]
    assert (type(again["pair"]), again["frozen"]) == (Pair, state["frozen"])
    assert_same(again["pair"].left, pair.left)
    assert_same(again["open"].weight, torch.full((2,), 2.0))
    assert type(again["scaled"]) is Scaled
    assert again["scaled"].context == scaled.context
    assert_same(again["scaled"].held, scaled.held)


def test_adapters_of_classes_travel() -> None:
    """Torch sends writers, and so adapters, to another process."""
    sent = pickle.loads(pickle.dumps(OF))  # noqa: S301 - our own bytes
    assert [adapter.name for adapter in sent] == [f"{__name__}.{a.type.__name__}" for a in OF]
    assert sent[0].from_state("r") is Colour.RED


def test_names_can_be_given() -> None:
    """A class of a script, or one that moves, gets a name that stays."""
    assert TypeAdapter.of(Colour, name="colour-v1").name == "colour-v1"


@pytest.mark.parametrize("kind", [int, object, torch.Tensor, collections.OrderedDict, "Colour", io])
def test_classes_of_other_sorts_are_refused(kind: Any) -> None:  # noqa: ANN401
    """What TypeAdapter.of does not know needs an adapter that somebody wrote."""
    with pytest.raises(InvalidInputError, match="is no enum, named tuple, dataclass"):
        TypeAdapter.of(kind)


def test_dataclasses_that_hold_more_are_refused() -> None:
    """A dataclass that is a dict too, and an object with more attributes than fields."""

    @dataclasses.dataclass
    class Output(dict[str, Any]):
        """A dict with a field."""

        loss: float = 0.0

    with pytest.raises(InvalidInputError):
        TypeAdapter.of(Output)
    value = Open(1)
    value.more = 2  # type: ignore[attr-defined]
    with pytest.raises(StateError, match=r"'v'.*attributes that are no fields: more"):
        flatten({"v": value}, OF)


NOT_PASSED: list[Any] = [Colour.RED, Pair(1), Frozen(0.5, Colour.RED), Scaled(torch.ones(2), None)]


@pytest.mark.parametrize("value", NOT_PASSED, ids=lambda value: type(value).__name__)
def test_classes_that_were_not_passed(shelf: Make, value: Any) -> None:  # noqa: ANN401
    """Save and load both name the path, the class and what to pass."""
    with pytest.raises(StateError, match=r"'deep\.v' is a .*adapters=.TypeAdapter\.of"):
        flatten({"deep": {"v": value}})
    kept = shelf({"deep": {"v": value}}, OF)
    with pytest.raises(StateError, match=f"'deep.v.*{type(value).__name__}', which is not given"):
        kept.load()


def test_a_context_that_is_not_plain(shelf: Make) -> None:
    """The path leads into the context; nothing is pickled."""
    with pytest.raises(StateError, match=r"'w\.context\.f' is a function"):
        shelf({"w": Scaled(torch.ones(2), {"f": lambda: 0})}, OF)


def test_a_subclass_that_does_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where __tensor_unflatten__ loses something, the save says so, and not the load."""
    monkeypatch.setattr(Scaled, "__tensor_unflatten__", lambda *_: Scaled(torch.ones(1), None))
    with pytest.raises(StateError, match="'w': its __tensor_unflatten__ does not make it again"):
        flatten({"w": Scaled(torch.ones(2), None)}, OF)


def test_a_library_that_is_not_there(shelf: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the list whose library is missing: what to install, before anything is read."""
    kept = shelf({"w": two(torch.ones(2), torch.ones(2))})
    builtin._listed.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.testing._internal.two_tensor", None)
    with pytest.raises(StateError, match=r"TwoTensor is not installed.*install torch"):
        kept.load()


def test_a_class_that_only_has_a_listed_name_is_not_taken() -> None:
    """Names are compared, and then the classes: another class of that name is refused."""
    imposter = type("TwoTensor", (Scaled,), {"__module__": TwoTensor.__module__})
    with pytest.raises(StateError, match="its class is not known"):
        flatten({"w": imposter(torch.ones(2), None)})


def test_the_callers_adapter_comes_first(shelf: Make) -> None:
    """An adapter of one's own for a type that has one built in, on save and on load."""
    mine = TypeAdapter(
        name="mine", type=io.BytesIO, to_state=io.BytesIO.getvalue, from_state=io.BytesIO
    )
    kept = shelf({"s": io.BytesIO(b"a")}, [mine])
    assert kept.load(adapters=[mine])["s"].getvalue() == b"a"
    with pytest.raises(StateError, match="adapter 'mine', which is not given"):
        kept.load()


def test_filling_in_place_is_refused(shelf: Make) -> None:
    """A tensor made of several cannot be filled: the error says so, and not that it is missing."""
    made = two(torch.ones(2), torch.ones(2))
    with pytest.raises(InvalidInputError, match="'w' is made of several tensors"):
        shelf({"w": made}).load(into={"w": made})


def test_forms_in_the_store() -> None:
    """What docs/reference/format-v1.md says of the built-in names."""
    skeleton: Any = flatten([io.BytesIO(b"ab"), torch.eye(2).to_sparse()]).skeleton
    stream, sparse = skeleton[1:]
    assert stream == ["x", "ckptstore.BytesIO", ["t", b"ab", 0]]
    assert sparse[:2] == ["x", "ckptstore.sparse"]
    assert sparse[2][::2][0] == "d"
    assert dict(zip(sparse[2][1::2], sparse[2][2::2], strict=True)) == {
        "dtype": ["dt", "float32"], "shape": ["sz", 2, 2], "stride": None, "flags": 0,
        "context": ["t", "coo", True], "tensors": ["d", "indices", ["T", 0], "values", ["T", 1]],
    }  # fmt: skip
