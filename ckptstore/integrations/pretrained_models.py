"""Models of transformers and PEFT: made, filled and written, with what a version says of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInputError, MissingDependencyError, StateError
from ckptstore.integrations.pretrained_files import CONFIGS

if TYPE_CHECKING:
    import torch

_GIVE_MODEL = "give the model: export_pretrained(..., model=model)"


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


def fill(
    model: Any,  # noqa: ANN401 - a PreTrainedModel or PeftModel
    saved: SavedModel,
    *,
    assign: bool,
    partly: bool = False,
) -> None:
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
    if missing and not unexpected:
        tie = getattr(model, "tie_weights", None)
        if tie is not None:
            tie()
        own = model.state_dict(keep_vars=True)
        filled = {id(own[name]) for name in saved.state}
        missing = [name for name in missing if id(own[name]) not in filled]
    check_names(saved.ref, model, [] if partly else missing, unexpected)


def check_names(ref: str, model: object, missing: list[str], unexpected: list[str]) -> None:
    """Refuse weights that do not belong to a model.

    Raises
    ------
    StateError
        Weights are missing or left over; names the first.
    """
    if missing or unexpected:
        msg = (
            f"the weights of {ref!r} do not fit {type(model).__name__}: missing "
            f"{missing[:3]}, unexpected {unexpected[:3]}"
        )
        raise StateError(msg)


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


def needed(name: str, what: str = "'ckptstore[transformers]'") -> Any:  # noqa: ANN401 - a module
    """Return a module that an export needs.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        msg = f"{name} is not installed"
        raise MissingDependencyError(msg, hint=f"pip install {what}") from error


def class_named(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a class of transformers
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
        msg = f"transformers has no model class {name!r}"
        raise InvalidInputError(msg, hint=_GIVE_MODEL)
    return kind


def empty_model(saved: SavedModel) -> torch.nn.Module:
    """Return a model without weights, of the class that a configuration names.

    Raises
    ------
    InvalidInputError
        There is no configuration, or no class can be made of it.
    MissingDependencyError
        transformers is not installed.
    """
    import torch

    config = saved.about.get("config")
    if config is None:
        raise InvalidInputError(f"{saved.ref!r} has no configuration of a model", hint=_GIVE_MODEL)
    kind = class_named(config)
    try:
        wanted = kind.config_class.from_dict(dict(config))
        wanted._attn_implementation = "eager"  # other values may load code of the hub
        with torch.device("meta"):
            made = kind(wanted)
        generation = saved.about.get("generation_config")
        if generation is not None:
            made.generation_config = needed("transformers").GenerationConfig.from_dict(
                dict(generation)
            )
    except Exception as error:  # any error of transformers on a hostile configuration
        msg = (
            f"transformers makes no {kind.__name__} of the configuration of {saved.ref!r}: {error}"
        )
        raise InvalidInputError(msg, hint=_GIVE_MODEL) from error
    model: torch.nn.Module = made
    return model
