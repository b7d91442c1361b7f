"""Roles by structure, by names, and by override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.encodings.encoding_rules import EncodingRules
from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Pattern
from ckptstore.format.roles import ROLES, RoleRules, role_of_name
from ckptstore.states.save import draft_of
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
    with pytest.raises(InvalidInputError, match="is not a role"):
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
