"""Import of a folder of checkpoints, in the order of their steps; steps and metrics are found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from ckptstore.backends.oserrors import translate
from ckptstore.config import absolute_path
from ckptstore.errors import ConflictError, FormatError, InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.integrations.file_import import import_file
from ckptstore.integrations.pretrained_files import read_described
from ckptstore.model import Version
from ckptstore.store import Store

SOURCE: Final = "imported_from"
"""Entry of a version's metadata: the name of the file or folder that it was imported from."""
_NUMBERED: Final = re.compile(
    r"(?:checkpoint|ckpt|step|global_step|iter|epoch)[-_=]?(\d{1,18})(?:\.\w+)?\Z"
)
_PAIR: Final = re.compile(r"([A-Za-z]\w*)=(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?=[-_.]|\Z)")
_TRAINER: Final = "trainer_state.json"


class FoundCheckpoint(NamedTuple):
    """One checkpoint of a folder."""

    step: int
    path: Path
    metrics: dict[str, float]


def find_checkpoints(folder: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """Return the checkpoints in a folder by their steps; reads names and ``trainer_state.json``.

    Names are ``checkpoint-500``, ``step_500.pt``, ``iter_0000500``, ``epoch=3-step=500.ckpt`` or
    ``epoch=3-val_loss=1.2.ckpt``; where there is no step, the epoch counts as one.

    Raises
    ------
    InvalidInputError
        Two of them have one step.
    StorageError
        The folder cannot be read.
    """
    try:
        every = [one for path in absolute_path(folder).iterdir() if (one := _found(path))]
    except OSError as error:
        raise translate(error, f"reading {folder}") from error
    every.sort()
    for one, other in pairwise(every):
        if one.step == other.step:
            msg = f"{one.path.name} and {other.path.name} in {folder} both have step {one.step}"
            raise InvalidInputError(msg, hint="import them one by one, with a step each")
    return every


def import_folder(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    run: str,
    directions: Mapping[str, str] | None = None,
    under: str | None = None,
    codec: str | None = None,
    progress: ProgressCallback = silent,
) -> list[Version]:
    """Save each checkpoint of a folder as a version of a run; return all, by step.

    Those that an earlier call imported are not read again, so that after an interruption the same
    call continues. Steps and metrics come from :func:`find_checkpoints`; each checkpoint is read as
    by :func:`import_file`.

    Parameters
    ----------
    folder
        Such as the output folder of a Trainer.
    run, directions, under, codec, progress
        As of :func:`import_file`.

    Raises
    ------
    InvalidInputError
        It holds no checkpoints of these names, or two of one step.
    ConflictError
        The run has one of the steps from elsewhere.
    CkptStoreError
        As :func:`import_file`; what was imported before stays.
    """
    found = find_checkpoints(folder)
    if not found:
        msg = f"{folder} holds no checkpoint-N, step_N, epoch=N or iter_N"
        raise InvalidInputError(msg, hint="import_file(..., step=N) imports one file or folder")
    done: list[Version] = []
    for one in found:
        catalog = store.repo.refresh()
        there = catalog.by_step(run, one.step) if catalog.has_run(run) else None
        if there is not None and there.metadata.get(SOURCE) != one.path.name:
            msg = f"{run}@{one.step} is there and was not imported from {one.path.name}"
            raise ConflictError(msg, hint="name another run")
        if there is None:
            there = import_file(
                store,
                one.path,
                run=run,
                step=one.step,
                metrics=one.metrics,
                directions=directions,
                metadata={SOURCE: one.path.name},
                under=under,
                codec=codec,
                progress=progress,
            )
        done.append(there)
    return done


def _found(path: Path) -> FoundCheckpoint | None:
    """Return the checkpoint at a path, if its name is that of one."""
    pairs = dict(_PAIR.findall(path.name))
    numbered = _NUMBERED.match(path.name)
    text = pairs.pop("step", None) or (numbered[1] if numbered else pairs.get("epoch"))
    if text is None or not text.isdecimal():
        return None
    metrics = {name: float(value) for name, value in pairs.items() if name != "epoch"}
    return FoundCheckpoint(int(text), path, {**_logged(path, text), **metrics})


def _logged(path: Path, step: str) -> dict[str, float]:
    """Return the metrics that Transformers' Trainer logged at the step of a checkpoint."""
    file = path / _TRAINER
    if not file.is_file():
        return {}
    try:
        logged = json.loads(read_described(file))["log_history"]  # which may have NaN
        found = {key: x for one in logged if one.get("step") == int(step) for key, x in one.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{file} is not a state of the Trainer: {error!r}") from error
    numbers = {key: x for key, x in found.items() if isinstance(x, int | float)}
    return {key: float(x) for key, x in numbers.items() if key not in ("step", "epoch")}
