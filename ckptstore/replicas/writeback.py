"""Write-back: new versions are replicated behind the training, by one patient thread.

A save is durable here, and done, before this thread hears of it; nothing here ever blocks or fails
a save. The work is not a queue that could overflow but a question to the catalog:
which versions of these runs does the replica not have yet? So a burst of saves is one answer, a
killed process forgets nothing, and the next one that is asked to write back catches up. The newest
version goes first. A replica that is down is tried again, less and less often; that is logged at
once, and loud for who waits or closes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import parent_process

from ckptstore import errors, limits
from ckptstore.backends.stoppable import StoppableBackend
from ckptstore.backends.transfers import operation, start_thread
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.replica_ops import had_content
from ckptstore.events import Events, SaveEvent
from ckptstore.format.names import check_listed
from ckptstore.model import ReplicaInfo, Version
from ckptstore.replicas.named import Replicas
from ckptstore.repo import Finding, Repo
from ckptstore.saver.thread_priority import step_back

_log = logging.getLogger("ckptstore")


@dataclass(eq=False, repr=False)
class WriteBack:
    """Replicates new versions of some runs to one replica; made by :meth:`Store.write_back`.

    Any thread may use it. A forked child has none of it: it begins its own.
    """

    _repo: Repo
    _events: Events
    replica: ReplicaInfo
    """The replica that versions go to."""
    _open_replica: Callable[[], Repo]
    _bytes_per_s: float = 0.0
    close_timeout_s: float | None = None
    """Seconds that closing the store waits; None for as long as it goes on."""

    def __post_init__(self) -> None:
        """Begin without versions to wait for."""
        self._environment = self._repo.environment
        self._here = beside(self._repo)
        self._there: Repo | None = None
        self._runs: set[str] | None = set()
        self._changed = threading.Condition()
        self._mine: dict[str, None] = {}
        """Ids of what was saved through this object and is not there yet; in the order of saves."""
        self._unable: dict[str, str] = {}
        """Ids of versions that will not come, and why."""
        self._asked = True
        """There may be something to do."""
        self._all = True
        """Everything is to be looked through, not the newest alone."""
        self._fresh = False
        """Something was saved since the last look."""
        self._busy = False
        self._closing = False
        self._stopped = False
        self.exiting: bool = False
        """The interpreter is ending: of each further save a warning tells that it stays here."""
        self._failure: errors.CkptStoreError | None = None
        self._attempts = 0
        """Number of attempts that ended, well or not."""
        self._failures = 0
        """Number of the last ones that failed."""
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        _all.add(self)

    def __repr__(self) -> str:
        """Return where to, and how much is left."""
        return f"<WriteBack to {self.replica.name!r}, {len(self._mine)} pending>"

    @property
    def pending(self) -> int:
        """Number of versions saved through this store object that are not there yet."""
        return len(self._mine)

    @property
    def error(self) -> errors.CkptStoreError | None:
        """Why the last attempt failed; None if it did not."""
        return self._failure

    def cover(self, runs: Collection[str] | None) -> None:
        """Write back these runs too; None for all of the store. Begins with missing versions."""
        with self._changed:
            self._runs = None if runs is None or self._runs is None else {*self._runs, *runs}
            self._asked = self._all = True
            if self._thread is None:
                name = f"ckptstore-write-back-{self.replica.name}"
                self._thread = start_thread(self._work, name)
            self._changed.notify_all()

    def hear(self, event: SaveEvent) -> None:
        """Hear of a version that became durable; returns at once, whatever happens."""
        if event.kind != "durable" or self._pid != os.getpid():
            return
        with self._changed:
            if self._runs is not None and event.run not in self._runs:
                return
            if self.exiting:
                _log.warning("%s", self._late(event.version))
            if self._closing:
                return
            self._mine[event.version] = None
            self._asked = self._fresh = True
            self._changed.notify_all()

    def wait(self, version: str | None = None, timeout_s: float | None = None) -> None:
        """Wait until a version is there, or all that were saved through this store object.

        Raises
        ------
        NotReplicatedError
            It will not come; or the time is over; or, without a limit of time, an attempt failed.
        """
        end = None if timeout_s is None else self._environment.monotonic() + timeout_s
        if self._pid != os.getpid():
            msg = "this write-back is of the process that this one was forked from"
            raise errors.NotReplicatedError(msg, hint="open the store in this process")
        with self._changed:
            failed = self._failures and self._attempts
            while self._waits_for(version):
                if version in self._unable:
                    break
                left = None if end is None else end - self._environment.monotonic()
                over = left is not None and left <= 0
                new = self._failures and self._attempts != failed
                idle = not (self._asked or self._busy)
                ended = self._thread is None or not self._thread.is_alive()
                if over or idle or (end is None and new) or ended:
                    raise self._late(version)
                self._changed.wait(left)
            if version is not None and version in self._unable:
                msg = f"#{version[:8]} does not come to replica {self.replica.name!r}: "
                raise errors.NotReplicatedError(msg + self._unable[version])

    def _waits_for(self, version: str | None) -> bool:
        if version is None:
            return bool(self._mine)
        found = self._here.catalog.find(version)
        return found is None or self.replica.store not in found.replicas

    def _late(self, version: str | None) -> errors.NotReplicatedError:
        what = f"#{version[:8]} is" if version else f"{len(self._mine)} versions are"
        why = f": {self._failure.message}" if self._failure is not None else ""
        msg = f"{what} durable here and not in replica {self.replica.name!r} yet{why}"
        hint = f"later: ckptstore replicate --to replica:{self.replica.name}; or write back again"
        error = errors.NotReplicatedError(msg, hint=hint)
        error.__cause__ = self._failure
        return error

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what was saved through this store object, then end; idempotent.

        What is older and still missing is left for the next process that writes back.

        Raises
        ------
        NotReplicatedError
            Not everything came: the time is over, or the replica does not take it.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            thread.join(timeout_s)
        finally:  # Ctrl-C too
            self.stop()
            thread.join(limits.WRITE_BACK_EXIT_S)
            self._thread = None
        if self._mine:
            raise self._late(None)
        for reason in self._unable.values():
            count = len(self._unable)
            msg = f"{count} versions do not come to replica {self.replica.name!r}: {reason}"
            raise errors.NotReplicatedError(msg, hint="ckptstore verify says what is damaged")

    def stop(self) -> None:
        """End after the request that is under way; raises nothing."""
        with self._changed:
            self._closing = True
            if self._there is not None and isinstance(self._there.backend, StoppableBackend):
                self._there.backend.stop()
            self._stopped = True
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        step_back()
        try:
            while self._await_work():
                self._attempt()
        except errors.OperationCancelledError:
            _log.info("write-back to replica %r ended", self.replica.name)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _attempt(self) -> None:
        try:
            self._round()
        except errors.OperationCancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a thread of ours: it arrives at who waits
            self._failed(error)
        else:
            with self._changed:
                self._failure, self._failures, self._busy = None, 0, False
                self._attempts += 1
                self._changed.notify_all()

    def _await_work(self) -> bool:
        """Wait until there is something to do; return False to end."""
        with self._changed:
            while not self._asked:
                if self._stopped or self._closing:
                    return False
                self._changed.wait()
            if self._stopped or (self._closing and not self._mine):
                return False
            self._asked, self._busy = False, True
            return True

    def _failed(self, error: Exception) -> None:
        """Tell, and pause before the next attempt.

        Raises
        ------
        OperationCancelledError
            There is no next one: it is being closed.
        """
        failure = error if isinstance(error, errors.CkptStoreError) else None
        with self._changed:
            self._failures += 1
            self._attempts += 1
            self._failure = failure or errors.NotReplicatedError(f"{type(error).__name__}: {error}")
            self._asked, self._busy = True, False
            self._changed.notify_all()
            pause = min(
                limits.WRITE_BACK_PAUSE_MAX_S,
                limits.WRITE_BACK_PAUSE_S * 2 ** min(self._failures - 1, 20),
            ) * (0.5 + self._environment.jitter() / 2)
            if self._closing:
                raise errors.OperationCancelledError("closed after a failure") from error
            what = "versions are not in replica %r yet: %s; trying again in %.0f s"
            _log.warning(what, self.replica.name, error, pause, exc_info=None if failure else error)
            self._changed.wait_for(lambda: self._closing, pause)

    @operation("write-back")
    def _round(self) -> None:
        """Replicate missing versions, the newest first, until there are none."""
        from ckptstore.maintenance.replicas.replicate import replicate
        from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest

        if self._there is None:
            self._there = self._opened()
        everything, self._all = self._all, False
        try:
            while batch := self._next(everything=everything):
                # Behind a round that went well there is nothing to go on with.
                resume = not self._attempts or self._failures > 0
                wish = ReplicateRequest(bytes_per_s=self._bytes_per_s, resume=resume)
                report = replicate(self._here, self._there, batch, wish)
                if report.note_failure:
                    msg = f"what it has cannot be noted here: {report.note_failure}"
                    raise errors.NotReplicatedError(msg)
                self._settle(batch, {one.version: one.message for one in report.failures})
        except BaseException:
            self._all = self._all or everything
            raise

    def _opened(self) -> Repo:
        there = beside(self._open_replica(), stoppable=True)
        there.refresh()
        with self._changed:
            if self._stopped:
                raise errors.OperationCancelledError("the write-back was stopped")
        return there

    def _next(self, *, everything: bool) -> list[Version]:
        """Return the next versions to replicate: the newest alone, then several at once."""
        catalog = self._here.refresh()
        with self._changed:
            closing, mine = self._closing, set(self._mine)
            fresh, self._fresh = self._fresh, False
        missing = self._missing(catalog, everything=everything)
        with self._changed:  # nobody waits for versions that are gone since then, or there
            for one in mine:
                now = catalog.find(one)
                if now is None:
                    continue
                if now.deleted or now.level == "record" or self._has(now):
                    self._mine.pop(one, None)
            self._changed.notify_all()
        if closing:
            missing = [version for version in missing if version.id in mine]
        return missing[: 1 if fresh else limits.WRITE_BACK_BATCH]

    def _missing(self, catalog: Catalog, *, everything: bool) -> list[Version]:
        """Return the versions that the replica is not noted to have, newest first."""
        runs, found = self._runs, list[Version]()
        for info in catalog.runs():
            if runs is None or info.name in runs:
                newest = catalog.versions(info.name, newest_first=True)
                looked = newest if everything else islice(newest, limits.WRITE_BACK_LOOK)
                found += filter(self._lacks, looked)
        with self._changed:
            seen = {version.id for version in found}
            rest = [one for one in self._mine if one not in seen and catalog.has_version(one)]
        found += filter(self._lacks, map(catalog.version, rest))
        return sorted(found, key=lambda version: version.commit, reverse=True)

    def _lacks(self, version: Version) -> bool:
        if version.deleted or version.damaged or version.level == "record":
            return False
        return version.id not in self._unable and not self._has(version)

    def _has(self, version: Version) -> bool:
        """Return whether the replica is noted to have a version, and, restored maybe, knows it."""
        if self.replica.store not in version.replicas or self._there is None:
            return self.replica.store in version.replicas
        there = self._there.catalog.find(version.id)
        return there is not None and had_content(there)

    def _settle(self, batch: Sequence[Version], failures: dict[str, str]) -> None:
        """Note the fate of some versions, and tell."""
        catalog = self._here.catalog
        done: list[Version] = []
        with self._changed:
            for version in batch:
                now = catalog.version(version.id)
                if self._has(now):
                    done.append(now)
                elif not (now.deleted or now.level == "record"):
                    why = failures.get(version.id, "it is there already, or was taken away there")
                    self._unable[version.id] = why
                    what = "%s@%s (#%s) is not written back to replica %r: %s"
                    said = (version.run, version.step, version.id[:8], self.replica.name, why)
                    _log.warning(what, *said)
                self._mine.pop(version.id, None)
            self._changed.notify_all()
        for version in done:
            saved = (version.run, version.step, version.id)
            event = self._here.save_event("replicated", *saved, replica=self.replica.name)
            self._events.emit(event)


class WriteBacks:
    """The write-backs of one open store. Any thread may use it; a forked child begins its own.

    Parameters
    ----------
    events
        Of the store: what becomes durable is heard of by them.
    """

    def __init__(self, repo: Repo, replicas: Replicas, events: Events) -> None:
        self._repo = repo
        self._replicas = replicas
        self._events = events
        self._begun: dict[tuple[int, str], WriteBack] = {}
        """By process and name of the replica."""

    def begin(
        self,
        name: str,
        *,
        runs: Sequence[str] | None = None,
        bytes_per_s: float = 0.0,
        close_timeout_s: float | None = None,
    ) -> WriteBack:
        """Write back to a replica from now on; see :meth:`ckptstore.Store.write_back`."""
        if bytes_per_s < 0 or (close_timeout_s is not None and close_timeout_s < 0):
            msg = f"bytes_per_s={bytes_per_s}, close_timeout_s={close_timeout_s}: not below 0"
            raise errors.InvalidInputError(msg)
        wanted = None if runs is None else check_listed(runs, "runs")
        info = self._replicas.info(name)
        self._repo.check_writable()
        key = (os.getpid(), name)
        found = self._begun.get(key)
        if found is None:
            made = WriteBack(
                self._repo,
                self._events,
                info,
                # It may have moved since.
                lambda: self._replicas.get(self._repo.log.catalog.replicas.get(name, info)),
                bytes_per_s,
                close_timeout_s,
            )
            found = self._begun.setdefault(key, made)
            if found is made:
                self._events.observe(made.hear)
        found.cover(wanted)
        return found

    def wait(self, version: Version, timeout_s: float | None, replica: str | None) -> Version:
        """Wait until a version is where it is written back to; return it as it is then.

        See :meth:`ckptstore.Store.wait_replicated`.
        """
        chosen = [one for one in self.own() if replica in (None, one.replica.name)]
        if not chosen:
            msg = "nothing is written back" + ("" if replica is None else f" to {replica!r}")
            hint = "store.write_back('cold'), or run(write_back='cold')"
            raise errors.InvalidInputError(msg, hint=hint)
        for one in chosen:
            one.wait(version.id, timeout_s)
        return self._repo.refresh().version(version.id)

    def own(self) -> list[WriteBack]:
        """Return what this very process writes back."""
        return [one for (pid, _), one in self._begun.items() if pid == os.getpid()]

    def close(self, *, at_once: bool = False) -> errors.NotReplicatedError | None:
        """End them; return the first failure."""
        first: errors.NotReplicatedError | None = None
        for one in self.own():
            try:
                one.close(0.0 if at_once else one.close_timeout_s)
            except errors.NotReplicatedError as error:
                first = first or error
        self._begun.clear()
        return first


def beside(repo: Repo, *, stoppable: bool = False) -> Repo:
    """Return a store over the same connections, with a log and limits of its own.

    So that no save ever waits for a lock that a replication holds.
    """
    backend = StoppableBackend(repo.backend) if stoppable else repo.backend
    own = replace(
        repo.options,
        workers=min(repo.options.workers, limits.WRITE_BACK_WORKERS),
        host_bytes=min(repo.options.host_bytes, limits.WRITE_BACK_HOST_BYTES),
    )

    def known(*_: object) -> Finding:
        return Finding(put_if_absent=repo.put_if_absent(), report={})  # probed once for both

    return Repo(backend, repo.superblock, environment=repo.environment, options=own, prober=known)


_all: weakref.WeakSet[WriteBack] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End before the interpreter goes down, if nobody closed the store.

    Threads that outlive the main one have ended, and so have background saves: the saver, which is
    imported later, registers its handlers later. A save of a handler that was registered before
    this one is not written back: a warning names it.
    """
    for one in list(_all):
        one.exiting = True
        try:
            one.close(limits.WRITE_BACK_EXIT_S)
        except errors.NotReplicatedError as error:
            _log.warning("%s", error)


def _end_worker() -> None:
    """End in a worker of multiprocessing, which may exit without handlers."""
    if parent_process() is not None:
        _end_all()


with suppress(RuntimeError):  # imported while the interpreter is ending
    getattr(threading, "_register_atexit", atexit.register)(_end_worker)
