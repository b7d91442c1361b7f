"""Models of transformers and PEFT: made, filled and written, with what a version says of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.libraries import needed
from ckptstore.integrations.pretrained_files import CONFIGS

_ADAPTER_CONFIG: Final = "adapter_config.json"
_GIVE_MODEL: Final = (
    "in Python export_pretrained(..., model=model); or save with it 'pretrained': "
    "describe_model(model)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """The model of a version."""

    ref: str
    """As the caller named the version."""
    about: Mapping[str, Any]
    """Configurations and other files, as saved at ``pretrained``."""
    state: Mapping[str, torch.Tensor]
    """Its state dict; for adapters, that of a ``PeftModel`` or of one adapter alone."""

    @property
    def adapters(self) -> Mapping[Any, Any]:
        """Configurations of its adapters, by name."""
        found: Mapping[Any, Any] = self.about.get("adapter_config") or {}
        return found


def fill(model: Any, saved: SavedModel, *, assign: bool, partly: bool = False) -> None:
    """Load weights into a model; of tied ones, one is enough.

    Parameters
    ----------
    assign
        Use the tensors themselves instead of copying: for a model on the meta device.
    partly
        Allow missing weights.

    Raises
    ------
    StateError
        Weights are missing or left over, or have another shape; names the first.
    """
    try:
        missing, unexpected = model.load_state_dict(saved.state, strict=False, assign=assign)
    except RuntimeError as error:  # wrong shapes
        raise StateError(f"the weights of {saved.ref!r} do not fit: {error}") from error
    if assign:
        _unite(model)
    if missing and not unexpected:
        tie = getattr(model, "tie_weights", None)
        if tie is not None:
            tie()
        own = model.state_dict(keep_vars=True)
        filled = {id(own[name]) for name in saved.state}
        missing = [name for name in missing if id(own[name]) not in filled]
    check_names(saved.ref, model, [] if partly else missing, unexpected)


def _unite(model: torch.nn.Module) -> None:
    """Make parameters that share all of their memory one, so that each is counted once."""
    first: dict[object, torch.nn.Parameter] = {}
    for name, one in [*model.named_parameters(remove_duplicate=False)]:
        if one.numel() and not one.is_meta:
            key = (one.data_ptr(), one.shape, one.stride(), one.dtype)
            place, _, last = name.rpartition(".")
            setattr(model.get_submodule(place), last, first.setdefault(key, one))


def check_names(ref: str, model: object, missing: list[str], unexpected: list[str]) -> None:
    """Refuse weights that do not belong to a model.

    Raises
    ------
    StateError
        Weights are missing or left over; names the first.
    """
    if missing or unexpected:
        names = f"missing {missing[:3]}, unexpected {unexpected[:3]}"
        raise StateError(f"the weights of {ref!r} do not fit {type(model).__name__}: {names}")


def write_as_read(saved: SavedModel, folder: Path, options: Mapping[str, Any]) -> None:
    """Write weights under the names of an imported folder, or of an adapter's; makes no model.

    Raises
    ------
    MissingDependencyError
        huggingface_hub is not installed.
    """
    hub = needed("huggingface_hub")
    folder.mkdir(parents=True, exist_ok=True)
    adapter = next(iter(saved.adapters.values()), None)
    pattern = "adapter_model{suffix}.safetensors" if adapter else "model{suffix}.safetensors"
    hub.save_torch_state_dict(dict(saved.state), folder, **{"filename_pattern": pattern, **options})
    for part, config in {**saved.about, "adapter_config": adapter}.items():
        if part in CONFIGS and config is not None:
            write_json(folder / f"{part}.json", config)


def write_json(path: Path, config: object) -> None:
    """Write a configuration.

    Raises
    ------
    InvalidInputError
        It has a value that JSON cannot represent.
    """
    try:
        text = json.dumps(config, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"the version has nothing to write as {path}: {error}") from error
    path.write_text(text + "\n", encoding="utf-8")


def class_named(config: Mapping[str, Any]) -> Any:  # a class of transformers
    """Return the class of transformers that a configuration names.

    Raises
    ------
    InvalidInputError
        Transformers has no class of this name.
    MissingDependencyError
        transformers is not installed.
    """
    transformers = needed("transformers")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    kind = getattr(transformers, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise InvalidInputError(f"transformers has no model class {name!r}", hint=_GIVE_MODEL)
    return kind


def empty_model(saved: SavedModel, *, device: str = "meta") -> torch.nn.Module:
    """Return a model without the weights, of the class that a configuration names.

    Parameters
    ----------
    device
        ``meta`` if it is only written: it lacks the buffers that no state dict has.

    Raises
    ------
    InvalidInputError
        There is no configuration, or no class can be made of it.
    MissingDependencyError
        transformers is not installed.
    """
    config = saved.about.get("config")
    if config is None:
        raise InvalidInputError(f"{saved.ref!r} has no configuration of a model", hint=_GIVE_MODEL)
    kind = class_named(config)
    try:
        wanted = kind.config_class.from_dict(dict(config))
        # A saved value may load code of the hub; None is what transformers chooses itself.
        wanted._attn_implementation = "eager" if device == "meta" else None
        with torch.device(device):
            made = kind(wanted)
        generation = saved.about.get("generation_config")
        if generation is not None:
            config_class = needed("transformers").GenerationConfig
            made.generation_config = config_class.from_dict(dict(generation))
    except Exception as error:  # any error of transformers on a hostile configuration
        of = f"the configuration of {saved.ref!r}"
        msg = f"transformers makes no {kind.__name__} of {of}: {error}"
        raise InvalidInputError(msg, hint=_GIVE_MODEL) from error
    model: torch.nn.Module = made
    return model


# --- adapters of PEFT ---------------------------------------------------------------------------


def adapter_configs(model: Any) -> dict[str, Any]:  # a PeftModel
    """Return the configurations of a model's adapters by their names, as PEFT writes them."""
    found: dict[str, Any] = {}
    for name, config in model.peft_config.items():
        with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
            config.save_pretrained(folder)
            text = Path(folder, _ADAPTER_CONFIG).read_text(encoding="utf-8")
        found[name] = {**json.loads(text), "inference_mode": True}
    return found


