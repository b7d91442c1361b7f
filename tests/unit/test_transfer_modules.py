"""Modules that load more than their tensors: ``load_into`` gives what ``load_state_dict`` gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metered import MeteredBackend
from torch import nn
from torch.nn.utils import parametrizations, prune

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.errors import InvalidInputError, StateError
from ckptstore.repo import create_on

Make = Callable[[], nn.Module]


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store in memory that holds two of a module's layers at a time."""
    return ckptstore.Store(create_on(memory, options=Options(host_bytes=200)))


class Extra(nn.Linear):
    """Has state of its own beside its weights, as the scales of FP8."""

    kind, amax = "dict", 1.0

    def get_extra_state(self) -> object:
        """Return it in the form that `kind` names."""
        value = torch.tensor([self.amax])
        return {"dict": {"amax": self.amax, "history": value}, "tensor": value, "none": None}[
            self.kind
        ]

    def set_extra_state(self, state: Any) -> None:  # noqa: ANN401
        """Take it back."""
        if state is not None:
            self.amax = float(state["amax"] if isinstance(state, dict) else state)


class TensorExtra(Extra):
    """Its state is a tensor made for the occasion."""

    kind = "tensor"


class NoExtra(Extra):
    """It has none yet."""

    kind = "none"


class Copying(nn.Linear):
    """Its state dict is a copy."""

    def state_dict(self, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        """Return copies."""
        return {name: one.clone() for name, one in super().state_dict(*args, **words).items()}


class Older(nn.Linear):
    """Reads the names of older versions of its class, by the version in the metadata."""

    _version = 2
    seen: object = 0

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *args: Any) -> None:  # noqa: ANN401
        self.seen = about.get("version")
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[prefix + key.removeprefix(f"{prefix}old.")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, about, *args)


class Counting(nn.Linear):
    """Stores a number beside its tensors, by methods of its own."""

    count = 0

    def state_dict(self, *args: Any, **words: Any) -> Any:  # noqa: ANN401
        """Return the number too."""
        return {**super().state_dict(*args, **words), "count": self.count}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401
        """Take the number out."""
        state = dict(state_dict)
        self.count = state.pop("count")
        return super().load_state_dict(state, strict, assign)


def _hooked(hook: Callable[..., Any]) -> Any:  # noqa: ANN401 - a module
    made: Any = nn.Linear(3, 3)
    made._register_state_dict_hook(hook)
    return made


def _derived() -> Any:  # noqa: ANN401 - a module
    made: Any = nn.Sequential(nn.Linear(3, 3))
    made.register_load_state_dict_post_hook(lambda it, _: setattr(it, "sum", it[0].weight.sum()))
    return made


def _tied() -> nn.Module:
    made = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    made[1].weight = made[0].weight
    return made


def _called(module: nn.Module, *shape: int) -> nn.Module:
    module(torch.randn(shape))
    return module


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def _buffer(value: torch.Tensor) -> nn.Module:
    made = nn.Linear(2, 2)
    made.register_buffer("mask", value)
    made.register_buffer("transient", torch.zeros(1), persistent=False)
    return made


def _old_names() -> nn.Module:
    return nn.ModuleDict({"old": nn.Linear(3, 3)})


def _module(make: Any, *args: Any) -> Make:  # noqa: ANN401 - classes of torch without types
    return lambda: make(*args)


def _few() -> nn.Module:
    return nn.Sequential(Older(3, 2), nn.Linear(1, 1))


def _scaled() -> nn.Module:
    return nn.Sequential(Extra(2, 2), nn.Linear(2, 2))


def _halving() -> Any:  # noqa: ANN401 - a module
    return _hooked(lambda _, state, *__: {name: one.half() for name, one in state.items()})


def _one(kind: Any) -> Make:  # noqa: ANN401 - a class
    return lambda: nn.Sequential(kind(3, 2))


MODULES: dict[str, tuple[Make, ...]] = {
    "linear": (_one(nn.Linear),),
    "batch norm": (lambda: _called(nn.BatchNorm1d(3), 4, 3), lambda: nn.BatchNorm1d(3)),
    "lstm": (lambda: nn.LSTM(3, 2, 2),),
    "attention": (lambda: nn.MultiheadAttention(4, 2),),
    "tied": (_tied,),
    "buffers": (lambda: _buffer(torch.ones(2)), lambda: _buffer(torch.zeros(2))),
    "sparse": (
        lambda: _buffer(torch.eye(2).to_sparse()),
        lambda: _buffer(torch.zeros(2, 2).to_sparse()),
    ),
    "compiled": (lambda: nn.Sequential(_module(torch.compile, nn.Linear(3, 2))()),),
    "scripted": (lambda: nn.Linear(3, 2), lambda: torch.jit.script(nn.Linear(3, 2))),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)),),
    "renamed weight norm": (
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    ),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)),),
    "pruned": (lambda: _module(prune.l1_unstructured, nn.Linear(3, 2), "weight", 0.5)(),),
    "lazy": (lambda: _called(_lazy(), 4, 5), _lazy),
    "quantized": (_one(torch.ao.nn.quantized.Linear),),
    "fake quantized": (lambda: _called(_module(torch.ao.quantization.FakeQuantize)(), 5),),
    "extra": (_scaled,),
    "tensor extra": (_one(TensorExtra),),
    "no extra": (_one(NoExtra),),
    "extra that is missing": (_one(nn.Linear), _one(Extra)),
    "copies": (lambda: Copying(3, 2),),
    "halves": (_halving,),
    "derives": (_derived,),
    "older": (_one(Older),),
    "old names": (_old_names, lambda: Older(3, 3)),
    "counts": (lambda: Counting(3, 2),),
    "too few": (_one(Older), _few),
}


