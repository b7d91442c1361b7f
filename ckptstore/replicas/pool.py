"""Replicas of a store, opened when they are first needed, and once for all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore import limits
from ckptstore.backends.stoppable import StoppableBackend
from ckptstore.errors import CkptStoreError, InvalidInputError, ReplicaChangedError
from ckptstore.format.names import check_replica_name
from ckptstore.model import ReplicaInfo
from ckptstore.replicas.options import ReplicaOptions, check_bound, check_meant, open_place
from ckptstore.replicas.places import PLACE
from ckptstore.repo import Finding, Repo


@dataclass(slots=True)
class _Slot:
    """One replica: at most one thread opens it at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    repo: Repo | None = None
    own: bool = False
    failure: CkptStoreError | None = None
    failed_at: float = 0.0


class OpenedReplicas:
    """Opens replicas. Any thread may use it; a forked child opens its own.

    Parameters
    ----------
    given
        Options, or open stores, which stay their owner's. Never stored, never shown.
    """

    def __init__(self, repo: Repo, given: ReplicaOptions | None = None) -> None:
        self._repo = repo
        self._given = dict(given or {})
        for name, options in self._given.items():
            check_replica_name(name)
            if not isinstance(options, Mapping) and not hasattr(options, "repo"):
                msg = f"the options of the replica {name!r} are no mapping"
                hint = "replicas={'cold': {'url': 's3://...', 'endpoint_url': ...}}"
                raise InvalidInputError(msg, hint=hint)
            if isinstance(options, Mapping):
                check_bound(name, options)
        self._slots: dict[str, _Slot] = {}
        self._pid = os.getpid()

    def give(self, name: str, options: Mapping[str, Any]) -> None:
        """Remember options of a replica, for this process.

        Raises
        ------
        InvalidInputError
            They go to a storage, and do not say to which; see
            :mod:`ckptstore.replicas.options`.
        """
        check_bound(name, options)
        self._given[name] = dict(options)

    @property
    def given(self) -> ReplicaOptions:
        """Options, or open stores, by name."""
        return self._given

    def get(self, info: ReplicaInfo) -> Repo:
        """Return a replica, opened.

        Threads that come while one opens it share what becomes of that, its failure too.

        Raises
        ------
        ReplicaChangedError
            There is another store than the one that was named.
        CkptStoreError
            It cannot be opened.
        """
        self._repo.check_open()
        asked = self._repo.environment.monotonic()
        slot = self._slot(f"{info.name} {info.store} {info.url}")
        with slot.lock:
            if slot.repo is not None:
                return slot.repo
            if slot.failure is not None and slot.failed_at >= asked:
                raise slot.failure
            try:
                slot.repo, slot.own = self._open(info)
            except CkptStoreError as error:
                slot.failure, slot.failed_at = error, self._repo.environment.monotonic()
                raise
            return slot.repo

    def _slot(self, key: str) -> _Slot:
        if self._pid != os.getpid():  # a forked child: its locks and connections are its own
            self._pid, self._slots = os.getpid(), {}
        return self._slots.setdefault(key, _Slot())

    def _open(self, info: ReplicaInfo) -> tuple[Repo, bool]:
        given = self._given.get(info.name, {})
        if not isinstance(given, Mapping):
            check_same(given.repo, info)
            return given.repo, False
        check_meant(info, given)
        repo = open_place(info.url, self.options(given))
        try:
            check_same(repo, info)
        except CkptStoreError:
            repo.close()
            raise
        return repo, True

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a replica is opened with: the limits of this store unless options say else.

        Parameters
        ----------
        given
            Options of the replica; the place that they are for is left out.
        """
        own = self._repo.options
        found: dict[str, Any] = {
            "host_bytes": own.host_bytes,
            "workers": own.workers,
            "read_only": own.read_only,
            "chunk_bytes": self._repo.superblock.chunk_bytes,
        }
        return {**found, **{key: value for key, value in given.items() if key != PLACE}}

    def close(self, close: Callable[[Repo], None] = Repo.close) -> None:
        """Close what was opened here, each by `close`, even if that raises for one; idempotent."""
        slots, self._slots = self._slots, {}
        if self._pid != os.getpid():
            return
        with ExitStack() as closing:
            for slot in slots.values():
                if slot.repo is not None and slot.own:
                    closing.callback(close, slot.repo)


def check_same(repo: Repo, info: ReplicaInfo) -> None:
    """Raise ReplicaChangedError unless a store is the one that was named."""
    found = repo.superblock.store_id
    if found != info.store:
        msg = (
            f"at {repo.url} there is the store {found[:8]}, "
            f"and the replica {info.name!r} is the store {info.store[:8]}"
        )
        hint = f"if that is meant: ckptstore replica rm {info.name}, then replica add"
        raise ReplicaChangedError(msg, hint=hint)


def beside(repo: Repo, *, stoppable: bool = False) -> Repo:
    """Return a store over the same connections, with a log and limits of its own.

    So that no save ever waits for a lock that a replication holds.
    """
    backend = StoppableBackend(repo.backend) if stoppable else repo.backend
    options = replace(
        repo.options,
        workers=min(repo.options.workers, limits.WRITE_BACK_WORKERS),
        host_bytes=min(repo.options.host_bytes, limits.WRITE_BACK_HOST_BYTES),
    )

    def known(*_: object) -> Finding:
        return Finding(put_if_absent=repo.put_if_absent(), report={})  # probed once for both

    return Repo(
        backend, repo.superblock, environment=repo.environment, options=options, prober=known
    )