def write_adapter(
    saved: SavedModel, folder: Path, *, model: Any, merge: bool, options: Mapping[str, Any]
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
    ref, configs = saved.ref, saved.adapters
    for name, config in configs.items():
        if not isinstance(name, str) or name == ".." or Path(name).name != name or "\0" in name:
            raise InvalidInputError(f"the version has an adapter of the name {name!r}")
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"the version has no configuration of the adapter {name!r}")
    if merge and len(configs) > 1:
        msg = f"{ref!r} has several adapters ({', '.join(configs)}), and one can be merged"
        raise InvalidInputError(msg, hint="export them, and merge them with PEFT")
    if not merge:
        _write_alone(saved, folder, _bare(model), options)
        return
    adapted = adapted_model(saved, model)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = next(iter(configs.values())).get("peft_type")
        msg = f"the adapter of {ref!r} cannot be merged: it is of the kind {kind}"
        raise InvalidInputError(msg, hint="export the adapter (merge=False)")
    adapted.merge_and_unload().save_pretrained(folder, **options)


def adapted_model(saved: SavedModel, model: Any, *, device: str = "meta") -> Any:  # a PeftModel
    """Return a copy of a base model, or the version's or named one, with the saved adapters.

    Parameters
    ----------
    device
        Of a base model that the version has; as of :func:`empty_model`.

    Raises
    ------
    InvalidInputError, StateError, MissingDependencyError
        As :func:`write_adapter`.
    """
    model = _bare(model)
    adapted = _with_own_base(saved) if model is None else None
    if adapted is None:
        return _filled(_adapted(_base_model(saved) if model is None else model, saved), saved)
    if device != "meta":
        adapted = _filled(_adapted(empty_model(saved, device=device), saved), saved)
    return adapted


def _bare(model: Any) -> Any:  # a base model, a PeftModel, or None
    """Return a copy without adapters: PEFT puts them into a model, and merges them, in place."""
    model = deepcopy(model)
    return model.unload() if isinstance(model, needed("peft", "peft").PeftModel) else model


def _with_own_base(saved: SavedModel) -> Any:  # a PeftModel, or None
    """Return the adapted model of a version that also has the weights of its base, else None."""
    if "config" not in saved.about:
        return None
    adapted = _adapted(empty_model(saved), saved)
    if not saved.state.keys() <= adapted.state_dict().keys():
        return None
    _filled(adapted, saved)
    return None if any(tensor.is_meta for tensor in adapted.state_dict().values()) else adapted


def _write_alone(saved: SavedModel, folder: Path, model: Any, options: Mapping[str, Any]) -> None:
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
        write_json(place / _ADAPTER_CONFIG, saved.adapters[name])


def _own(adapted: Any, name: str) -> Mapping[str, torch.Tensor]:  # a PeftModel
    """Return the weights of one adapter by their names in a file."""
    found: Mapping[str, torch.Tensor] = needed("peft").get_peft_model_state_dict(
        adapted, adapter_name=name, save_embedding_layers=False
    )
    return found


def _base_model(saved: SavedModel) -> Any:  # a PreTrainedModel
    """Return the base model that an adapter names, from a folder or the hub."""
    from transformers import AutoConfig

    name = next(iter(saved.adapters.values())).get("base_model_name_or_path")
    msg = f"{saved.ref!r} holds an adapter without the weights of its base model"
    hint = "give it: model=base_model"
    if not name:
        raise InvalidInputError(f"{msg}, and does not name it", hint=hint)
    try:
        config = saved.about.get("config") or AutoConfig.from_pretrained(name).to_dict()
        return class_named(config).from_pretrained(name)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        msg = f"{msg}, and {name!r} cannot be loaded: {why}"
        raise InvalidInputError(msg, hint=hint) from error


def _adapted(base: Any, saved: SavedModel) -> Any:
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


def _filled(adapted: Any, saved: SavedModel) -> Any:  # a PeftModel
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
