"""The part of the facade that saves, in the foreground and in the background."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ckptstore.errors import CkptStoreError, NotReplicatedError
from ckptstore.events import Events, Observer, SaveEvent
from ckptstore.model import Version
from ckptstore.repo import Repo
from ckptstore.store import resume_check
from ckptstore.store.replica_pool import OpenedReplicas

if TYPE_CHECKING:
    from ckptstore.saver.saver import Saver
    from ckptstore.states.save import SaveRequest

__all__ = ["Background"]

_log = logging.getLogger("ckptstore")


class Background:
    """What :class:`ckptstore.Store` does to save, and to end."""

    _repo: Repo
    _events: Events
    _opened: OpenedReplicas
    _kept_savers: dict[int, Saver]
    """By process; a forked child has its parent's too, until it makes its own."""

    if TYPE_CHECKING:

        def _close_write_backs(self, *, at_once: bool = False) -> NotReplicatedError | None: ...

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store; an error of the block is not hidden behind one of a save.

        After Ctrl-C, or what ends the process, replicas are not waited for.
        """
        try:
            if kind is not None and not issubclass(kind, Exception):
                late = self._close_write_backs(at_once=True)
                if late is not None:
                    _log.warning("%s", late)
            self.close()
        except CkptStoreError as failure:
            if error is None:
                raise
            _log.warning("%s, besides what ended the block", failure)

    def close(self) -> None:
        """Wait for saves in the background and for what is written back; release connections.

        Idempotent.

        What is asked of the store or its runs afterwards raises InvalidInputError.

        Raises
        ------
        CkptStoreError
            A save in the background failed and nobody has asked it; the store is closed all the
            same.
        NotReplicatedError
            What is written back did not all reach its replica, within ``close_timeout_s`` if that
            was given. It is durable here, and the store is closed.
        """
        saver = self._own_saver
        self._kept_savers.clear()
        late: NotReplicatedError | None = None
        try:
            if saver is not None:
                saver.close()
            late = self._close_write_backs()
        finally:
            self._opened.close()
            self._repo.close()
        if saver is not None:
            saver.raise_failure()
        if late is not None:
            raise late

    def reserve(self, size_bytes: int) -> None:
        """Take memory for a staged state from the system, and start what saves in the background.

        The first save then stalls the training no longer than the ones after it. Returns when it
        is done, which takes up to seconds a GiB; does nothing while saves are under way.

        Parameters
        ----------
        size_bytes
            Of the state: the sum of its tensors, tied ones once, and 64 bytes for each.

        Raises
        ------
        LimitError
            It is more than ``staging_bytes``.
        """
        saver = self._saver
        if not saver.in_flight:
            saver.dispatcher.start()
            saver.dispatcher.reserve(size_bytes)

    def wait(self) -> None:
        """Wait until no save in the background is under way.

        Raises
        ------
        CkptStoreError
            One failed, and nobody has asked it.
        """
        saver = self._own_saver
        if saver is not None:
            saver.wait()
            saver.raise_failure()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Have a function called with each event of a save; return what ends that.

        Parameters
        ----------
        observer
            Gets a :class:`ckptstore.events.SaveEvent`, in any thread; must return quickly.
        """
        return self._events.observe(observer)

    def prometheus(self) -> str:
        """Return the figures of the store, and of the saves of this process, for Prometheus.

        Reads the log, and nothing else of the storage. Serve it by any HTTP server, or write it
        to a file for node_exporter; ``ckptstore stats --prometheus`` prints the store's part.

        Raises
        ------
        StorageError, CorruptObjectError
            The log cannot be read.
        """
        from ckptstore.maintenance.reports.prometheus_text import ProcessFigures, exposition

        saver = self._own_saver
        process = ProcessFigures(
            outcomes=self._events.counts(),
            in_flight=0 if saver is None else saver.in_flight,
            staging_bytes=0 if saver is None else saver.dispatcher.size_bytes,
        )
        return exposition(self._repo.refresh(), process)

    @property
    def _own_saver(self) -> Saver | None:
        """What saves in the background, if this very process has begun to.

        That of a process that this one was forked from is left alone: its threads are not here,
        its locks may be held for ever, and its errors are not this one's.
        """
        return self._kept_savers.get(os.getpid())

    @property
    def _saver(self) -> Saver:
        """What saves in the background, one for all threads; a forked child gets its own."""
        self._repo.check_open()
        saver = self._own_saver
        if saver is None:
            from ckptstore.saver.saver import Saver

            made = Saver(self._repo, self._events)
            # One step, so that of threads that come at once all get the same one. No lock: it
            # could be held for ever in a child of a fork.
            saver = self._kept_savers.setdefault(made.pid, made)
            for pid in [pid for pid in self._kept_savers if pid != made.pid]:
                self._kept_savers.pop(pid, None)  # the parent's
        return saver

    def _save(self, state: object, request: SaveRequest) -> Version:
        """Save in the foreground, after what is under way for the run; tell what became of it."""
        from ckptstore.states.save import save_version

        saver = self._own_saver
        if saver is not None:
            saver.wait(request.run)
            saver.raise_failure(request.run)
        try:
            version = save_version(self._repo, state, request)
        except CkptStoreError as error:
            self._events.emit(self._event(request, error=error), raised=True)
            raise
        self._events.emit(self._event(request, version=version))
        resume_check.saved(self._repo, version.run, version.step, version.id)
        return version

    def _event(
        self,
        request: SaveRequest,
        *,
        version: Version | None = None,
        error: CkptStoreError | None = None,
    ) -> SaveEvent:
        return SaveEvent(
            kind="failed" if version is None else "durable",
            store=self._repo.url,
            run=request.run,
            step=request.step,
            version="" if version is None else version.id,
            at_ms=self._repo.environment.now_ms(),
            receipt={} if version is None else dict(version.receipt),
            error_kind="" if error is None else error.kind,
            message="" if error is None else str(error),
        )
