"""Ray Train: a checkpoint names a version, in some hundred bytes; see docs/howto/ray-train.md.

::

    def train(config):  # on each worker
        run = ckptstore.open(config["store"]).run("gpt")
        version = reported(run)
        state = run.load(f"#{version.id}") if version else new_state()
        ...
        version = run.save(state, step=step) if rank == 0 else None
        report(run, version, {"loss": loss})
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ckptstore import errors
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.libraries import library
from ckptstore.model import Version, naming
from ckptstore.store import Run

if TYPE_CHECKING:
    from ray.train import Checkpoint

__all__ = ["ReportedVersion", "report", "reported", "version_in"]

_KEY: Final = "ckptstore"
"""Entry of the checkpoint's metadata."""


class ReportedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a checkpoint of Ray names."""

    store: str
    """Location of the store."""
    run: str
    step: int
    version: str
    """Id of the version."""

    @property
    def ref(self) -> str:
        """Ref of the version, which any store that holds it resolves."""
        return f"#{self.version}"


def report(run: Run, version: Version | None, metrics: Mapping[str, Any]) -> None:
    """Report metrics to Ray Train, and a checkpoint that names a version.

    All workers call it, as ``ray.train.report``. Ray copies the checkpoint, a folder with one
    file of some hundred bytes, to its ``storage_path``.

    Parameters
    ----------
    run
        The run that has the version.
    version
        A durable version: on the worker that saved it, or on all. None elsewhere; if it is
        None on all of them, only metrics are reported.
    metrics
        As for ``ray.train.report``.

    Raises
    ------
    InvalidInputError
        `run` is no run of a store.
    MissingDependencyError
        Ray is not installed.
    """
    check_run(run)
    train = _train()
    if version is None:
        train.report(dict(metrics))
        return
    named = ReportedVersion(store=run._session.repo.url, **naming(version))
    with tempfile.TemporaryDirectory(prefix="ckptstore-ray-") as folder:
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({_KEY: msgspec.to_builtins(named)})
        train.report(dict(metrics), checkpoint=checkpoint)  # returns when Ray has copied it


def reported(run: Run) -> Version | None:
    """Return the version to resume from: the one of Ray's latest checkpoint; None without one.

    Every worker gets the same version. Newer versions of the run, which were saved and not
    reported, are not looked at.

    Parameters
    ----------
    run
        A run of the store that was reported, or of another one that holds the version too.

    Raises
    ------
    VersionNotFoundError
        The store does not hold the version; the message says which store did.
    InvalidInputError
        The checkpoint names no version, or `run` is no run of a store.
    MissingDependencyError
        Ray is not installed.
    """
    check_run(run)
    checkpoint = _train().get_checkpoint()
    if checkpoint is None:
        return None
    named = version_in(checkpoint)
    try:
        return run.resolve(named.ref)
    except errors.NotFoundError as error:
        msg = f"Ray's checkpoint is {named.run}@{named.step} ({named.ref}) of {named.store}, "
        msg = f"{msg}and {run._session.repo.url} has no such version"
        hint = "open that store; if retention deleted the version: ckptstore undelete"
        raise errors.VersionNotFoundError(msg, hint=hint) from error


def version_in(checkpoint: Checkpoint) -> ReportedVersion:
    """Return the version that a checkpoint names, such as ``result.checkpoint`` of a training.

    Raises
    ------
    InvalidInputError
        It names none: :func:`report` did not make it.
    """
    try:
        return msgspec.convert(checkpoint.get_metadata()[_KEY], ReportedVersion)
    except (KeyError, msgspec.ValidationError) as error:
        msg = f"the checkpoint at {checkpoint.path} names no version of a store"
        hint = "report with ckptstore.integrations.ray_train"
        raise errors.InvalidInputError(msg, hint=hint) from error


def _train() -> Any:  # of Ray, untyped
    with library("Ray Train", "'ckptstore[ray]'"):
        import ray.train
    return ray.train
