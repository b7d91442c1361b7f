"""The part of a run that saves, in the foreground and in the background."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.events import ProgressCallback, silent
from ckptstore.model import Version
from ckptstore.store import resume_check

if TYPE_CHECKING:
    from ckptstore.catalog.catalog import Catalog
    from ckptstore.encodings.encoding_rules import EncodingRules, Encodings
    from ckptstore.format.fields import Direction
    from ckptstore.format.paths import Pattern
    from ckptstore.maintenance.retention.retain import RetainReport
    from ckptstore.saver.pending import PendingSave
    from ckptstore.saver.saver import IfBusy, Stage
    from ckptstore.store.store import Store
    from ckptstore.tensors.adapters import TypeAdapter

__all__ = ["RunSaving"]

_log = logging.getLogger("ckptstore")


class RunSaving:
    """What :class:`ckptstore.Run` does to save."""

    _store: Store
    _directions: Mapping[str, Direction]
    _encodings: EncodingRules | None
    name: str

    if TYPE_CHECKING:

        def retain(self) -> RetainReport:
            """Delete and age versions by the policy of the run."""

    def save(
        self,
        state: object,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        roles: Mapping[Pattern, str] | None = None,
        encodings: Encodings | None = None,
        codec: str | None = None,
        derive: bool = True,
        adapters: Sequence[TypeAdapter] = (),
        retain: bool = False,
        progress: ProgressCallback = silent,
    ) -> Version:
        """Save a state; return when it is durable and visible.

        Waits for saves of the run that are still under way in the background. Tensors that the
        run's head holds already cost a digest and no bytes. Nothing is pickled.

        Parameters
        ----------
        state
            Nested dicts and lists of tensors, NumPy arrays and plain values; no other thread may
            change it meanwhile.
        step
            Of the training, from 0 on. A step that was saved before gets a further version.
        metrics
            Name to number; NaN is allowed and never best.
        tags
            Names for this version within the run.
        metadata
            A JSON object of the user's own.
        roles
            Pattern of paths to ``weights``, ``optimizer``, ``rng``, ``data`` or ``extra``, where
            the conventions (the top-level keys) do not fit.
        encodings
            Pattern of paths, or ``role:NAME``, to an encoding such as ``"bf16"`` or
            ``"int8:rel_l2=0.02"`` (:class:`ckptstore.Encoding`): the tensors that it takes are
            stored with an error, which is measured, recorded, and held within its bounds; what
            would exceed them is stored as it is, with a warning. The first pattern that matches
            counts. By default those of :meth:`Store.run`, or of the run's policy; ``{}`` for none.
        codec
            Overrides the store's for this save.
        derive
            Store tensors that are another one of the state, rounded to fewer bits, without bytes
            of their own: bfloat16 weights beside their float32 masters. They come back bit for bit.
        adapters
            Ways to represent objects of other types.
        retain
            Carry out the retention policy of the run afterwards. The version is durable by then:
            if that fails, it is logged, and the next time catches up.
        progress
            Called with the bytes done.

        Raises
        ------
        StateError
            The state holds something that cannot be represented; names its path. Nothing was
            written.
        InvalidInputError
            A name, metric or step is not accepted. Nothing was written.
        UnsafeEncodingError
            An encoding would make zeros of second moments, which the optimizer divides by.
            Nothing was written.
        TornStateError
            Another thread changed a tensor while it was encoded; no version appeared.
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to. Nothing was written.
        StorageError
            The storage failed; no version appeared.
        AmbiguousWriteError
            The storage gave no clear answer to the commit itself, and none when asked again: the
            version may appear. ``versions()`` tells, once the storage answers.
        """
        from ckptstore.states.save import SaveRequest

        if retain:
            self._check_policy(self._store.repo.refresh())
        request = SaveRequest(
            run=self.name,
            step=step,
            directions=self._directions,
            metrics=metrics or {},
            tags=tags,
            metadata=metadata or {},
            roles=roles or {},
            encodings=self._rules(encodings),
            codec=codec or self._store.repo.options.codec,
            derive=derive,
            adapters=adapters,
            progress=progress,
        )
        version = self._store._save(state, request)
        if retain:
            self._retain_after_save()
            version = self._store.repo.catalog.version(version.id)
        return version

    def save_async(
        self,
        state: object,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        roles: Mapping[Pattern, str] | None = None,
        encodings: Encodings | None = None,
        codec: str | None = None,
        derive: bool = True,
        adapters: Sequence[TypeAdapter] = (),
        retain: bool = False,
        if_busy: IfBusy = "wait",
        stage: Stage = "now",
        progress: ProgressCallback = silent,
    ) -> PendingSave:
        """Copy a state into host memory and return; what is left goes on in the background.

        The caller may change its state when this returns, or with ``stage="background"`` after
        ``wait_staged()``. An error arrives at the pending save, or at the next save of the run,
        or at ``close``, and is logged at once; no version appears then. With the process engine
        a state that was staged becomes durable even if this process is killed.

        Parameters
        ----------
        state, step, metrics, tags, metadata, roles, encodings, codec, derive, adapters
            As for :meth:`save`.
        retain
            Carry out the retention policy of the run when it is durable.
        if_busy
            When ``in_flight`` saves of the store are still under way, or its ``staging_bytes``
            are in use: ``"wait"``; ``"skip"`` this save, whose pending save says so; or
            ``"fail"`` with SaveBusyError.
        stage
            ``"now"``: the copy is made before this returns. ``"background"``: it is made while
            the training goes on, and only what torch does not count changes of (NumPy arrays)
            is copied now; call ``wait_staged()`` before the state is changed.
        progress
            Called with the bytes done, in another thread.

        Returns
        -------
        PendingSave
            Has two moments, staged and durable; ``result()`` is the version.

        Raises
        ------
        StateError, InvalidInputError, UnsafeEncodingError
            As :meth:`save`. Nothing was saved.
        TornStateError
            Another thread changed the state while it was copied; the tensor is named.
        LimitError
            The state is larger than ``staging_bytes``.
        SaveBusyError
            With ``if_busy="fail"``.
        ReadOnlyError, UnsafeBackendError
            The store cannot be written to.
        CkptStoreError
            An earlier save of this run failed in the background, and nobody has asked it.
        """
        began = self._store.repo.environment.monotonic()
        from ckptstore.states.save import SaveRequest

        if retain:
            self._check_policy(self._store.repo.catalog)
        request = SaveRequest(
            run=self.name,
            step=step,
            directions=self._directions,
            metrics=metrics or {},
            tags=tags,
            metadata=metadata or {},
            roles=roles or {},
            encodings=self._rules(encodings),
            codec=codec or self._store.repo.options.codec,
            derive=derive,
            adapters=adapters,
            progress=progress,
        )
        saver = self._store._saver
        pending = saver.save(
            state, request, began=began, if_busy=if_busy, stage=stage, retain=retain
        )
        if not pending.skipped:
            resume_check.saved(self._store.repo, self.name, pending.step, pending.version_id)
        return pending

    def _rules(self, encodings: Encodings | None) -> EncodingRules:
        """Return the rules that hold for a save: its own, this object's, or the run's policy's."""
        from ckptstore.catalog.retention import stored_encodings
        from ckptstore.encodings.encoding_rules import EncodingRules

        if encodings is not None:
            return EncodingRules(encodings)
        if self._encodings is not None:
            return self._encodings
        return EncodingRules(stored_encodings(self._store.repo.catalog, self.name))

    def _check_policy(self, catalog: Catalog) -> None:
        """Raise before a save that is to be followed by retention, if that could only fail."""
        from ckptstore.catalog.retention import stored_policy

        if not catalog.has_run(self.name) or stored_policy(catalog, self.name) is None:
            msg = f"run {self.name!r} has no retention policy"
            raise InvalidInputError(msg, hint="run.set_policy({'full': 'last 3'})")

    def _retain_after_save(self) -> None:
        try:
            self.retain()
        except CkptStoreError as error:
            _log.warning("run %s was not pruned after a save: %s", self.name, error)
