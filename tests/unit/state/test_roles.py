"""Roles by convention, for flat state dicts, and by override."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptstore.errors import InvalidInputError
from ckptstore.format.paths import Path, Pattern
from ckptstore.format.roles import ROLES, RoleRules


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        ("weights", "model module state_dict model_state_dict ema ema_model weights net generator "
         "lora"),
        ("optimizer", "optimizer optim optimizer_states opt lr_schedulers scheduler scaler "
         "model_optimizer optimizer_g amp"),
        ("rng", "rng rng_state rng_states torch_rng cuda_rng_state_all random random_state seed "
         "optim_rng"),
        ("data", "data dataloader train_dataloader sampler dataset loader data_state "
         "sampler_state"),
        ("extra", "epoch step callbacks loops metadata config args history best metrics"),
    ],
)  # fmt: skip
def test_top_level_keys(role: str, keys: str) -> None:
    """The words of the top-level key decide, whatever lies below."""
    for key in keys.split():
        for name in (key, key.upper()):
            if name != "STATE_DICT":
                assert role_of((name, "deep", 0, "random")) == role, name


def test_second_key() -> None:
    """Where the top-level key says nothing, a plain second key does; deeper ones never do."""
    assert role_of(("app", "model", "w")) == "weights"
    assert role_of(("state", "optimizer", "w")) == "optimizer"
    assert role_of(("app", "data_proj", "w")) == "extra"
    assert role_of(("app", "x", "model")) == "extra"
    assert role_of((0, "model")) == "weights"
    assert role_of((0, 1)) == "extra"
    assert role_of(()) == "extra"


def test_flat_state_dicts() -> None:
    """A state of string keys straight to tensors is weights; layer names are not conventions."""
    assert RoleRules.is_flat([("a.b",), ("c",)])
    assert not RoleRules.is_flat([("a", "b"), ("c",)])
    assert not RoleRules.is_flat([])
    assert not RoleRules.is_flat([(0,)])
    rules = RoleRules(flat=True)
    assert rules(("data_proj.weight",)) == "weights"
    assert rules(("optimizer.x",)) == "weights"
    assert rules(("rng_state",)) == "rng"


def test_overrides() -> None:
    """The first override that matches wins, and only roles are allowed."""
    overrides = {"model.rng": "rng", "model.*": "extra", ("optimizer", "master"): "weights"}
    rules = RoleRules(overrides)  # type: ignore[arg-type]
    assert rules(("model", "rng", 1)) == "rng"
    assert rules(("model", "w")) == "extra"
    assert rules(("optimizer", "master", 0)) == "weights"
    assert rules(("optimizer", "state", 0)) == "optimizer"
    with pytest.raises(InvalidInputError, match="is not a role"):
        RoleRules({"*": "weight"})
    assert {role_of((key,)) for key in ("model", "optim", "rng", "data", "x")} == set(ROLES)


def role_of(
    path: Path, overrides: Mapping[Pattern, str] | None = None, *, flat: bool = False
) -> str:
    """Return the role of one tensor."""
    return RoleRules(overrides, flat=flat)(path)
