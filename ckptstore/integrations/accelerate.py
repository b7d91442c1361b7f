"""Accelerate: ``save_state`` and ``load_state`` on a run of a store; see docs/howto/accelerate.md.

::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(my_counter)
    run = store.run("gpt", metrics={"val_loss": "min"})
    if has_version(run):
        load_state(accelerator, run)
    ...
    save_state(accelerator, run, step=step, metrics={"val_loss": loss})

Versions hold the state that ``Accelerator.save_state`` writes, and also the generators and the
epoch of the prepared data loaders: without those a resumed training draws other batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations import sharded_states as sharded
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.data_position import per_rank, this_rank
from ckptstore.integrations.model_names import set_whole
from ckptstore.integrations.randomness import capture_all, resume_random
from ckptstore.integrations.ranks import from_first, on_all, place
from ckptstore.model import Version
from ckptstore.resuming.witness import Witness
from ckptstore.saver.pending import PendingSave
from ckptstore.store import Run

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["has_version", "load_state", "save_state", "save_state_async", "watched"]

_ELSEWHERE: Final = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_SHARDED: Final = ("models", "optimizers")
_SEEDABLE: Final = "use DataLoaderConfiguration(use_seedable_sampler=True)"
_log = logging.getLogger("ckptstore")


def has_version(run: Run) -> bool:
    """Return whether a run has a version to resume from; the same on all ranks."""
    check_run(run)
    return from_first(lambda: run.head is not None)


def save_state(
    accelerator: Accelerator, run: Run, *, step: int, trained_only: bool = False, **options: Any
) -> Version:
    """Save the prepared and registered objects of an accelerator; return when they are durable.

    All ranks call it. Rank 0 saves, the others wait for it; of sharded models (FSDP, HSDP, tensor
    parallel) each rank writes its part, unless the plugin wants FULL_STATE_DICT.

    Parameters
    ----------
    step
        Training step, from 0 on.
    trained_only
        Leave out frozen parameters, except those of adapters of PEFT: the weights of a base model
        that is the same in each version. A resume begins with the same base model.
    options
        For :meth:`ckptstore.Run.save`: metrics, tags, metadata, adapters ...

    Raises
    ------
    InvalidInputError
        The accelerator uses DeepSpeed, Megatron or XLA, or has hooks that write files; or `run` is
        no run of a store.
    StateError
        The state of a registered object has a value that cannot be represented; the message names
        its path, such as ``custom.0.history``. Nothing was written.
    StorageError
        The storage failed; no version appeared. Raised on every rank.
    """
    check_run(run)
    state = _whole_state(accelerator, trained_only=trained_only)
    options = _noted(accelerator, run, options)
    if _parts(accelerator) and not sharded.wants_full(accelerator):  # each rank saves its part
        return sharded.save_parts(run, state, _SHARDED, step=step, **options).result()
    return run.resolve(f"#{from_first(lambda: run.save(state, step=step, **options).id)}")


def save_state_async(
    accelerator: Accelerator, run: Run, *, step: int, trained_only: bool = False, **options: Any
) -> PendingSave | sharded.PendingShards | None:
    """Like :func:`save_state`, but in the background: return the pending save.

    All ranks call it. Rank 0 gets the pending save, and the errors of :func:`save_state` that are
    known at once. If each rank writes a part, each gets one, and the next save waits for it.
    """
    check_run(run)
    state = _whole_state(accelerator, trained_only=trained_only)
    options = _noted(accelerator, run, options)
    if _parts(accelerator) and not sharded.wants_full(accelerator):  # each rank saves its part
        return sharded.save_parts(run, state, _SHARDED, step=step, background=True, **options)
    return run.save_async(state, step=step, **options) if place()[0] == 0 else None


def load_state(
    accelerator: Accelerator,
    run: Run,
    ref: str | int = "latest",
    *,
    restart_epoch: bool = False,
    **options: Any,
) -> Version:
    """Set the prepared and registered objects of an accelerator to a version; return that.

    Call it after ``prepare`` and ``register_for_checkpointing``, on all ranks. Each rank gets its
    own random state back if the number of ranks is the same.

    Parameters
    ----------
    ref
        Of this run: ``latest``, ``latest-valid``, a step, ``best:val_loss`` ...
    restart_epoch
        Begin the epoch again, instead of going on at the position of stateful data loaders.
    options
        For :meth:`ckptstore.Store.load`: map_location, adapters ...

    Raises
    ------
    RunNotFoundError, VersionNotFoundError
        The ref names nothing.
    StateError
        The version has another number of models, optimizers or objects; or a stateful data loader
        is within an epoch, and was saved by another number of ranks, or shuffles without a seed.
        Nothing was changed. Or the weights of a model are others; models before it were set.
    CorruptTensorError, StorageError
        It could not be read. Nothing was changed.
    """
    check_run(run)
    _check_supported(accelerator)
    one = from_first(lambda: run.resolve(ref).id)
    version = run.resolve(f"#{one}")
    parts, objects = _parts(accelerator), _objects(accelerator)
    state = on_all(lambda: run.load(f"#{version.id}", exclude=sharded.excluded(parts), **options))
    whole = {**state, **{key: [] for key in _SHARDED}} if parts else state
    _check_numbers(objects, whole, version)
    loaders = zip(accelerator._dataloaders, whole["loaders"], strict=True)
    positions = [None if restart_epoch else _position(*one) for one in loaders]
    if parts:
        sharded.fill(run, f"#{version.id}", parts, state)
    for name, each in objects.items():
        if name == "loaders":
            for loader, saved, position in zip(each, whole[name], positions, strict=True):
                _restore_loader(loader, saved, position)
            continue
        for one, saved in zip(each, whole[name], strict=True):
            if name == "models":
                _set_weights(one, saved, version)
            else:
                one.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["accelerator"]["step"]
    resume_random(state["rng"])
    return version


_watches: Final[WeakKeyDictionary[Any, Witness]] = WeakKeyDictionary()


@contextmanager
def watched(
    accelerator: Accelerator,
    run: Run,
    *,
    steps: int = 3,
    tolerance: float = 1e-3,
    **objects: object,
) -> Iterator[Witness]:
    """Note what the training is after each save, and compare a resumed one with it.

    Enter it on all ranks after :func:`load_state`, around the loop. The witness takes each step
    itself, just before the (first) optimizer applies its gradients; ``step`` is not called. The
    report is logged, and kept with the version.

    Parameters
    ----------
    steps, tolerance
        As for :class:`ckptstore.Witness`.
    objects
        What the training consists of besides what is prepared and registered, by name.
    """
    check_run(run)
    parts: dict[str, Sequence[Any]] = {
        "models": accelerator._models,
        "optimizers": accelerator._optimizers,
        "schedulers": accelerator._schedulers,
        "custom": accelerator._custom_objects,
    }
    named = {f"{name}_{at}": one for name, each in parts.items() for at, one in enumerate(each)}
    if not accelerator._optimizers:
        msg = "the accelerator has no optimizer whose steps could be compared"
        raise InvalidInputError(msg, hint="prepare it first; or make a ckptstore.Witness")
    witness = Witness(run, steps=steps, tolerance=tolerance, **{**named, **objects})
    drawn: list[object] = []

    def before_forward(model: torch.nn.Module, args: object, kwargs: object) -> None:
        if model.training and witness.active:
            drawn[:] = [args, kwargs]

    def before_step(*_: object) -> None:
        witness.step(batch=drawn or None)
        drawn.clear()

    optimizer: Any = accelerator._optimizers[0]
    hooks = [optimizer.optimizer.register_step_pre_hook(before_step)]
    first = accelerator._models[:1]
    hooks += [one.register_forward_pre_hook(before_forward, with_kwargs=True) for one in first]
    _watches[accelerator] = witness
    try:
        yield witness
    finally:
        del _watches[accelerator]
        for hook in hooks:
            hook.remove()
        witness.close()


def _noted(accelerator: Accelerator, run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a save, with the witness of this moment. All ranks call it."""
    witness = _watches.get(accelerator)
    if witness is None or witness.run.name != run.name:
        return options
    return {**options, "metadata": {**options.get("metadata", {}), **witness.metadata()}}


