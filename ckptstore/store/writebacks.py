"""The part of the facade that replicates behind the training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptstore.errors import InvalidInputError, NotReplicatedError
from ckptstore.events import Events, SaveEvent
from ckptstore.format.names import check_listed
from ckptstore.model import ReplicaInfo, Version
from ckptstore.repo import Repo
from ckptstore.store.replica_pool import OpenedReplicas

if TYPE_CHECKING:
    from ckptstore.store.writeback import WriteBack

__all__ = ["WritingBack"]


class WritingBack:
    """What :class:`ckptstore.Store` does to have what it saves in a replica too."""

    _repo: Repo
    _events: Events
    _opened: OpenedReplicas
    _write_backs: dict[tuple[int, str], WriteBack]
    """By process and name of the replica."""

    if TYPE_CHECKING:

        def resolve(self, ref: str) -> Version:
            """Return the version that a ref names."""

    def write_back(
        self,
        name: str,
        *,
        runs: Sequence[str] | None = None,
        bytes_per_s: float = 0.0,
        close_timeout_s: float | None = None,
    ) -> WriteBack:
        """Replicate to a replica, from now on, what is saved here, in a thread of low priority.

        A save is done when it is durable here, and never waits for, or fails with, the replica.
        First comes what the replica does not have yet, so that a process that was killed is caught
        up with. Called again, it covers more runs. What is told to this store object alone counts:
        other processes write back themselves, or a job does.

        Parameters
        ----------
        name
            Of a replica; see :meth:`add_replica`. It need not answer now.
        runs
            Names of runs, which need not be there yet; None for all of the store.
        bytes_per_s
            Bandwidth limit, both directions together; 0 for none.
        close_timeout_s
            How long :meth:`close` waits for what was saved here; None for as long as it goes on.

        Returns
        -------
        WriteBack
            Its ``pending`` and ``error`` say how it goes; ``wait`` waits.

        Raises
        ------
        NotFoundError
            No replica has the name.
        ReadOnlyError, UnsafeBackendError
            This store cannot be written to: what is there could not be noted.
        """
        from ckptstore.catalog.tier_ops import find_replica
        from ckptstore.store.writeback import WriteBack

        if bytes_per_s < 0 or (close_timeout_s is not None and close_timeout_s < 0):
            msg = f"bytes_per_s={bytes_per_s}, close_timeout_s={close_timeout_s}: not below 0"
            raise InvalidInputError(msg)
        wanted = None if runs is None else check_listed(runs, "runs")
        info = find_replica(self._repo.refresh(), name)
        self._repo.check_writable()
        key = (os.getpid(), name)
        found = self._write_backs.get(key)
        if found is None:
            made = WriteBack(
                self._repo,
                self._events,
                info,
                lambda: self._opened.get(self._now_at(info))._repo,
                bytes_per_s=bytes_per_s,
                close_timeout_s=close_timeout_s,
            )
            found = self._write_backs.setdefault(key, made)
            if found is made:
                self._events.observe(_listener(made))
        found.cover(wanted)
        return found

    def _now_at(self, info: ReplicaInfo) -> ReplicaInfo:
        """Return a replica as it is named now: it may have moved."""
        return self._repo.log.catalog.replicas.get(info.name, info)

    def wait_replicated(
        self, version: Version | str, timeout_s: float | None = None, *, replica: str | None = None
    ) -> Version:
        """Wait until a version that is written back is in its replica; return it.

        Parameters
        ----------
        version
            Or a ref of it.
        timeout_s
            In seconds. None: until it is there, or an attempt to bring it fails.
        replica
            Which, if it is written back to several; None for all of them.

        Raises
        ------
        NotReplicatedError
            It is durable here, and not there (yet); says why.
        InvalidInputError
            Nothing is written back.
        """
        found = self.resolve(version) if isinstance(version, str) else version
        chosen = [one for one in self._own() if replica in (None, one.replica.name)]
        if not chosen:
            msg = "nothing is written back" + ("" if replica is None else f" to {replica!r}")
            raise InvalidInputError(msg, hint="store.write_back('cold'), or run(write_back='cold')")
        for one in chosen:
            one.wait(found.id, timeout_s)
        return self._repo.refresh().version(found.id)

    def _own(self) -> list[WriteBack]:
        """Return what this very process writes back."""
        return [one for (pid, _), one in self._write_backs.items() if pid == os.getpid()]

    def _committed(self, version: Version) -> None:
        """Hear of a version that was saved another way than by a run of this object."""
        for one in self._own():
            one.saved(version.run, version.id)

    def _close_write_backs(self, *, at_once: bool = False) -> NotReplicatedError | None:
        """End them; return the first failure."""
        first: NotReplicatedError | None = None
        for one in self._own():
            try:
                one.close(0.0 if at_once else one.close_timeout_s)
            except NotReplicatedError as error:
                first = first or error
        self._write_backs.clear()
        return first


def _listener(one: WriteBack) -> Callable[[SaveEvent], None]:
    def hear(event: SaveEvent) -> None:
        if event.kind == "durable":
            one.saved(event.run, event.version)

    return hear
