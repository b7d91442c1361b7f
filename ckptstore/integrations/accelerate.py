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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptstore.errors import InvalidInputError, StateError
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.randomness import capture_all, restore_mine
from ckptstore.integrations.ranks import from_first, gathered, place
from ckptstore.model import Version
from ckptstore.store import Run

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ckptstore.saver.pending import PendingSave

__all__ = ["has_version", "load_state", "save_state", "save_state_async"]

_SHARDED: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def has_version(run: Run) -> bool:
    """Return whether a run has a version to resume from; the same on all ranks."""
    check_run(run)
    return from_first(lambda: run.head is not None)


def save_state(
    accelerator: Accelerator,
    run: Run,
    *,
    step: int,
    **options: Any,  # noqa: ANN401 - as Run.save
) -> Version:
    """Save the prepared and registered objects of an accelerator; return when they are durable.

    All ranks call it; rank 0 saves, the others wait for it.

    Parameters
    ----------
    step
        Training step, from 0 on.
    options
        For :meth:`ckptstore.Run.save`: metrics, tags, metadata, adapters ...

    Raises
    ------
    InvalidInputError
        The accelerator shards its state (FSDP, DeepSpeed, Megatron), or has hooks that write files;
        or `run` is no run of a store.
    StateError
        The state of a registered object has a value that cannot be represented; the message names
        its path, such as ``custom.0.history``. Nothing was written.
    StorageError
        The storage failed; no version appeared. Raised on every rank.
    """
    check_run(run)
    state = _whole_state(accelerator)
    one = from_first(lambda: run.save(state, step=step, **options).id)
    return run.resolve(f"#{one}")


def save_state_async(
    accelerator: Accelerator,
    run: Run,
    *,
    step: int,
    **options: Any,  # noqa: ANN401 - as Run.save_async
) -> PendingSave | None:
    """Like :func:`save_state`, but in the background: return the pending save, on rank 0 only.

    All ranks call it. Raises the errors of :func:`save_state` known at once; on rank 0 only.
    """
    check_run(run)
    state = _whole_state(accelerator)
    return run.save_async(state, step=step, **options) if place()[0] == 0 else None


def load_state(
    accelerator: Accelerator,
    run: Run,
    ref: str | int = "latest",
    **options: Any,  # noqa: ANN401 - as Run.load
) -> Version:
    """Set the prepared and registered objects of an accelerator to a version; return that.

    Call it after ``prepare`` and ``register_for_checkpointing``, on all ranks. Each rank gets its
    own random state back if the number of ranks is the same.

    Parameters
    ----------
    ref
        Of this run: ``latest``, ``latest-valid``, a step, ``best:val_loss`` ...
    options
        For :meth:`ckptstore.Store.load`: map_location, adapters ...

    Raises
    ------
    RunNotFoundError, VersionNotFoundError
        The ref names nothing.
    StateError
        The version has another number of models, optimizers or objects. Nothing was changed.
    CorruptTensorError, StorageError
        It could not be read. Nothing was changed.
    """
    check_run(run)
    _check_supported(accelerator)
    one = from_first(lambda: run.resolve(ref).id)
    version = run.resolve(f"#{one}")
    state = run.load(f"#{one}", **options)
    _check_numbers(accelerator, state, version)
    for name, objects in _objects(accelerator).items():
        for one, saved in zip(objects, state[name], strict=True):
            if name == "loaders":
                _restore_loader(one, saved)
            else:
                one.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["accelerator"]["step"]
    restore_mine(state["rng"])
    return version


def _check_supported(accelerator: Accelerator) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in _SHARDED:
        msg = f"no rank holds the whole state of an accelerator of type {kind}"
        raise InvalidInputError(
            msg, hint="save with torch.distributed.checkpoint: docs/howto/torch-distributed.md"
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        msg = "hooks of register_save_state_pre_hook write to a folder, and there is none"
        raise InvalidInputError(msg, hint="remove them, and register objects for checkpointing")


def _whole_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state to save as a version. All ranks call it."""
    _check_supported(accelerator)
    scaler = accelerator.scaler
    lists = {
        name: [_loader_state(one) if name == "loaders" else one.state_dict() for one in objects]
        for name, objects in _objects(accelerator).items()
    }
    return {
        **lists,
        "scaler": None if scaler is None else scaler.state_dict(),
        "accelerator": {"step": accelerator.step},
        "rng": capture_all(),
    }


def _objects(accelerator: Accelerator) -> dict[str, Sequence[Any]]:
    """Return the prepared and registered objects, by their names in a version."""
    return {
        "models": [accelerator.unwrap_model(each) for each in accelerator._models],
        "optimizers": accelerator._optimizers,
        "schedulers": accelerator._schedulers,
        "loaders": accelerator._dataloaders,
        "custom": accelerator._custom_objects,
    }


def _check_numbers(
    accelerator: Accelerator, state: Mapping[str, Sequence[Any]], version: Version
) -> None:
    for name, mine in _objects(accelerator).items():
        saved = state.get(name)
        if saved is None:
            msg = f"{version} was not saved from an accelerator: it has no {name}"
            raise StateError(msg)
        if len(saved) != len(mine):
            msg = f"{version} holds {len(saved)} {name}, the accelerator has {len(mine)}"
            raise StateError(msg, hint="prepare and register the same things, in the same order")


# --- data loaders: a resumed training must not draw the same batches again ------------------------


def _sampler(loader: Any) -> Any:  # noqa: ANN401 - of accelerate, untyped
    return loader.get_sampler() if hasattr(loader, "get_sampler") else None


def _generators(loader: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    """Return the generators that decide which batches a loader draws."""
    found = {
        "loader": getattr(loader, "generator", None),
        "sampler": getattr(_sampler(loader), "generator", None),
        "synchronized": getattr(loader, "synchronized_generator", None),
    }
    return {name: each for name, each in found.items() if each is not None}


def _loader_state(loader: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    state: dict[str, Any] = {
        "iteration": getattr(loader, "iteration", 0),
        "generators": {name: each.get_state() for name, each in _generators(loader).items()},
    }
    sampler = _sampler(loader)
    if hasattr(sampler, "initial_seed"):
        state["seed"] = sampler.initial_seed
    if getattr(loader, "use_stateful_dataloader", False):
        each_rank = gathered(loader.state_dict())
        state["stateful"] = {f"rank {rank}": own for rank, own in enumerate(each_rank)}
    return state


def _restore_loader(loader: Any, state: Mapping[str, Any]) -> None:  # noqa: ANN401 - as above
    if hasattr(loader, "iteration"):
        loader.iteration = state["iteration"]
    for name, generator in _generators(loader).items():
        if name in state["generators"]:
            generator.set_state(state["generators"][name])
    sampler = _sampler(loader)
    if "seed" in state and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = state["seed"]
    mine = state.get("stateful", {}).get(f"rank {place()[0]}")
    if mine is not None and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(mine)
