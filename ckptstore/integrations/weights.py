"""Weights of any training's version, loaded into a model: see docs/reference/trainers.md.

::

    load_weights(model, store.run("gpt"), "best:val_loss")

Trainers keep weights at different places: ``models.0`` (Accelerate), ``model`` (Trainer),
``state_dict.net`` (Lightning). The place is found by the names of the model's weights.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations import sharded_states as sharded
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.model_names import may_lack, unwrapped
from ckptstore.integrations.ranks import from_first
from ckptstore.model import Version
from ckptstore.store import Run

__all__ = ["load_weights"]


def load_weights(
    model: torch.nn.Module, run: Run, ref: str | int = "latest", *, path: str | None = None
) -> Version:
    """Set the weights of a model to those of a version that any trainer saved; return that.

    All ranks call it. The model may be sharded, compiled, or in DistributedDataParallel; of a
    LightningModule give the model inside, if other trainers saved the version.

    Parameters
    ----------
    ref
        Of the run: ``latest``, a step, ``best:val_loss`` ...
    path
        Place of the weights in the version, such as ``ema``; found if None.

    Raises
    ------
    StateError
        The version has no such weights, or others beside them. Nothing was changed.
    InvalidInputError
        The version has such weights at several places; names them.
    CkptStoreError
        A rank could not read the version. Nothing was changed.
    """
    check_run(run)
    model = model if sharded.is_sharded(model) else unwrapped(model)
    version = run.resolve(f"#{from_first(lambda: run.resolve(ref).id)}")
    reader, content = sharded.opened(run, f"#{version.id}")
    if path is None:
        path = _place(model, content.state_dict_metadata.keys(), str(version))
    sharded.read(reader, [sharded.into_model(content, path, model)])
    return version


def _place(model: torch.nn.Module, saved: Collection[str], version: str) -> str:
    """Return the path below which a version has all weights of a model."""
    mine = sharded.state_of(model).keys()
    places = {name[:at] for name in saved for at in _starts(name) if name[at:] in mine}
    found = []
    for place in sorted(places):
        below = {name.removeprefix(place) for name in saved if name.startswith(place)}
        if mine - may_lack(model, mine, below) <= below:
            found.append(place.removesuffix("."))
    if len(found) == 1:
        return found[0]
    if found:
        msg = f"{version} has such weights at {', '.join(map(repr, found))}"
        raise InvalidInputError(msg, hint=f"name one: path={found[0]!r}")
    one = min(mine, default="")
    msg = f"{version} does not have the weights of the {type(model).__name__}, such as {one!r}"
    raise StateError(msg, hint="give the model without what another trainer wraps around it")


def _starts(name: str) -> list[int]:
    """Return the places in a name where the name of a weight may begin."""
    return [0, *(at + 1 for at, sign in enumerate(name) if sign == ".")]
