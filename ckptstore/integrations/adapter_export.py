"""Adapters of PEFT: their configuration in a version, and folders written from it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.pretrained_models import (
    SavedModel,
    check_names,
    class_named,
    empty_model,
    fill,
    needed,
    write_as_read,
    write_json,
)

if TYPE_CHECKING:
    import torch

_CONFIG: Final = "adapter_config.json"


def adapter_configs(model: Any) -> dict[str, Any]:  # noqa: ANN401 - a PeftModel
    """Return the configurations of a model's adapters by their names, as PEFT writes them."""
    found: dict[str, Any] = {}
    for name, config in model.peft_config.items():
        with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
            config.save_pretrained(folder)
            text = Path(folder, _CONFIG).read_text(encoding="utf-8")
        found[name] = {**json.loads(text), "inference_mode": True}
    return found


def write_adapter(
    saved: SavedModel,
    folder: Path,
    *,
    model: Any,  # noqa: ANN401 - a base model, a PeftModel, or None
    merge: bool,
    options: Mapping[str, Any],
) -> None:
    """Write the adapters of a version, or its base model with the adapters merged.

    Raises
    ------
    StateError
        Weights are missing, or left over.
    InvalidInputError
        The base model is needed and cannot be loaded, or the adapter cannot be merged.
    MissingDependencyError
        PEFT or transformers is not installed.
    """
    peft = needed("peft", "peft")
    ref, configs = saved.ref, saved.adapters
    for name, config in configs.items():
        if not isinstance(name, str) or name == ".." or Path(name).name != name or "\0" in name:
            raise InvalidInputError(f"the version has an adapter of the name {name!r}")
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"the version has no configuration of the adapter {name!r}")
    if merge and len(configs) > 1:
        msg = f"{ref!r} has several adapters ({', '.join(configs)}), and one can be merged"
        raise InvalidInputError(msg, hint="export them, and merge them with PEFT")
    model = deepcopy(model)  # PEFT puts adapters into it, and merges them, in place
    if isinstance(model, peft.PeftModel):
        model = model.unload()
    if not merge:
        _write_alone(saved, folder, model, options)
        return
    adapted = _with_own_base(saved) if model is None else None
    if adapted is None:
        adapted = _filled(_adapted(_base_model(saved) if model is None else model, saved), saved)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = next(iter(configs.values())).get("peft_type")
        msg = f"the adapter of {ref!r} cannot be merged: it is of the kind {kind}"
        raise InvalidInputError(msg, hint="export the adapter (merge=False)")
    adapted.merge_and_unload().save_pretrained(folder, **options)


def _with_own_base(saved: SavedModel) -> Any:  # noqa: ANN401 - a PeftModel, or None
    """Return the adapted model of a version that also has the weights of its base, else None."""
    if "config" not in saved.about:
        return None
    adapted = _adapted(empty_model(saved), saved)
    if not saved.state.keys() <= adapted.state_dict().keys():
        return None
    _filled(adapted, saved)
    whole = not any(tensor.is_meta for tensor in adapted.state_dict().values())
    return adapted if whole else None


def _write_alone(
    saved: SavedModel,
    folder: Path,
    model: Any,  # noqa: ANN401 - a base model, or None
    options: Mapping[str, Any],
) -> None:
    """Write each adapter to the folder that PEFT reads it from."""
    adapted = _adapted(model or empty_model(saved), saved)
    places = {name: folder if name == "default" else folder / name for name in saved.adapters}
    first = next(iter(places))
    if saved.state.keys() == _own(adapted, first).keys():
        only = {"adapter_config": {first: saved.adapters[first]}}
        write_as_read(replace(saved, about=only), places[first], options)
        return
    _filled(adapted, saved).save_pretrained(str(folder), **options)
    for name, place in places.items():
        write_json(place / _CONFIG, saved.adapters[name])


def _own(adapted: Any, name: str) -> Mapping[str, torch.Tensor]:  # noqa: ANN401 - a PeftModel
    """Return the weights of one adapter by their names in a file."""
    found: Mapping[str, torch.Tensor] = needed("peft").get_peft_model_state_dict(
        adapted, adapter_name=name, save_embedding_layers=False
    )
    return found


def _base_model(saved: SavedModel) -> Any:  # noqa: ANN401 - a PreTrainedModel
    """Return the base model that an adapter names, from a folder or the hub."""
    from transformers import AutoConfig

    name = next(iter(saved.adapters.values())).get("base_model_name_or_path")
    msg = f"{saved.ref!r} holds an adapter without the weights of its base model"
    hint = "give it: export_pretrained(..., merge=True, model=base_model)"
    if not name:
        raise InvalidInputError(f"{msg}, and does not name it", hint=hint)
    try:
        config = saved.about.get("config") or AutoConfig.from_pretrained(name).to_dict()
        return class_named(config).from_pretrained(name)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise InvalidInputError(
            f"{msg}, and {name!r} cannot be loaded: {why}", hint=hint
        ) from error


def _adapted(base: Any, saved: SavedModel) -> Any:  # noqa: ANN401
    """Return a base model with the adapters of a version, still without their weights.

    Raises
    ------
    InvalidInputError
        PEFT rejects the configuration.
    """
    peft = needed("peft", "peft")
    adapted: Any = None
    try:
        for name, values in saved.adapters.items():
            config = peft.PeftConfig.from_peft_type(**values)
            if not getattr(base, "name_or_path", None):
                base.name_or_path = config.base_model_name_or_path
            config.base_model_name_or_path = base.name_or_path
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = False  # the weights come from the version
            if adapted is None:
                adapted = peft.get_peft_model(base, config, name, low_cpu_mem_usage=True)
            else:
                adapted.add_adapter(name, config, low_cpu_mem_usage=True)
    except Exception as error:  # any error of PEFT on a hostile configuration
        msg = f"PEFT makes no adapter of the configuration of {saved.ref!r}: {error}"
        raise InvalidInputError(msg, hint="see pretrained.adapter_config of the version") from error
    return adapted


def _filled(adapted: Any, saved: SavedModel) -> Any:  # noqa: ANN401 - a PeftModel
    """Load the weights of the adapters, and the base model's weights that the version has.

    Raises
    ------
    StateError
        A weight of an adapter is missing, or a weight belongs to none.
    """
    names, ref = list(saved.adapters), saved.ref
    if saved.state.keys() <= adapted.state_dict().keys():
        fill(adapted, saved, assign=True, partly=True)
    else:
        try:
            loaded = needed("peft").set_peft_model_state_dict(
                adapted, dict(saved.state), names[0], low_cpu_mem_usage=True
            )
        except (RuntimeError, LookupError) as error:  # wrong shapes, or a missing part
            raise StateError(f"the weights of {ref!r} do not fit: {error}") from error
        check_names(ref, adapted, [], loaded.unexpected_keys)
    weights = {key: value for name in names for key, value in _own(adapted, name).items()}
    check_names(ref, adapted, [key for key, value in weights.items() if value.is_meta], [])
    return adapted