def _set_weights(model: torch.nn.Module, saved: Mapping[str, Any], version: Version) -> None:
    missing, unexpected = set_whole(model, saved)
    if missing or unexpected:
        msg = f"{version} and the model differ: missing {missing[:3]}, unexpected {unexpected[:3]}"
        raise StateError(msg, hint="prepare the model that was saved")


def _check_supported(accelerator: Accelerator) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in _ELSEWHERE:
        msg = f"the library behind an accelerator of type {kind} keeps the state to itself"
        hint = "use FSDP2 (fsdp_version=2), or that library's folders"
        if kind == "DEEPSPEED":
            hint += "; its folders: deepspeed.checkpoint.ds_to_universal, then ckptstore import"
        raise InvalidInputError(msg, hint=hint)
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        msg = "hooks of register_save_state_pre_hook write to a folder, and there is none"
        raise InvalidInputError(msg, hint="remove them, and register objects for checkpointing")


def _whole_state(accelerator: Accelerator, *, trained_only: bool) -> dict[str, Any]:
    """Return the state to save as a version. All ranks call it."""
    _check_supported(accelerator)
    scaler = accelerator.scaler
    words: Any = {"full": sharded.wants_full(accelerator), "trained_only": trained_only}
    states: dict[str, Any] = {
        "loaders": _loader_state,
        "models": lambda model: sharded.state_of(model, trained_only=trained_only),
    }
    lists = {
        name: [states[name](one) if name in states else one.state_dict() for one in objects]
        for name, objects in _objects(accelerator).items()
    }
    for path, part in _parts(accelerator).items():
        lists[path.partition(".")[0]].append(sharded.state_of(part, **words))
    return {
        **lists,
        "scaler": None if scaler is None else scaler.state_dict(),
        "accelerator": {"step": accelerator.step},
        "rng": capture_all(),
    }


