"""An open store, by what its facades share: location, events, savers, replicas, write-backs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckptstore.errors import CkptStoreError, NotReplicatedError, SaveBusyError
from ckptstore.events import Events
from ckptstore.format.names import entries_of
from ckptstore.model import Ref, Version
from ckptstore.replicas.named import Replicas
from ckptstore.replicas.options import ReplicaOptions
from ckptstore.replicas.writeback import WriteBacks
from ckptstore.repo import Repo
from ckptstore.store import resume_check
from ckptstore.store.pickling import Opening, pickled, unpickled

if TYPE_CHECKING:
    from ckptstore.saver.saver import Saver
    from ckptstore.states.save import SaveRequest


def ready() -> None:
    """Import what saves need, whole, before a signal can come in between.

    Raises
    ------
    SaveBusyError
        It has: this is the handler of one that came during the first save of the process.
    """
    for name in ("ckptstore.states.save", "ckptstore.saver.saver"):
        if getattr(import_module(name).__spec__, "_initializing", False):
            msg = "the first save of this process has not imported all that it needs"
            hint = "save again later, or get the run after import torch, before signals come"
            raise SaveBusyError(msg, hint=hint)


class HasSession(Protocol):
    """A facade of an open store, by what its methods need of it."""

    @property
    def _session(self) -> Session:
        """The open store."""


RefT = TypeVar("RefT", contravariant=True)


class HasVersions(HasSession, Protocol[RefT]):
    """A store or a run, by what methods of both need of it."""

    def resolve(self, ref: RefT, /) -> Version:
        """Return the version that a ref names."""

    def _parsed(self, ref: RefT, /) -> Ref:
        """Return a ref by its parts."""


class Session:
    """An open store; :class:`ckptstore.Store` and its runs are facades of it.

    Any thread may use it. Pickled, it is that of the store that the other process opens.

    Parameters
    ----------
    replicas
        Options, or open stores, by the name of a replica.
    opening
        How another process opens the store; None if it cannot.
    """

    def __init__(
        self, repo: Repo, *, replicas: ReplicaOptions | None = None, opening: Opening | None = None
    ) -> None:
        self.repo = repo
        self.events: Events = Events()
        self.replicas: Replicas = Replicas(repo, replicas)
        self.write_backs: WriteBacks = WriteBacks(repo, self.replicas, self.events)
        self.trackers: dict[tuple[str, str], Mapping[str, str]] = {}
        """What leads to the run of a tracker, by run of the store and kind of tracker."""
        self._opening = opening
        self._of_replicas: dict[Repo, Session] = {}
        self._kept_savers: dict[int, Saver] = {}
        """By process; a forked child has its parent's too, until it makes its own."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.pickled(),)

    def pickled(self) -> bytes:
        """Return the pickle of the opening; raises InvalidInputError.

        See :func:`ckptstore.store.pickling.pickled`.
        """
        given, writes_back = self.replicas.given, bool(self.write_backs.own())
        return pickled(self.repo.url, self._opening, given, writes_back=writes_back)

    def of_replica(self, name: str, repo: Repo) -> Session:
        """Return the session of an opened replica, the same one each time; closed with this one."""
        found = self._of_replicas.get(repo)
        if found is None:
            given = self.replicas.given.get(name, {})
            options = self.replicas.options(given) if isinstance(given, Mapping) else {}
            key, replicas = options.pop("encryption_key", None), options.pop("replicas", None)
            opening = None
            if self._opening is not None:
                places = {"create", "chunk_bytes"}
                travelling = {one: options[one] for one in options if one not in places}
                opening = Opening.of(self._opening.reopen, repo.url, key, travelling)
            made = Session(repo, replicas=replicas, opening=opening)
            found = self._of_replicas.setdefault(repo, made)
        return found

    def metadata(self, run: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the metadata of a save: the given, and the trackers that log the run."""
        trackers = {kind: about for (of, kind), about in list(self.trackers.items()) if of == run}
        given = {} if given is None else given
        return {"trackers": trackers, **entries_of(given, "metadata")} if trackers else given

    def close(self) -> None:
        """Wait for what is under way, then close; see :meth:`ckptstore.Store.close`."""
        saver = self.own_saver
        self._kept_savers.clear()
        late: NotReplicatedError | None = None
        try:
            with ExitStack() as closing:
                closing.callback(self.repo.close)
                closing.callback(self.replicas.close, self._close_replica)
                if saver is not None:
                    saver.close()
                late = self.write_backs.close()
        finally:  # before what a replica's close raises
            if saver is not None:
                saver.raise_failure()
        if late is not None:
            raise late

    def _close_replica(self, repo: Repo) -> None:
        self._of_replicas.pop(repo, repo).close()

    @property
    def own_saver(self) -> Saver | None:
        """The saver of background saves, if this very process has one.

        That of a process that this one was forked from is left alone: its threads are not here,
        its locks may be held for ever, and its errors are not this one's.
        """
        return self._kept_savers.get(os.getpid())

    @property
    def saver(self) -> Saver:
        """The saver of background saves, one for all threads; a forked child gets its own."""
        self.repo.check_open()
        saver = self.own_saver
        if saver is None:
            from ckptstore.saver.saver import Saver

            made = Saver(self.repo, self.events)
            # One step, so that of threads that come at once all get the same one. No lock: it
            # could be held for ever in a child of a fork.
            saver = self._kept_savers.setdefault(made.pid, made)
            for pid in [pid for pid in self._kept_savers if pid != made.pid]:
                self._kept_savers.pop(pid, None)  # the parent's
        return saver

    def save(self, state: object, request: SaveRequest) -> Version:
        """Save in the foreground, after background saves of the run; emit an event."""
        from ckptstore.states.save import save_version

        saver = self.own_saver
        if saver is not None:
            saver.wait(request.run)
            saver.raise_failure(request.run)
        try:
            version = save_version(self.repo, state, request)
        except CkptStoreError as error:
            failed = self.repo.save_event("failed", request.run, request.step, error=error)
            self.events.emit(failed, raised=True)
            raise
        self.tell_durable(version)
        resume_check.saved(self.repo, version.run, version.step, version.id)
        return version

    def tell_durable(self, version: Version) -> None:
        """Emit the event of a version that was saved; replicas hear it too."""
        what = (version.run, version.step, version.id)
        self.events.emit(self.repo.save_event("durable", *what, receipt=version.receipt))


def _unpickled(data: bytes) -> Session:
    found: Session = unpickled(data)._session
    return found
