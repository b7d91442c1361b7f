"""Writes versions as folders for ``from_pretrained`` of transformers and PEFT."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint.selection import BESIDE
from ckptstore.errors import (
    InvalidInputError,
    NotFoundError,
    TensorNotFoundError,
)
from ckptstore.integrations.pretrained_files import CONFIGS, names_digest
from ckptstore.integrations.pretrained_models import (
    SavedModel,
    adapter_configs,
    empty_model,
    fill,
    write_adapter,
    write_as_read,
)
from ckptstore.store import Store

if TYPE_CHECKING:
    import torch


def describe_model(model: Any, processing: Any = None) -> dict[str, Any]:  # noqa: ANN401
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
    if hasattr(model, "get_base_model"):
        found["adapter_config"] = adapter_configs(model)
        model = model.get_base_model()
    for part in ("config", "generation_config"):
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
    merge: bool = False,
    **options: Any,  # noqa: ANN401 - as save_pretrained
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
        Made if it is missing. Its files of the same names are replaced.
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
        there is nothing to merge.
    StateError
        Its weights do not fit the model.
    MissingDependencyError
        Transformers, or PEFT for an adapter, is needed and not installed.
    """
    _check_given(folder, model)
    version = store.resolve(ref)
    weights = _weights(store, version.id, ref)
    saved = SavedModel(ref=ref, about=_about(store, version.id), state=weights)
    path = Path(folder)
    if merge and not saved.adapters:
        raise InvalidInputError(f"{ref!r} has no adapter to merge", hint="leave merge out")
    files = _files(saved.about, path)
    named = saved.about.get("names") == names_digest(map(str, weights))
    if named and model is None and not merge:
        write_as_read(saved, path, options)
    elif saved.adapters:
        write_adapter(saved, path, model=model, merge=merge, options=options)
    else:
        made = model if model is not None else empty_model(saved)
        fill(made, saved, assign=model is None)
        made.save_pretrained(path, **options)  # type: ignore[operator]  # a PreTrainedModel
    for target, data in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return path


def _check_given(folder: str | os.PathLike[str], model: object) -> None:
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InvalidInputError(f"{os.fspath(folder)} is no folder", hint="name a new folder")
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
        raise TensorNotFoundError(
            msg, hint="fork it with rename={'': 'model'} if its weights lie at the root"
        )
    return found


def _about(store: Store, version: str) -> Mapping[str, Any]:
    """Return a version's description of its model, completed by those its runs began with."""
    about = _said(store, version)
    for found in store.repo.refresh().ancestors(version):
        if about is not None and "processing" in about:
            break
        before = store.repo.catalog.version(found.parent) if found.parent else None
        if found.deleted or (before is not None and before.run == found.run):
            continue
        said = _said(store, found.id) if found.id != version else None
        if about is None:
            about = said
        elif said is not None:
            about = {**about, "processing": said.get("processing", {})}
    return about or {}


def _said(store: Store, version: str) -> Mapping[str, Any] | None:
    """Return a version's own description of its model; None without one, or if its data is gone."""
    try:
        about = store.load(f"#{version}", include=[BESIDE])[BESIDE]
    except NotFoundError:
        return None
    parts = [about, *(about.get(part, {}) for part in (*CONFIGS, "processing"))] if about else []
    if not all(isinstance(part, Mapping) for part in (about, *parts)):
        raise InvalidInputError(f"#{version[:8]} holds something else at {BESIDE!r}")
    found: Mapping[str, Any] = about
    return found


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