def _parts(accelerator: Accelerator) -> dict[str, sharded.Part]:
    """Return models and optimizers by their paths in a version, if the models are sharded."""
    if not any(sharded.is_sharded(model) for model in accelerator._models):
        return {}
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(optimizers) not in (0, len(models)):
        msg = f"{len(models)} sharded models have {len(optimizers)} optimizers"
        raise InvalidInputError(msg, hint="prepare one optimizer for each model")
    pairs = zip(models, optimizers, strict=False)
    return {
        **{f"models.{at}": model for at, model in enumerate(models)},
        **{f"optimizers.{at}": (model, one.optimizer) for at, (model, one) in enumerate(pairs)},
    }


def _objects(accelerator: Accelerator) -> dict[str, Sequence[Any]]:
    """Return the prepared and registered objects that are not sharded, by their names."""
    whole = not _parts(accelerator)
    return {
        "models": [accelerator.unwrap_model(each) for each in accelerator._models if whole],
        "optimizers": [each for each in accelerator._optimizers if whole],
        "schedulers": accelerator._schedulers,
        "loaders": accelerator._dataloaders,
        "custom": accelerator._custom_objects,
    }


def _check_numbers(
    objects: Mapping[str, Sequence[Any]], state: Mapping[str, Sequence[Any]], version: Version
) -> None:
    for name, mine in objects.items():
        saved = state.get(name)
        if saved is None:
            msg = f"{version} was not saved from an accelerator: it has no {name}"
            raise StateError(msg)
        if len(saved) != len(mine):
            msg = f"{version} holds {len(saved)} {name}, the accelerator has {len(mine)}"
            raise StateError(msg, hint="prepare and register the same things, in the same order")


# --- data loaders: a resumed training must not draw the same batches again ------------------------


def _sampler(loader: Any) -> Any:  # of accelerate, untyped
    return loader.get_sampler() if hasattr(loader, "get_sampler") else None


def _generators(loader: Any) -> dict[str, Any]:
    """Return the generators that decide which batches a loader draws."""
    found = {
        "loader": getattr(loader, "generator", None),
        "sampler": getattr(_sampler(loader), "generator", None),
        "synchronized": getattr(loader, "synchronized_generator", None),
    }
    return {name: each for name, each in found.items() if each is not None}


def _loader_state(loader: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "iteration": getattr(loader, "iteration", 0),
        "generators": {name: each.get_state() for name, each in _generators(loader).items()},
    }
    sampler = _sampler(loader)
    if hasattr(sampler, "initial_seed"):
        state["seed"] = sampler.initial_seed
    if getattr(loader, "use_stateful_dataloader", False):
        state["stateful"] = per_rank(loader.state_dict())
        if loader.end_of_dataloader and loader in loader.gradient_state.dataloader_references:
            state["iteration"] += 1  # in the last step of an epoch, before the loader counts it
        if _is_within(loader.state_dict()) and _draws_anew(loader, first=loader.iteration == 0):
            state["shuffled"] = True
            _log.warning("saved within an epoch whose order nothing can repeat: %s", _SEEDABLE)
    return state


_begun_anew: Final = WeakSet[Any]()
"""Loaders that :func:`load_state` has set."""


def _draws_anew(loader: Any, *, first: bool = False) -> bool:
    """Return whether the order of an epoch's rows is random, and follows from no position."""
    batches, sampler = getattr(loader, "batch_sampler", None), _sampler(loader)
    if type(batches).__module__.startswith("torchdata."):
        return False
    # Of the first epoch, workers have rows from before Accelerate puts its seeded sampler in.
    early = first and loader.num_workers > 0 and loader not in _begun_anew
    random = "synchronized" in _generators(loader) or hasattr(sampler, "generator")
    return random and (early or not hasattr(sampler, "initial_seed"))


def _is_within(position: Mapping[str, Any]) -> bool:
    """Return whether a position of a stateful loader, with or without workers, is in an epoch."""
    steps = position.get("_num_yielded", position.get("_snapshot", {}).get("_snapshot_step"))
    return steps != 0 and not position.get("_iterator_finished")


def _position(loader: Any, state: Mapping[str, Any]) -> Any:
    """Return the position of this rank; an empty one where an epoch begins, None where it ended."""
    saved = state.get("stateful", {})
    if not any(map(_is_within, saved.values())):
        ended = not saved or any(one.get("_iterator_finished") for one in saved.values())
        return None if ended else {}
    if state.get("shuffled") or _draws_anew(loader):
        hint = f"{_SEEDABLE}; restart_epoch=True begins this epoch again"
        raise StateError("the position is in an epoch whose order was not saved", hint=hint)
    return this_rank(saved)


def _restore_loader(loader: Any, state: Mapping[str, Any], position: Any) -> None:
    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    for name, generator in _generators(loader).items():
        if name in state["generators"]:
            generator.set_state(state["generators"][name])
    sampler = _sampler(loader)
    if "seed" in state and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = state["seed"]
    if getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(position or {})  # also drops what ``prepare`` has drawn
        _begun_anew.add(loader)
        if position is not None:  # a loader that has begun has drawn its seed before the save
            loader.set_epoch(loader.iteration)
            loader.base_dataloader.state_dict()
