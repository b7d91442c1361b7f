"""Roles of parts of a state, and states of foreign types."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import limits
from ckptstore.encodings.encoding_rules import EncodingRules
from ckptstore.errors import CkptStoreError, InvalidInputError, StateError
from ckptstore.format.paths import Pattern
from ckptstore.format.roles import ROLES, RoleRules, role_of_name
from ckptstore.integrations.files import import_file
from ckptstore.states.save import draft_of
from ckptstore.tensors import flatten as module
from ckptstore.tensors.flatten import flatten

T = torch.ones(6, 6)
ONE = torch.tensor(1.0)
NET = {"conv.weight": T.clone(), "conv.bias": torch.ones(6)}
MOMENTS = {"step": ONE, "exp_avg": T.clone(), "exp_avg_sq": T.clone()}
ADAM = {"state": {0: MOMENTS}, "param_groups": [{"lr": 0.1, "params": [0]}]}
CPU, CUDA = torch.zeros(5056, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
INTS = torch.arange(50)


def roles_of(state: object, overrides: Mapping[Pattern, str] | None = None) -> dict[str, str]:
    """Return path to role of the tensors of a state."""
    draft = draft_of(flatten(state), overrides or {}, EncodingRules())
    return dict(zip(draft.names, (record.role for record in draft.records), strict=True))


@pytest.mark.parametrize(
    ("role", "names", "value"),
    [
        ("weights", "model mpd msd G D transformer q1 target_q1 rssm enc neck codebook quantizer "
         "scheduler_net sampler_net data_encoder random_features sgd_mlp seed_encoder amp_model "
         "optimizer_net opt opt_model learned_optimizer noise_scheduler random_sampler text_data "
         "rng_predictor loader scaler lr state 7", NET),
        ("weights", "replay_buffer callbacks history log_alpha scheduler sampler random seed data "
         "dataset", {"x": T}),
        ("weights", "opt meta_optimizer learned_optimizer", {"x": T}),
        ("weights", "opt", {"decoder": {"layers": [NET]}}),
        ("weights", "scaler normalizer", {"mean": ONE, "std": ONE}),
        ("weights", "random seed random_edges", {"edges": INTS.view(25, 2)}),
        ("weights", "optimizer model", {"qweight": CPU, "weight": T}),
        ("optimizer", "optimizer optim optim_g optimizer_G actor_optimizer optimizers "
         "optimizer_state_dict optim0 optimizer_states_rank_0", {"m": T}),
        ("optimizer", "optimizer", {"m": {"conv.weight": T}, "state.conv.weight.exp_avg": T}),
        ("optimizer", "opt opt_state learned_optimizer", {"0": {"count": ONE, "mu": NET}}),
        ("optimizer", "anything model agent", ADAM),
        ("optimizer", "anything model", {0: MOMENTS, 3: MOMENTS}),
        ("optimizer", "lr_scheduler lr_schedulers", [{"last_epoch": 3, "x": ONE}]),
        ("optimizer", "scheduler", {"_last_lr": [0.1], "x": ONE}),
        ("optimizer", "scaler scaler0 amp grad_scaler", {"scale": ONE}),
        ("rng", "anything rng_state random", CPU),
        ("rng", "rng cuda_rng_state_all random_states", [CUDA, CUDA]),
        ("rng", "anything generator", torch.Generator()),
        ("rng", "anything numpy", np.random.RandomState(3).get_state()),
        ("rng", "random jax_rng", np.zeros((8, 2), np.uint32)),
        ("data", "data dataloader train_dataloader sampler dataset data_state", {"order": INTS}),
    ],
)  # fmt: skip
def test_parts_of_a_state(role: str, names: str, value: object) -> None:
    """Only what is known by structure, or by its name and its values, is not weights."""
    for name in names.split():
        for key in (name, name.upper()):
            found = roles_of({"other": {"x": torch.ones(3, 3)}, key: value})
            below = roles_of({"app": {"inner": {"x": torch.ones(3, 3)}, key: value}})
            for part in (found, below):
                mine = {part[path] for path in part if key in path.split(".")}
                assert mine == {role}, (key, part)


def test_parts_within_parts() -> None:
    """Structure counts at every depth; names on two levels, and never inside of a network."""
    assert set(roles_of({"a": {"b": {"c": [ADAM]}}}).values()) == {"optimizer"}
    agents = roles_of({"actor": {"net": NET, "optimizer": ADAM}})
    assert {path.split(".")[1]: role for path, role in agents.items()} == {
        "net": "weights", "optimizer": "optimizer",
    }  # fmt: skip
    assert roles_of({"a": {"b": {"optimizer": {"x": T}}}}) == {"a.b.optimizer.x": "weights"}
    assert roles_of({"model": {"optimizer": {"x": T}}}) == {"model.optimizer.x": "weights"}
    assert roles_of([NET, {"optimizer": {"x": T}}])["1.optimizer.x"] == "optimizer"


def test_flat_state_dicts() -> None:
    """A state of keys straight to tensors is weights, but for states of generators."""
    flat = {"optimizer": T, "data": INTS, "lr": ONE, "w": T * 2, "rng_state": CPU, "epoch": 3}
    assert roles_of(flat) == {**dict.fromkeys(["optimizer", "data", "lr", "w"], "weights"),
                              "rng_state": "rng"}  # fmt: skip
    assert roles_of(T) == {"": "weights"}


def test_overrides() -> None:
    """The first override that matches wins, and only roles are allowed."""
    state = {"model": {"rng": T, "w": T.clone()}, "optimizer": {"master": T * 2, "m": T * 3}}
    overrides: dict[Any, str] = {"model.rng": "rng", "model.*": "extra"}
    found = roles_of(state, {**overrides, ("optimizer", "master"): "weights"})
    assert list(found.values()) == ["rng", "extra", "weights", "optimizer"]
    with pytest.raises(InvalidInputError, match="a role is one of"):
        RoleRules({"*": "weight"})
    assert [role_of_name(name) for name in ("optim_0", "dataloader", "x", "lr_scheduler")] == [
        "optimizer", "data", "weights", "optimizer",
    ]  # fmt: skip
    assert set(found.values()) | {"data"} == set(ROLES)


def test_what_an_older_rule_gave() -> None:
    """Its role counts unless this rule finds weights; one that was given by this rule counts."""
    rules = RoleRules({"fixed": "extra"})
    assert rules.judge(("mpd", "w"), "extra", 1).role == "weights"
    assert rules.judge(("mpd", "w"), "extra", 2).role == "extra"
    assert rules.judge(("fixed", "w"), "weights", 1).role == "extra"


HOOKS = (
    "__getattribute__", "__repr__", "__str__", "__len__", "__bool__", "__eq__", "__iter__",
    "__float__", "__index__", "__format__", "__getitem__", "__fspath__", "__call__", "__array__",
)  # fmt: skip


def fails(*_: object, **__: object) -> Any:  # noqa: ANN401 - it returns nothing
    """Raise an error that no caller expects of an attribute."""
    raise KeyError("foreign")


def hostile(base: type, *more: str) -> Callable[[], Any]:
    """Return a class all of whose methods fail."""
    body: dict[str, Any] = dict.fromkeys((*HOOKS, *more), fails)
    body |= {"__hash__": lambda _: 1, "__class__": property(fails)}
    return type("Foreign", (base,), body)


class Gives(dict[str, Any]):
    """A dict whose attributes are its items."""

    __getattr__ = dict.__getitem__


class Always:
    """Has every attribute, and each can be called."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return lambda *_, **__: Always()


