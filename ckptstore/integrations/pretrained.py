"""Folders that ``from_pretrained`` of transformers reads, from versions."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import (
    InvalidInputError,
    MissingDependencyError,
    StateError,
    TensorNotFoundError,
)
from ckptstore.store import Store

if TYPE_CHECKING:
    import torch

__all__ = ["describe_model", "export_pretrained"]

_PARTS: Final = ("config", "generation_config")


def describe_model(model: Any, processing: Any = None) -> dict[str, Any]:  # noqa: ANN401
    """Return what a folder of ``save_pretrained`` holds besides the weights, as plain values.

    Parameters
    ----------
    model
        What has no ``config`` is described by nothing.
    processing
        A tokenizer or processor; its files are taken as they are.
    """
    found: dict[str, Any] = {}
    for part in _PARTS:
        config = getattr(model, part, None)
        if config is not None:
            found[part] = json.loads(config.to_json_string())
    if "config" in found and not found["config"].get("architectures"):
        found["config"]["architectures"] = [type(model).__name__]
    if processing is not None:
        with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
            processing.save_pretrained(folder)
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            found["processing"] = {
                path.relative_to(folder).as_posix(): path.read_bytes() for path in files
            }
    return found


def export_pretrained(
    store: Store,
    ref: str,
    folder: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    **options: Any,  # noqa: ANN401 - as save_pretrained
) -> Path:
    """Write the model of a version as ``save_pretrained`` does: safetensors and configuration.

    Parameters
    ----------
    ref
        Names a version that :class:`ckptstore.integrations.transformers.StoreTrainerMixin` saved;
        or any whose ``model`` is the state dict of `model`.
    folder
        Made if it is not there. What it holds of the same names is replaced.
    model
        Of the class and configuration that was saved; it gets the weights. None: the class that
        the saved configuration names, of transformers itself.
    options
        For ``save_pretrained``, such as ``max_shard_size="5GB"``.

    Raises
    ------
    InvalidInputError
        The version has no configuration, or names a class that transformers does not have.
    StateError
        Its weights do not fit the model.
    MissingDependencyError
        No model is given, and there is no transformers to make one.
    """
    version = store.resolve(ref)
    state = store.load(f"#{version.id}", include=["model"])
    about = _about(store, version.id)
    made = model if model is not None else _empty_model(about, ref)
    loaded = made.load_state_dict(state["model"], strict=False, assign=model is None)
    if loaded.missing_keys or loaded.unexpected_keys:
        msg = (
            f"the weights of {ref!r} do not fit {type(made).__name__}: missing "
            f"{loaded.missing_keys[:3]}, unexpected {loaded.unexpected_keys[:3]}"
        )
        raise StateError(msg)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(path, **options)  # type: ignore[operator]  # a PreTrainedModel
    for name, data in about.get("processing", {}).items():
        target = path / name
        if not target.resolve().is_relative_to(path.resolve()):
            msg = f"the version names a file outside of the folder: {name!r}"
            raise InvalidInputError(msg)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return path


def _about(store: Store, version: str) -> Mapping[str, Any]:
    try:
        found = store.load(f"#{version}", include=["pretrained"])
    except TensorNotFoundError:
        return {}
    about: Mapping[str, Any] = found["pretrained"]
    return about


def _empty_model(about: Mapping[str, Any], ref: str) -> torch.nn.Module:
    """Return a model without weights, of the class that a configuration names."""
    import torch

    try:
        import transformers
    except ModuleNotFoundError as error:
        msg = "transformers is not installed"
        raise MissingDependencyError(msg, hint="pip install 'ckptstore[transformers]'") from error
    config = about.get("config")
    if config is None:
        msg = f"{ref!r} has no configuration of a model"
        raise InvalidInputError(msg, hint="give the model: export_pretrained(..., model=model)")
    name = (config.get("architectures") or [""])[0]
    kind = getattr(transformers, name, None) if name else None
    if kind is None or not issubclass(kind, transformers.PreTrainedModel):
        msg = f"transformers has no model class {name!r}"
        raise InvalidInputError(msg, hint="give the model: export_pretrained(..., model=model)")
    with torch.device("meta"):
        made = kind(kind.config_class.from_dict(config))
    generation = about.get("generation_config")
    if generation is not None:
        made.generation_config = transformers.GenerationConfig.from_dict(generation)
    model: torch.nn.Module = made
    return model
