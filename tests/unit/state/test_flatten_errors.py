"""What cannot be represented is refused by path and type, with something to do instead."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.errors import CkptStoreError, InvalidInputError, LimitError, StateError
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.flatten import flatten

Make = Callable[..., Any]
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
    with pytest.raises(StateError, match=hint) as caught:
        flatten({"model": [0, {"x y": value}]})
    assert "model.1.x y" in str(caught.value), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_refused_nested() -> None:
    """Nested tensors of both layouts are refused."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        with pytest.raises(StateError, match="'w'"):
            flatten({"w": nested})


def test_refused_fake() -> None:
    """A fake tensor has no bytes to save."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(StateError, match="materialize"):
        flatten({"w": fake})


def test_cycles() -> None:
    """A container that holds itself is refused; one that merely occurs twice is not."""
    shared = [1]
    assert flatten({"a": shared, "b": [shared, shared]}).skeleton
    loop: list[object] = []
    loop.append({"deep": loop})
    with pytest.raises(StateError, match="holds itself"):
        flatten(loop)
    odd = OrderedDict(a=1)
    odd.me = odd  # type: ignore[attr-defined]
    with pytest.raises(CkptStoreError, match=r"itself|deeper"):
        flatten(odd)


def test_depth() -> None:
    """Nesting is limited on save, so that every saved state can be read."""
    state: object = 1
    for _ in range(63):
        state = [state]
    assert flatten(state).skeleton
    for _ in range(2):
        state = {"k": state}
    with pytest.raises(LimitError, match="nested deeper"):
        flatten(state)


def test_bombs_of_shared_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is small in memory, but has endless values when written out, meets a limit."""
    monkeypatch.setattr("ckptstore.limits.STATE_NODES_MAX", 10_000)
    state: list[Any] = [0] * 10
    for _ in range(4):
        state = [state] * 10
    with pytest.raises(LimitError, match="more than 10000 values"):
        flatten(state)


def _adapter(**changes: object) -> TypeAdapter:
    fields: dict[str, Any] = {
        "name": "known", "type": Known, "to_state": lambda _: 1, "from_state": lambda _: Known(),
    }  # fmt: skip
    return TypeAdapter(**{**fields, **changes})


def test_adapters_must_be_there_again(shelf: Make) -> None:
    """A load without the adapter names the path and the adapter, before anything is read."""
    kept = shelf({"a": [Known()]}, [_adapter()])
    with pytest.raises(StateError, match=r"'a\.0' was saved by the adapter 'known'"):
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
        with pytest.raises(InvalidInputError):
            flatten({}, wrong)


def test_adapters_that_fail(shelf: Make) -> None:
    """An adapter's own errors arrive as StateError with the path, on save and on load."""

    def fail(_: object) -> object:
        raise ZeroDivisionError("no")

    with pytest.raises(StateError, match=r"'k'.*no"):
        flatten({"k": Known()}, [_adapter(to_state=fail)])
    with pytest.raises(StateError, match="itself"):
        flatten({"k": Known()}, [_adapter(to_state=lambda known: known)])
    kept = shelf({"k": Known()}, [_adapter()])
    with pytest.raises(StateError, match=r"'k'.*no"):
        kept.load(adapters=[_adapter(from_state=fail)])


def test_subclasses_are_not_adapted() -> None:
    """An adapter stands for its exact type: a subclass would come back as its base."""

    class Special(Known):
        pass

    with pytest.raises(StateError, match="Special"):
        flatten([Special()], [_adapter()])
