"""Stores Lightning's checkpoints as versions; does not import Lightning.

Lightning names checkpoints by paths of files. Here such a path is only a name in the version's
metadata: no file of that name exists. Saving to a path again makes a new version, and
the path then names that one. Removing a path deletes its version by a commit.

:mod:`ckptstore.integrations.lightning` and :mod:`ckptstore.integrations.pytorch_lightning` combine
this class and that of :mod:`ckptstore.integrations.lightning_callback` with the base classes of
the two packages.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptstore import errors
from ckptstore.encodings.encoding_rules import EncodingRules, Encodings
from ckptstore.integrations import sharded_states as sharded
from ckptstore.integrations.arguments import check_run_name, check_store
from ckptstore.integrations.model_names import as_named_in, clean
from ckptstore.integrations.ranks import from_first, on_all, place
from ckptstore.model import Version
from ckptstore.saver.pending import PendingSave
from ckptstore.store import Run, Store
from ckptstore.tensors.adapters import TypeAdapter
from ckptstore.tensors.restore import MapLocation

__all__ = ["LoopIO"]

_log = logging.getLogger("ckptstore")
_HANDED_OVER = ".temp.ckpt"
"""File in which a forked worker of Lightning gives its last weights to the process that began it;
Lightning saves, loads and removes it by its ``CheckpointIO``.
"""
_OPTIONS = ("metrics", "tags", "metadata", "roles", "encodings")
_UNKNOWN = (errors.InvalidRefError, errors.RunNotFoundError, errors.VersionNotFoundError)


class LoopIO:
    """The methods of Lightning's ``CheckpointIO``, on a run of a store.

    Parameters
    ----------
    store
        Open for writing on rank 0; the other ranks only read.
    run
        Name of the run to save to.
    metrics
        Metric to ``"min"`` or ``"max"``, its better direction; needed for ``best:METRIC``.
    background
        Save with ``save_async``: training continues while a version becomes durable. Errors are
        raised by the next save, or at the end.
    remove
        ``"delete"``: checkpoints removed by ModelCheckpoint (``save_top_k``, ``save_last``) are
        deleted by a commit, and can be undeleted until a collection. ``"keep"``: removals are
        ignored, and a retention policy decides.
    retain
        Apply the retention policy of the run after each save.
    encodings
        Lossy encodings of tensors; see :meth:`ckptstore.Run.save`. By default those of the run's
        policy.
    adapters
        Represent hyper-parameters or states of callbacks that are not plain.

    Raises
    ------
    InvalidInputError
        `store` is no open store, or `run` no name.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        metrics: Mapping[str, str] | None = None,
        background: bool = False,
        remove: str = "delete",
        retain: bool = False,
        encodings: Encodings | None = None,
        adapters: Sequence[TypeAdapter] = (),
    ) -> None:
        if remove not in ("delete", "keep"):
            raise errors.InvalidInputError(f"remove={remove!r} must be 'delete' or 'keep'")
        check_store(store)
        check_run_name(run)
        self._store = store
        self._name = run
        self._directions = dict(metrics or {})
        self._background = background
        self._remove = remove
        self._retain = retain
        if encodings is not None:
            EncodingRules(encodings)  # refuses bad rules now, not at the first save
        self._encodings = encodings
        self._adapters = adapters
        self._trainer: Callable[[], Any] = lambda: None
        self._validated: dict[str, int] = {}
        self._told = False
        self._pending: tuple[str, PendingSave | sharded.PendingShards] | None = None
        self._outdated: list[str] = []
        self._own: dict[str, str] = {}
        self.noted: dict[str, Any] = {}
        """Metadata of the callback for the next save."""

    @property
    def run(self) -> Run:
        """The run to save to."""
        return self._store.run(
            self._name, metrics=self._directions or None, encodings=self._encodings
        )

    @property
    def resume(self) -> str | None:
        """A ref of the newest version of the run, for ``ckpt_path``; None before the first save.

        Lightning's own ``ckpt_path="last"`` looks for files and finds none.
        """
        return from_first(self._newest)

    def _newest(self) -> str | None:
        head = self._store.run(self._name).head
        return None if head is None else f"#{head.id}"

    def attach(self, trainer: Any) -> None:  # a Trainer of one of two packages
        """Take metrics from a trainer's ``callback_metrics`` from now on."""
        self._trainer = weakref.ref(trainer)
        self._validated.clear()

    def validated(self, name: str, step: int) -> None:
        """Record that a metric was measured on the weights of a step, and on no later ones."""
        self._validated[name] = step

    # --- CheckpointIO -------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save Lightning's checkpoint as a version of the run; on rank 0 only.

        Parameters
        ----------
        checkpoint
            Weights, optimizers, loops, callbacks, hyper-parameters.
        path
            Lightning's name of it. Stored in the version's metadata below ``lightning``.
        storage_options
            ``metrics``, ``tags``, ``metadata``, ``roles`` and ``encodings`` for
            :meth:`ckptstore.Run.save`; from ``save_checkpoint(path, storage_options={...})``.

        Raises
        ------
        StateError
            A value cannot be represented (a hyper-parameter that is an object, for
            example); names its path, such as ``hyper_parameters.backbone``. Nothing was written.
        StorageError
            The storage failed; no version appeared.
        """
        if "state_dict" not in checkpoint:
            import torch

            torch.save(checkpoint, path)  # of no version: see _HANDED_OVER
            return
        options = dict(storage_options or {})
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            msg = f"storage_options has {unknown}; only {', '.join(_OPTIONS)} are supported"
            raise errors.InvalidInputError(msg)
        name = os.fspath(path)
        about = {"path": name, "epoch": int(checkpoint.get("epoch", 0))}
        wanted = {
            "step": int(checkpoint.get("global_step", 0)),
            "metrics": {**self._metrics(), **options.pop("metrics", {})},
            "metadata": {**self.noted, **options.pop("metadata", {}), "lightning": about},
            "adapters": self._adapters,
            "retain": self._retain,
            **options,
        }
        self.noted = {}
        if self._module() is not None:
            weights = {clean(key): one for key, one in checkpoint["state_dict"].items()}
            checkpoint = {**checkpoint, "state_dict": weights}
        self._settle()
        earlier = self._own.get(name)
        if sharded.has_parts(checkpoint["state_dict"]):
            keys = ("state_dict", "optimizer_states")
            wanted["background"] = self._background
            self._pending = name, sharded.save_parts(self.run, checkpoint, keys, **wanted)
            if not self._background:
                self._settle()
        elif self._background:
            self._pending = name, self.run.save_async(checkpoint, **wanted)
        else:
            self._own[name] = self.run.save(checkpoint, **wanted).id
        if earlier is not None:  # Lightning would have replaced a file of this name
            self._drop(earlier, f"Lightning saved {name} again")

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = None,
        weights_only: bool | None = None,
        parts: Mapping[str, sharded.Part] | None = None,
    ) -> dict[str, Any]:
        """Return the saved checkpoint; checks every byte, unpickles nothing. All ranks call it.

        Parameters
        ----------
        path
            Lightning's name of it when it was saved; or a ref: ``run@best:val_loss``,
            ``run@latest-valid``, ``#3fa9c1``; or the part after the ``@`` for this run.
        parts
            Sharded models and optimizers by their paths in the checkpoint: they are set to what
            was saved, and the checkpoint is without it.

        Raises
        ------
        VersionNotFoundError
            `path` names no version.
        StateError
            Another training loop saved the version.
        CorruptTensorError
            A stored tensor is damaged; names it.
        """
        self._settle()
        name = os.fspath(path)
        if _handed_over(name):
            import torch

            where: Any = map_location
            weights: dict[str, Any] = torch.load(name, where, weights_only=True)
            return weights
        one = from_first(lambda: self._find(name).id)
        version = self._store.resolve(f"#{one}")
        wanted: Any = {"map_location": map_location, "adapters": self._adapters}
        wanted["exclude"] = sharded.excluded(parts or {})
        state: dict[str, Any] = on_all(lambda: self._store.load(f"#{one}", **wanted))
        if ("state_dict" not in state and not parts) or "pytorch-lightning_version" not in state:
            msg = f"{name!r} was not saved by Lightning: it has no state_dict of a module"
            raise errors.StateError(msg, hint="load its weights into the module with Store.load")
        module = self._module()
        if parts:
            sharded.fill(self.run, f"#{one}", parts, state)
        elif module is not None:
            state["state_dict"] = as_named_in(module, state["state_dict"])
        if version.run == self._name:
            self._adopt(version)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the version of a path by a commit; on rank 0 only.

        A version that is pinned, tagged, the head of the run or its only verified one stays.
        """
        name = os.fspath(path)
        if _handed_over(name):
            Path(name).unlink()
            return
        if self._is_saving(name):
            self._settle()
        one = self._own.pop(name, None)
        if one is None and (found := self._named(name)) is not None:
            one = found.id
        if one is not None:
            self._drop(one, f"Lightning removed {name}")

    def has_saved(self, path: str | os.PathLike[str], trainer: object = None) -> bool:
        """Return whether a version has Lightning's name `path`. All ranks call it."""
        name = os.fspath(path)
        known = self._is_saving(name) or name in self._own
        return from_first(lambda: known or self._named(name) is not None)

    def teardown(self) -> None:
        """Wait until all saves are durable, and raise their error if one failed."""
        self._settle()

    # --- inside -------------------------------------------------------------------------------

    def _is_saving(self, name: str) -> bool:
        return self._pending is not None and self._pending[0] == name

    def _module(self) -> Any:  # a LightningModule, or None
        return getattr(self._trainer(), "lightning_module", None)

    def _metrics(self) -> dict[str, float]:
        """Return the trainer's metrics of this step: scalars only."""
        trainer = self._trainer()
        if trainer is None:
            if not self._told:
                self._told = True
                _log.warning(
                    "metrics are not saved, nor is random state: pass the callback of ckptstore"
                    " to the Trainer too"
                )
            return {}
        found = {}
        for name, value in trainer.callback_metrics.items():
            if self._validated.get(name, trainer.global_step) != trainer.global_step:
                continue  # measured by a validation of other weights
            number = value.item() if getattr(value, "numel", lambda: 1)() == 1 else None
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[name] = float(number)
        return found

    def _settle(self) -> None:
        """Wait for the running save; then delete the versions that it replaced: not if it fails."""
        pending, self._pending = self._pending, None
        outdated, self._outdated = self._outdated, []
        if pending is not None:
            name, save = pending
            self._own[name] = save.result().id
        for one in outdated:
            self._delete(one, "Lightning replaced it")

    def _drop(self, one: str, reason: str) -> None:
        if self._remove == "keep" or place()[0] != 0:
            return
        if self._pending is None:
            self._delete(one, reason)
        else:  # its replacement is not durable yet
            self._outdated.append(one)

    def _delete(self, one: str, reason: str) -> None:
        try:
            self._store.remove([f"#{one}"], reason=reason)
        except (errors.PolicyError, errors.VersionNotFoundError) as error:
            _log.info("%s, but it stays: %s", reason, error)
        except errors.CkptStoreError as error:
            _log.warning("%s, but it could not be deleted: %s", reason, error)

    def _named(self, name: str) -> Version | None:
        """Return the newest version of the run that Lightning saved under a name."""
        versions = reversed(self._store.run(self._name).versions())
        return next((version for version in versions if _path_of(version) == name), None)

    def _find(self, name: str) -> Version:
        found = self._named(name)
        if found is not None:
            return found
        if "@" not in name and not name.startswith("#"):
            with suppress(*_UNKNOWN):
                return self._store.run(self._name).resolve(name)
        try:
            return self._store.resolve(name)
        except _UNKNOWN as error:
            msg = f"ckpt_path {name!r} is neither a ref nor a path that run {self._name!r} saved"
            hint = f"{error}; for a file, use ckptstore import first"
            raise errors.VersionNotFoundError(msg, hint=hint) from error

    def _adopt(self, version: Version) -> None:
        """Restore the paths as of a saved version, which the training would replace."""
        for each in self._store.run(self._name).versions():
            path = _path_of(each)
            if path is not None and each.commit <= version.commit:
                self._own[path] = each.id


class ModelParallelParts:
    """Methods of a ``ModelParallelStrategy`` that saves with the :class:`LoopIO` of its trainer."""

    def save_checkpoint(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Save parts on all ranks, or whole tensors on rank 0."""
        if self._save_distributed_checkpoint or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def teardown(self: Any) -> None:
        """Wait until all saves are durable."""
        self.checkpoint_io.teardown()
        super().teardown()  # type: ignore[misc]

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load model and optimizers, and return the remaining checkpoint."""
        parts = {f"optimizer_states.{n}": (self.model, o) for n, o in enumerate(self.optimizers)}
        parts["state_dict"] = self.model
        return self.checkpoint_io.load_checkpoint(checkpoint_path, parts=parts)


def _handed_over(name: str) -> bool:
    return Path(name).name == _HANDED_OVER and Path(name).is_file()


def _path_of(version: Version) -> str | None:
    about = version.metadata.get("lightning")
    path = about.get("path") if isinstance(about, Mapping) else None
    return path if isinstance(path, str) else None
