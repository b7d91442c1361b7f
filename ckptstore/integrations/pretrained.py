"""Writes versions as folders for ``from_pretrained`` of transformers and PEFT."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import InvalidInputError, NotFoundError, TensorNotFoundError
from ckptstore.integrations import pretrained_models as models
from ckptstore.integrations.export_folder import export_folder
from ckptstore.integrations.pretrained_files import described, names_digest
from ckptstore.store import Store


def describe_model(model: Any, processing: Any = None) -> dict[str, Any]:
    """Return the files of ``save_pretrained`` except the weights, as plain values.

    Save it as ``pretrained`` beside the state dict ``model``, with the role of weights.

    Parameters
    ----------
    model
        A model of transformers, or one of PEFT around it. A model without ``config`` gives an
        empty description.
    processing
        A tokenizer or processor; its files are stored unchanged.
    """
    found: dict[str, Any] = {}
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if hasattr(model, "get_base_model"):
        found["adapter_config"] = models.adapter_configs(model)
        model = model.get_base_model()
    for part in ("config", "generation_config"):
        config = getattr(model, part, None)
        if config is not None:
            found[part] = json.loads(config.to_json_string())
    if "config" in found and not found["config"].get("architectures"):
        kind = type(model).__bases__[-1] if isinstance(model, FSDPModule) else type(model)
        found["config"]["architectures"] = [kind.__name__]
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
    merge: bool = False,
    **options: Any,
) -> Path:
    """Write the model of a version as ``save_pretrained`` does: safetensors and configuration.

    If the version has no configuration or tokenizer, they come from the first version of its
    run, or of a run before it: an imported folder, for example.

    Parameters
    ----------
    ref
        A version that :class:`ckptstore.integrations.transformers.StoreTrainerMixin` saved,
        or that is an imported folder; or any whose ``model`` is the state dict of a model.
    folder
        Made if it is missing. Files of the same names are replaced, and those of an earlier
        export removed, which ``.ckptstore-export.json`` names; other files stay. Readers see the
        earlier export or this one; where ``config.json`` changes, none for a moment.
    model
        Of the class and configuration that was saved; it gets the weights. For an adapter, its
        base model, which is copied first. None: the class that the saved configuration names, of
        transformers itself.
    merge
        For a version with an adapter: write the whole model, with the adapter added to its
        weights, instead of the adapter alone (in a folder of its name, unless that is
        ``default``). If the version has no weights of the base model, they come from `model`, or
        else from the place that the adapter's configuration names.
    options
        For ``save_pretrained``, such as ``max_shard_size="5GB"``.

    Raises
    ------
    TensorNotFoundError
        The version has no entry ``model``.
    InvalidInputError
        The version has no configuration, or names a class that transformers lacks; or
        there is nothing to merge; or the folder holds other weights that readers would use.
    ConflictError
        Another process exports to the folder.
    StateError
        Its weights do not fit the model.
    MissingDependencyError
        Transformers, or PEFT for an adapter, is needed and not installed.
    StorageError
        The folder cannot be written, or the version cannot be read.
    """
    path = Path(folder)
    _check_model(model)
    saved = _saved(store, ref)
    if merge and not saved.adapters:
        raise InvalidInputError(f"{ref!r} has no adapter to merge", hint="leave merge out")
    with export_folder(path) as made:
        files = _files(saved.about, made)
        named = saved.about.get("names") == names_digest(map(str, saved.state))
        if named and model is None and not merge:
            models.write_as_read(saved, made, options)
        elif saved.adapters:
            models.write_adapter(saved, made, model=model, merge=merge, options=options)
        else:
            full = model if model is not None else models.empty_model(saved)
            models.fill(full, saved, assign=model is None)
            full.save_pretrained(made, **options)  # type: ignore[operator]  # a PreTrainedModel
        for target, data in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return path


def load_pretrained(store: Store, ref: str, *, model: torch.nn.Module | None = None) -> Any:
    """Return the model of a version; see :meth:`ckptstore.Store.from_pretrained`."""
    _check_model(model)
    saved = _saved(store, ref)
    if saved.adapters:
        made = models.adapted_model(saved, model, device="cpu")
    else:
        made = model if model is not None else models.empty_model(saved, device="cpu")
        models.fill(made, saved, assign=model is None)
        if model is None:
            made.tie_weights()  # type: ignore[operator]  # a PreTrainedModel
    return made.eval()


def _check_model(model: object) -> None:
    if model is not None and (isinstance(model, type) or not hasattr(model, "load_state_dict")):
        msg = f"model must be an instance of a model, not {model!r:.80}"
        raise InvalidInputError(msg, hint="model=MyModel(config), or leave it out")


def _weights(store: Store, version: str, ref: str) -> Mapping[str, torch.Tensor]:
    try:
        found = store.load(f"#{version}", include=["model"]).get("model")
    except TensorNotFoundError:
        found = None
    if not isinstance(found, Mapping):
        msg = f"{ref!r} has no state dict at 'model'"
        hint = "fork it with rename={'': 'model'} if its weights lie at the root"
        raise TensorNotFoundError(msg, hint=hint)
    return found


def _saved(store: Store, ref: str) -> models.SavedModel:
    version = store.resolve(ref).id
    weights = _weights(store, version, ref)
    about = described(store.repo.refresh(), version, lambda one: _said(store, one))
    return models.SavedModel(ref=ref, about=about, state=weights)


def _said(store: Store, version: str) -> Any:  # what the version holds there
    """Return a version's own description of its model; None without one, or if its data is gone."""
    try:
        return store.load(f"#{version}", include=[BESIDE])[BESIDE]
    except NotFoundError:
        return None


def _files(about: Mapping[str, Any], folder: Path) -> dict[Path, bytes]:
    """Return the files that were stored unchanged, by their paths.

    Raises
    ------
    InvalidInputError
        A name leads out of the folder, or its entry is no file.
    """
    found: dict[Path, bytes] = {}
    for name, data in about.get("processing", {}).items():
        if not isinstance(name, str) or "\0" in name or not isinstance(data, bytes):
            raise InvalidInputError(f"the version holds something that is no file: {name!r}")
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            msg = f"the version names a file outside of the folder: {name!r}"
            raise InvalidInputError(msg)
        found[target] = data
    return found