FOREIGN: dict[str, Callable[[], Any]] = {
    "object": hostile(object), "mapping": hostile(collections.abc.Mapping, "items", "keys"),
    "dict": hostile(dict, "items", "keys", "__contains__"), "list": hostile(list),
    "ordered": hostile(collections.OrderedDict, "items", "keys"),
    "attributes": lambda: Gives({"a b": "b"}), "always": Always,
    "namespace": lambda: types.SimpleNamespace(x=hostile(object)()),
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a new store."""
    with ckptstore.open(tmp_path / "store", create=True, engine="thread") as opened:
        yield opened


@pytest.fixture
def run(store: ckptstore.Store) -> ckptstore.Run:
    """Return a run of the store."""
    return store.run("r")


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_but_the_class_is_asked(run: ckptstore.Run, name: str) -> None:
    """Every way in refuses it by an error of ckptstore; in a state, the path is named."""
    value = FOREIGN[name]()
    adapter = ckptstore.TypeAdapter(
        name="x", type=type(value), to_state=fails, from_state=lambda state: state
    )
    states: list[tuple[object, str, dict[str, Any]]] = [
        ({"a": [{"b": value}]}, "'a.0.b'", {}),
        (value, "the state itself", {}),
        ({"a": (value,)}, "'a.0", {"plain": True}),
        ({"a": value}, "'a'", {"adapters": [adapter]}),
    ]
    for state, where, words in states:
        with pytest.raises(StateError, match=where):
            run.save(state, 1, **words)
        with pytest.raises(StateError, match=where):
            run.save_async(state, 1, **words)
    nested = {"m": [value, {1, 2}]}
    ways: list[Callable[[], object]] = [
        lambda: run.save({}, 1, metrics={"m": value}), lambda: run.save({}, 1, metrics=value),
        lambda: run.save_async({}, 1, metrics={"m": value}).result(),
        lambda: run.save({}, 1, tags=value), lambda: run.save({}, 1, tags=[value]),
        lambda: run.save({}, 1, metadata=nested), lambda: run.save({}, value),
        lambda: run.save_async({}, 1, metadata=nested).result(),
        lambda: run.save({}, 1, roles=value), lambda: run.save({}, 1, adapters=[value]),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        with pytest.raises(CkptStoreError) as caught:
            way()
        assert caught.value.message, number


def test_fields_that_fail(run: ckptstore.Run) -> None:
    """A dataclass whose field raises is refused by its path, by ``plain=True`` as well."""
    record = dataclasses.make_dataclass("Record", ["field"])(3)
    type(record).field = property(fails)
    with pytest.raises(StateError, match="'a'"):
        run.save({"a": record}, 1, plain=True)


Text = type("Text", (str,), {"__slots__": (), "__str__": fails, "__repr__": fails, "upper": fails})
Number = type("Number", (int,), {"__bool__": fails})
Real = type("Real", (float,), {"__eq__": fails, "__hash__": float.__hash__})
Raw = type("Raw", (bytes,), {"__len__": fails})


def test_subclasses_that_add_nothing_are_stored_as_their_value(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As values, as keys and in metadata; each class is told once."""
    module._TOLD.clear()
    run = store.run("r")
    version = torch.__version__
    state = {"v": [version, Text("x" * 9000), Number(-7), Real(0.5), Raw(b"y" * 9000)],
             "k": {Text("a"): 1, Number(3): 2, np.str_("b"): 3}, "again": version}  # fmt: skip
    run.save(state, 1, metadata={"torch": torch.__version__, "n": [Number(4), np.float64(0.5)]})
    back = run.load(1)
    assert back == {"v": [str(torch.__version__), "x" * 9000, -7, 0.5, b"y" * 9000],
                    "k": {"a": 1, 3: 2, "b": 3}, "again": str(torch.__version__)}  # fmt: skip
    assert [type(x) for x in back["v"]] == [str, str, int, float, bytes]
    assert run.head is not None
    assert run.head.metadata == {"torch": str(torch.__version__), "n": [4, 0.5]}
    told = [record.getMessage() for record in caplog.records if "stored as" in record.getMessage()]
    assert len(told) == 5
    assert "'v.0' is a torch.torch_version.TorchVersion: stored as str" in told
    for zipped in (True, False):
        torch.save({"v": torch.__version__}, tmp_path / "x.pt",
                   _use_new_zipfile_serialization=zipped)  # fmt: skip
        import_file(store, tmp_path / "x.pt", run="i", step=int(zipped))
        assert store.load("i") == {"v": str(torch.__version__)}


class Level(enum.IntEnum):
    """An enum: a load must not lose its members."""

    LOW = 1


class Tagged(str):  # noqa: SLOT000 - the attributes are the point
    """A text with attributes."""

    def __init__(self, _: str) -> None:
        self.source = "web"


class Slotted(str):
    """A text with a slot."""

    __slots__ = ("source",)


@pytest.mark.parametrize("value", [Level(1), Tagged("a"), Slotted("a")], ids=lambda x: str(type(x)))
def test_subclasses_that_add_something_are_refused(run: ckptstore.Run, value: object) -> None:
    """As a value and as a key."""
    for state in ({"a": value}, {"a": {value: 1}}):
        with pytest.raises(StateError, match="'a'"):
            run.save(state, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_integers(run: ckptstore.Run, sign: int) -> None:
    """Numbers of as many digits as the limit says are stored, and none of one more."""
    most = 10**limits.INT_DIGITS_MAX - 1
    run.save({"n": sign * most, sign * most: 1}, 1)
    assert run.load(1) == {"n": sign * most, sign * most: 1}
    with pytest.raises(StateError, match="to_bytes"):
        run.save({"n": sign * (most + 1)}, 1)
