"""A run: a named line of training in a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.catalog import run_ops
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.errors import CkptStoreError, InvalidInputError, InvalidRefError, NotFoundError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.names import entries_of
from ckptstore.model import Ref, RunInfo, Version, versions_table
from ckptstore.shown import HtmlTable, Shown
from ckptstore.store import loading, resume_check, retaining
from ckptstore.store.loading import lazy_version
from ckptstore.store.store_session import Session, ready

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckptstore.catalog.catalog import Catalog
    from ckptstore.encodings.encoding_rules import EncodingRules, Encodings
    from ckptstore.format.fields import Direction
    from ckptstore.format.paths import Pattern
    from ckptstore.maintenance.check.latest_valid import LatestValid
    from ckptstore.maintenance.retention.retain import AnyPolicy, RetainReport
    from ckptstore.saver.pending import PendingSave
    from ckptstore.saver.save_state import IfBusy
    from ckptstore.saver.saver import Stage
    from ckptstore.states.lazy import LazyVersion
    from ckptstore.states.save import SaveRequest
    from ckptstore.tensors.adapters import TypeAdapter
    from ckptstore.tensors.restore import MapLocation

_log = logging.getLogger("ckptstore")


@dataclass(eq=False, repr=False)
class Run(Shown):
    """A named line of training in a store; made by :meth:`Store.run`. Any thread may use it."""

    _session: Session
    name: str
    _directions: Mapping[str, Direction]
    _encodings: EncodingRules | None = None
    _retains: bool = False

    def __repr__(self) -> str:
        """Return name and location."""
        return f"<Run {self.name} of {self._session.repo.url}>"

    def _summary(self) -> HtmlTable:
        return versions_table(repr(self), self.versions()[::-1])

    @property
    def info(self) -> RunInfo:
        """The run as the catalog knows it; raises RunNotFoundError before its first save."""
        return self._session.repo.refresh().run(self.name)

    @property
    def directions(self) -> dict[str, Direction]:
        """Direction in which each metric gets better: declared by the run, or given."""
        catalog = self._session.repo.refresh()
        known = catalog.run(self.name).metrics if catalog.has_run(self.name) else {}
        return {**self._directions, **known}

    @property
    def head(self) -> Version | None:
        """The version that the next save continues; None before the first save."""
        catalog = self._session.repo.refresh()
        return catalog.head(self.name) if catalog.has_run(self.name) else None

    def versions(self) -> list[Version]:
        """Return the versions of the run, oldest first; none before its first save."""
        catalog = self._session.repo.refresh()
        return list(catalog.versions(self.name)) if catalog.has_run(self.name) else []

    def __bool__(self) -> bool:
        """Return True, also before the first save."""
        return True

    def __len__(self) -> int:
        """Return the number of versions."""
        return len(self.versions())

    def __iter__(self) -> Iterator[Version]:
        """Yield the versions, oldest first."""
        return iter(self.versions())

    def __contains__(self, ref: object) -> bool:
        """Return whether a ref within the run, such as a step, names a version."""
        try:
            return isinstance(ref, str | int) and bool(self.resolve(ref).id)
        except (NotFoundError, InvalidRefError):
            return False

    def __getitem__(self, ref: str | int) -> LazyVersion:
        """Return a version, to be read lazily: ``run[140]``; see :meth:`version`."""
        return self.version(ref)

    def resolve(self, ref: str | int = "latest") -> Version:
        """Return a version: ``latest``, ``latest-valid``, a step, a tag, ``best:METRIC``, ``~N``.

        Raises
        ------
        InvalidRefError, RunNotFoundError, VersionNotFoundError
            As :meth:`Store.resolve`.
        """
        parsed = self._parsed(ref)
        if parsed.kind == "valid":
            return self.latest_valid().version
        return resolve(self._session.repo.refresh(), parsed, directions=self._directions)

    def _parsed(self, ref: str | int) -> Ref:
        return parse_ref(str(ref), run=self.name)

    def best(
        self, metric: str, *, n: int = 1, step_min: int = 0, step_max: int | None = None
    ) -> list[Version]:
        """Return the best versions by a metric, the best first; at most `n`.

        Those that can be loaded and are on the line of the run; NaN is never among them.

        Parameters
        ----------
        step_min, step_max
            Bounds of the step, both inclusive.

        Raises
        ------
        RunNotFoundError
            The run has no version yet.
        InvalidInputError
            The direction of the metric is not known.
        """
        from ckptstore.catalog.metrics import top

        catalog = self._session.repo.refresh()
        bounds = (step_min, step_max)
        return top(catalog, self.name, metric, n=n, steps=bounds, directions=self._directions)

    def save(
        self,
        state: object,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        roles: Mapping[Pattern, str] | None = None,
        encodings: Encodings | None = None,
        codec: str | None = None,
        derive: bool = True,
        adapters: Sequence[TypeAdapter] = (),
        plain: bool = False,
        retain: bool | None = None,
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
            ``"int8:rel_l2=0.02"`` (:class:`ckptstore.Encoding`). The error is measured, recorded
            and bounded; a tensor that exceeds its bound is stored losslessly, with a warning. The
            first matching pattern counts. By default those of :meth:`Store.run`, or of the run's
            policy; ``{}`` for none.
        codec
            Overrides the store's for this save.
        derive
            Store tensors that are another one of the state, rounded to fewer bits, without bytes
            of their own: bfloat16 weights beside their float32 masters. They come back bit for bit.
        adapters
            Ways to represent objects of other types.
        plain
            Store dataclasses and namespaces as dicts of their fields, and enums as their values.
            Their classes are lost: a load returns dicts and values.
        retain
            Carry out the run's retention policy afterwards; a failure is logged. None: if the run
            was opened with ``keep_last`` or ``keep_best``.
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
            The storage gave no clear answer to the commit: the version may appear. ``versions()``
            tells.
        """
        ready()
        retain = self._retains if retain is None else retain
        if retain:
            self._check_policy(self._session.repo.refresh())
        request = self._request(
            step, metrics=metrics, tags=tags, metadata=metadata, roles=roles, encodings=encodings,
            codec=codec, derive=derive, adapters=adapters, plain=plain, progress=progress,
        )  # fmt: skip
        version = self._session.save(state, request)
        if retain:
            self._retain_after_save()
            version = self._session.repo.catalog.version(version.id)
        return version

    def save_async(
        self,
        state: object,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        roles: Mapping[Pattern, str] | None = None,
        encodings: Encodings | None = None,
        codec: str | None = None,
        derive: bool = True,
        adapters: Sequence[TypeAdapter] = (),
        plain: bool = False,
        retain: bool | None = None,
        if_busy: IfBusy = "wait",
        stage: Stage = "now",
        progress: ProgressCallback = silent,
    ) -> PendingSave:
        """Copy a state into host memory and return; what is left goes on in the background.

        The caller may change its state when this returns, or with ``stage="background"`` after
        ``wait_staged()``. An error is logged at once, and raised by the pending save, the next save
        of the run, or ``close``; no version appears then. With the process engine a staged state
        becomes durable even if this process is killed.

        Parameters
        ----------
        state, step, metrics, tags, metadata, roles, encodings, codec, derive, adapters, plain
            As for :meth:`save`.
        retain
            Carry out the retention policy of the run when it is durable. None: as for
            :meth:`save`.
        if_busy
            When ``in_flight`` saves of the store are still under way, or its ``staging_bytes``
            are in use: ``"wait"``; ``"skip"`` this save, whose pending save says so; or
            ``"fail"`` with SaveBusyError.
        stage
            ``"now"``: the copy is made before this returns. ``"background"``: it is made while the
            training goes on; call ``wait_staged()`` before you change the state.
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
        began = self._session.repo.environment.monotonic()
        ready()
        retain = self._retains if retain is None else retain
        if retain:
            self._check_policy(self._session.repo.catalog)
        request = self._request(
            step, metrics=metrics, tags=tags, metadata=metadata, roles=roles, encodings=encodings,
            codec=codec, derive=derive, adapters=adapters, plain=plain, progress=progress,
        )  # fmt: skip
        saver = self._session.saver
        pending = saver.save(
            state, request, began=began, if_busy=if_busy, stage=stage, retain=retain
        )
        if not pending.skipped:
            resume_check.saved(self._session.repo, self.name, pending.step, pending.version_id)
        return pending

    def _request(
        self, step: int, *, metrics: Mapping[str, float] | None, metadata: Mapping[str, Any] | None,
        roles: Mapping[Pattern, str] | None, encodings: Encodings | None, codec: str | None,
        **others: Any,  # noqa: ANN401 - of the request
    ) -> SaveRequest:  # fmt: skip
        """Return the request of a save, with what the run and the store add to its arguments."""
        from ckptstore.states import save

        return save.SaveRequest(
            run=self.name,
            step=step,
            directions=self._directions,
            metrics={} if metrics is None else metrics,
            metadata=self._session.metadata(self.name, metadata),
            roles=self._roles(roles),
            encodings=self._rules(encodings),
            codec=codec or self._session.repo.options.codec,
            **others,
        )

    def _roles(self, given: Mapping[Pattern, str] | None) -> dict[Pattern, str]:
        """Return the patterns that hold for a save: those that are fixed for the run come first."""
        from ckptstore.catalog.retention import fixed_roles

        fixed = fixed_roles(self._session.repo.catalog, self.name)
        return {**fixed, **({} if given is None else entries_of(given, "roles")), **fixed}

    def _rules(self, encodings: Encodings | None) -> EncodingRules:
        """Return the rules that hold for a save: its own, this object's, or the run's policy's."""
        from ckptstore.catalog.retention import stored_encodings
        from ckptstore.encodings.encoding_rules import EncodingRules

        if encodings is not None:
            return EncodingRules(encodings)
        if self._encodings is not None:
            return self._encodings
        return EncodingRules(stored_encodings(self._session.repo.catalog, self.name))

    def _check_policy(self, catalog: Catalog) -> None:
        """Raise before a save that is to be followed by retention, if that could only fail."""
        from ckptstore.catalog.retention import stored_policy

        if stored_policy(catalog, self.name) is None:
            msg = f"run {self.name!r} has no retention policy"
            raise InvalidInputError(msg, hint="run.set_policy({'full': 'last 3'})")

    def _retain_after_save(self, otherwise: str = "") -> None:
        """Apply the policy that holds for the run, or a rule for whole versions if none does."""
        from ckptstore.catalog.retention import stored_policy

        try:
            catalog = self._session.repo.refresh()
            lacks = bool(otherwise) and stored_policy(catalog, self.name) is None
            self.retain({"full": otherwise} if lacks else None)
        except CkptStoreError as error:
            _log.warning("run %s was not pruned after a save: %s", self.name, error)

    def version(self, ref: str | int = "latest", *, fall_through: bool = True) -> LazyVersion:
        """Return a version to be read lazily; see :meth:`Store.version`."""
        return lazy_version(self._session, self.resolve(ref), fall_through=fall_through)

    def load(
        self,
        ref: str | int = "latest",
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        map_location: MapLocation = None,
        into: object = None,
        adapters: Sequence[TypeAdapter] = (),
        progress: ProgressCallback = silent,
        fall_through: bool = True,
        refill: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state of a version of this run; see :meth:`Store.load`."""
        return loading.load(
            self, ref, include=include, exclude=exclude, map_location=map_location, into=into,
            adapters=adapters, progress=progress, fall_through=fall_through, refill=refill,
            group=group,
        )  # fmt: skip

    def latest_valid(self, *, progress: ProgressCallback = silent) -> LatestValid:
        """Return the newest version on the line of the run that is sound; reads every byte of it.

        ``load("latest-valid")`` does the same with one reading.

        Returns
        -------
        LatestValid
            The ``version``, and the newer ones that were ``skipped``, each with the reason.

        Raises
        ------
        RunNotFoundError, VersionNotFoundError
            There is no such run, or it has no version that could be loaded.
        CorruptObjectError
            None is sound; the message lists them.
        """
        from ckptstore.maintenance.check.latest_valid import latest_valid

        return latest_valid(self._session.repo, self.name, progress=progress)

    load_into = loading.load_into

    tag = retaining.tag

    def untag(self, tag: str) -> None:
        """Take a tag away.

        Raises
        ------
        VersionNotFoundError
            The run has no such tag.
        """
        self._session.repo.log.append(lambda now: run_ops.untag(now, self.name, tag))

    annotate = retaining.annotate
    rollback = retaining.rollback
    pin = retaining.pin
    unpin = retaining.unpin

    def set_policy(self, policy: AnyPolicy | None) -> None:
        """Store the retention policy of this run; None takes it away. The run need not exist yet.

        Parameters
        ----------
        policy
            Levels to rules, such as ``{"full": "last 3", "weights": "best 5 val_loss"}``.

        Raises
        ------
        InvalidInputError, PolicyError
            It does not follow the grammar, or has no rule.
        """
        from ckptstore.maintenance.retention.retain import set_policy

        set_policy(self._session.repo, self.name, policy, directions=self._directions)

    def retain(
        self, policy: AnyPolicy | None = None, *, dry_run: bool = False, quick: bool = False
    ) -> RetainReport:
        """Delete and age versions of this run by a policy; see :meth:`Store.retain`."""
        return retaining.retain(self._session, policy, run=self.name, dry_run=dry_run, quick=quick)
