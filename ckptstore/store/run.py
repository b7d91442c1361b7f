"""A run: a named line of training in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.catalog import run_ops
from ckptstore.catalog.refs import parse_ref, resolve
from ckptstore.events import ProgressCallback, silent
from ckptstore.model import RunInfo, Version
from ckptstore.store.run_saving import RunSaving

if TYPE_CHECKING:
    from ckptstore.encodings.encoding_rules import EncodingRules
    from ckptstore.format.fields import Direction
    from ckptstore.format.paths import Pattern
    from ckptstore.maintenance.check.latest_valid import LatestValid
    from ckptstore.maintenance.retention.retain import AnyPolicy, RetainReport
    from ckptstore.states.lazy import LazyVersion
    from ckptstore.states.transfer import TransferReport
    from ckptstore.store.store import Store
    from ckptstore.tensors.adapters import TypeAdapter
    from ckptstore.tensors.restore import MapLocation

__all__ = ["Run"]


class Run(RunSaving):
    """A named line of training in a store; made by :meth:`Store.run`. Any thread may use it."""

    def __init__(
        self,
        store: Store,
        name: str,
        directions: Mapping[str, Direction],
        encodings: EncodingRules | None = None,
    ) -> None:
        self._store = store
        self._directions = directions
        self._encodings = encodings
        self.name = name

    def __repr__(self) -> str:
        """Return name and location."""
        return f"<Run {self.name} of {self._store.url}>"

    @property
    def info(self) -> RunInfo:
        """The run as the catalog knows it; raises RunNotFoundError before its first save."""
        return self._store.repo.refresh().run(self.name)

    @property
    def directions(self) -> dict[str, Direction]:
        """Which way each metric gets better: what the run has declared, and what was given."""
        catalog = self._store.repo.refresh()
        known = catalog.run(self.name).metrics if catalog.has_run(self.name) else {}
        return {**self._directions, **known}

    @property
    def head(self) -> Version | None:
        """The version that the next save continues; None before the first save."""
        catalog = self._store.repo.refresh()
        return catalog.head(self.name) if catalog.has_run(self.name) else None

    def versions(self) -> list[Version]:
        """Return the versions of the run, oldest first; none before its first save."""
        catalog = self._store.repo.refresh()
        return list(catalog.versions(self.name)) if catalog.has_run(self.name) else []

    def resolve(self, ref: str | int = "latest") -> Version:
        """Return a version: ``latest``, ``latest-valid``, a step, a tag, ``best:METRIC``, ``~N``.

        Raises
        ------
        InvalidRefError, RunNotFoundError, VersionNotFoundError
            As :meth:`Store.resolve`.
        """
        parsed = parse_ref(str(ref), run=self.name)
        if parsed.kind == "valid":
            return self.latest_valid().version
        catalog = self._store.repo.refresh()
        return resolve(catalog, parsed, directions=self._directions)

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
        from ckptstore.catalog.history import top

        catalog = self._store.repo.refresh()
        bounds = (step_min, step_max)
        return top(catalog, self.name, metric, n=n, steps=bounds, directions=self._directions)

    def version(self, ref: str | int = "latest", *, fall_through: bool = True) -> LazyVersion:
        """Return a version to be read lazily; see :meth:`Store.version`."""
        return self._store._lazy(self.resolve(ref), fall_through=fall_through)

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
    ) -> Any:  # noqa: ANN401 - whatever was saved
        """Return the state of a version of this run; see :meth:`Store.load`."""

        def load(version: Version) -> Any:  # noqa: ANN401 - whatever was saved
            """Return the state of one version, brought back first if that is wanted."""
            found = self._store._refill(version) if refill else version
            return self._store._lazy(found, fall_through=fall_through).load(
                include=include,
                exclude=exclude,
                map_location=map_location,
                into=into,
                adapters=adapters,
                progress=progress,
            )

        if parse_ref(str(ref), run=self.name).kind == "valid":
            return self._store._first_sound(self.name, load)
        return load(self.resolve(ref))

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

        store = self._store
        return latest_valid(store.repo, self.name, progress=progress)

    def load_into(
        self,
        ref: str | int,
        target: object,
        *,
        include: Sequence[Pattern] | None = None,
        exclude: Sequence[Pattern] | None = None,
        rename: Mapping[Pattern, Pattern] | None = None,
        cast: bool = True,
        strict: bool | None = None,
        progress: ProgressCallback = silent,
    ) -> TransferReport:
        """Fill a different model from a version of this run; see :meth:`Store.load_into`."""
        return self._store.load_into(
            f"#{self.resolve(ref).id}",
            target,
            include=include,
            exclude=exclude,
            rename=rename,
            cast=cast,
            strict=strict,
            progress=progress,
        )

    def tag(self, ref: str | int, tag: str) -> Version:
        """Give a version of this run a tag; see :meth:`Store.tag`."""
        return self._store.tag(f"#{self.resolve(ref).id}", tag)

    def untag(self, tag: str) -> None:
        """Take a tag away.

        Raises
        ------
        VersionNotFoundError
            The run has no such tag.
        """
        self._store.repo.log.append(lambda now: run_ops.untag(now, self.name, tag))

    def annotate(self, ref: str | int, metrics: Mapping[str, float]) -> Version:
        """Add metrics to a version of this run; see :meth:`Store.annotate`."""
        return self._store.annotate(f"#{self.resolve(ref).id}", metrics)

    def rollback(self, ref: str | int, *, reason: str = "") -> Version:
        """Make a version the head of the run again; return it.

        The next save continues it, and ``latest`` names it. Versions after it are abandoned: they
        stay, can be loaded by step or id, and come back by rolling back to the last of them.
        Nothing is copied or deleted.

        Parameters
        ----------
        ref
            A version of this run, such as ``best:val_loss``.
        reason
            For people who read the log.

        Raises
        ------
        VersionNotFoundError
            It names no version, or one of which only the record is kept.
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be committed.
        """
        return self._store.rollback(f"#{self.resolve(ref).id}", reason=reason)

    def pin(self, ref: str | int) -> Version:
        """Pin a version of this run; see :meth:`Store.pin`."""
        return self._store.pin(f"#{self.resolve(ref).id}")

    def unpin(self, ref: str | int) -> Version:
        """Unpin a version of this run; see :meth:`Store.unpin`."""
        return self._store.unpin(f"#{self.resolve(ref).id}")

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

        set_policy(self._store.repo, self.name, policy, directions=self._directions)

    def retain(
        self, policy: AnyPolicy | None = None, *, dry_run: bool = False, quick: bool = False
    ) -> RetainReport:
        """Delete and age versions of this run by a policy; see :meth:`Store.retain`."""
        return self._store.retain(policy, run=self.name, dry_run=dry_run, quick=quick)
