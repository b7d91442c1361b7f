"""Names of a model's weights in a version: the same for a compiled model and for its original.

Also the choice of weights that training changes: a version may leave out the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS: Final = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def clean(name: str) -> str:
    """Return the name of a weight without those of wrappers, such as ``torch.compile``'s."""
    return _WRAPPERS.sub("", name)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DistributedDataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(model.__dict__.get("_modules", {}).get("_orig_mod"), torch.nn.Module):
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


def as_named_in(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by the names that a model has for them; unknown names stay."""
    mine = {clean(name): name for name in model.state_dict()}
    return {mine.get(clean(name), name): value for name, value in state.items()}


def untrained(model: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Return those of the names whose weights training leaves as they are.

    They are frozen parameters, with all that is named below them (parts of quantized weights).
    Adapters of PEFT count as trained, also inactive ones, which are frozen.
    """
    adapters = set(getattr(unwrapped(model), "peft_config", None) or ())
    frozen = {
        clean(name)
        for name, one in model.named_parameters(remove_duplicate=False)
        if not one.requires_grad and adapters.isdisjoint(name.split("."))
    }
    return {name for name in names if _is_below(clean(name), frozen)}


def _is_below(name: str, places: set[str]) -> bool:
    while name and name not in places:
        name = name.rpartition(".")[0]
    return bool(name)


def may_lack(model: torch.nn.Module, names: Iterable[str], saved: Collection[str]) -> set[str]:
    """Return the names that a version may lack.

    They are the untrained ones, if it has none of them; and of tied weights all but one.
    """
    left = untrained(model, names)
    params = {clean(name): id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    filled = {params[name] for name in map(clean, saved) if name in params}
    tied = {name for name in names if params.get(clean(name)) in filled}
    return tied.difference(saved) | (left if left.isdisjoint(saved) else set())


def set_whole(model: torch.nn.Module, state: Mapping[str, Any]) -> Any:  # of torch
    """Load whole weights, and return what torch does: the names that are missing or unexpected.

    Untrained weights are not missing if the version has none of them.
    """
    named = as_named_in(model, state)
    loaded = model.load_state_dict(named, strict=False)
    lacking = may_lack(model, model.state_dict(), named)
    loaded.missing_keys[:] = [name for name in loaded.missing_keys if name not in lacking]
    return loaded