def _plain(value: Any) -> Any:  # noqa: ANN401 - of a module's attributes or its state
    if isinstance(value, torch.Tensor):
        value = value.int_repr() if value.is_quantized else value.detach()
        return str(value.dtype), value.to_dense().tolist()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _all(module: nn.Module) -> object:
    names = ("amax", "seen", "count", "sum")
    own = [{n: _plain(getattr(one, n, 0)) for n in names} for one in module.modules()]
    return own, _plain(dict(module.state_dict()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["", "net"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_loaded_as_by_load_state_dict(
    store: ckptstore.Store, name: str, place: str
) -> None:
    """To the bit, with hooks, extra state and metadata, and with the same names missing."""
    made = MODULES[name][0]()
    torch.manual_seed(0)
    target = MODULES[name][-1]()
    torch.manual_seed(0)
    wanted = MODULES[name][-1]()
    for one in made.modules():
        vars(one).update({"amax": 7.0} if isinstance(one, Extra) else {"count": 3})
    state = copy.deepcopy(made.state_dict())
    store.run("r").save({"model": state, "other": torch.ones(2)}, step=1)

    report = store.load_into(
        "r",
        {"net": target} if place else target,
        include=["model"],
        rename={"model": place},
        strict=False,
    )

    told = wanted.load_state_dict(store.load("r")["model"], strict=False)
    start = f"{place}." if place else ""
    assert repr(_all(target)) == repr(_all(wanted))
    assert set(report.missing) == {start + key for key in told.missing_keys}
    assert not report.unexpected
    assert not report.mismatched


def test_modules_load_in_pieces(memory: MemoryBackend, store: ckptstore.Store) -> None:
    """Layers that load by themselves are read some at a time; others straight into their memory."""
    made = nn.Sequential(*(Older(4, 4) for _ in range(6)), nn.Linear(4, 4))
    store.run("r").save(made.state_dict(), step=1)
    target = copy.deepcopy(made)
    nn.init.zeros_(target.get_parameter("5.weight"))
    steps: list[int] = []
    metered = MeteredBackend(memory)
    with ckptstore.Store(create_on(metered, exist_ok=True, options=Options(host_bytes=200))) as few:
        report = few.load_into(
            "r", target, strict=True, progress=lambda one: steps.append(one.done)
        )
    assert report.read_bytes == 7 * 80 == steps[-1]
    assert torch.equal(target.get_parameter("5.weight"), made.get_parameter("5.weight"))


def test_what_a_state_dict_does_not_give_back_is_told(store: ckptstore.Store) -> None:
    """A hook that transposes, and no hook that transposes back."""
    make: Make = lambda: _hooked(lambda _, s, *__: {k: v.t() for k, v in s.items()})  # noqa: E731
    store.run("r").save(make().state_dict(), step=1)

    (wrong,) = store.load_into("r", make()).mismatched

    assert (wrong.name, wrong.why) == ("weight", "state_dict")
    with pytest.raises(InvalidInputError, match="1 have changed: bias"):
        store.load_into("r", make(), strict=True)


def test_shapes_and_dtypes_of_such_modules_are_told(store: ckptstore.Store) -> None:
    """As of any other: left alone, and named; so is a value that a cast would lose."""
    made = nn.Sequential(Older(4, 4), Older(4, 4))
    nn.init.constant_(made.get_parameter("0.bias"), 1e9)
    store.run("r").save(made.state_dict(), step=1)
    target = nn.Sequential(Older(4, 4).half(), Older(4, 5))

    report = store.load_into("r", target, strict=False)

    why = {one.name: one.why for one in report.mismatched}
    assert why == {"0.bias": "lossy", "1.weight": "shape", "1.bias": "shape"}
    assert report.loaded == ("0.weight",)
    assert report.rounded["0.weight"] <= 16


def test_errors_of_a_module_are_of_this_library(store: ckptstore.Store) -> None:
    """Code of the target that fails is named, with its error as the cause."""
    made: Any = nn.Linear(2, 2)
    store.run("r").save(made.state_dict(), step=1)
    made.register_load_state_dict_post_hook(lambda *_: 1 / 0)

    with pytest.raises(StateError, match="load_state_dict of Linear failed: division"):
        store.load_into("r", made)
