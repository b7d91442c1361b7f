"""The write-backs of one open store: one for each replica, begun when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptstore.errors import InvalidInputError, NotReplicatedError
from ckptstore.events import Events, SaveEvent
from ckptstore.format.names import check_listed
from ckptstore.model import ReplicaInfo, Version
from ckptstore.replicas.named import Replicas
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.replicas.writeback import WriteBack


class WriteBacks:
    """What one open store writes back. Any thread may use it; a forked child begins its own.

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
        from ckptstore.replicas.writeback import WriteBack

        if bytes_per_s < 0 or (close_timeout_s is not None and close_timeout_s < 0):
            msg = f"bytes_per_s={bytes_per_s}, close_timeout_s={close_timeout_s}: not below 0"
            raise InvalidInputError(msg)
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
                lambda: self._replicas.pool.get(self._now_at(info)),
                bytes_per_s=bytes_per_s,
                close_timeout_s=close_timeout_s,
            )
            found = self._begun.setdefault(key, made)
            if found is made:
                self._events.observe(_listener(made))
        found.cover(wanted)
        return found

    def _now_at(self, info: ReplicaInfo) -> ReplicaInfo:
        """Return a replica as it is named now: it may have moved."""
        return self._repo.log.catalog.replicas.get(info.name, info)

    def wait(self, version: Version, timeout_s: float | None, replica: str | None) -> Version:
        """Wait until a version is where it is written back to; return it as it is then.

        See :meth:`ckptstore.Store.wait_replicated`.
        """
        chosen = [one for one in self.own() if replica in (None, one.replica.name)]
        if not chosen:
            msg = "nothing is written back" + ("" if replica is None else f" to {replica!r}")
            raise InvalidInputError(msg, hint="store.write_back('cold'), or run(write_back='cold')")
        for one in chosen:
            one.wait(version.id, timeout_s)
        return self._repo.refresh().version(version.id)

    def own(self) -> list[WriteBack]:
        """Return what this very process writes back."""
        return [one for (pid, _), one in self._begun.items() if pid == os.getpid()]

    def committed(self, version: Version) -> None:
        """Hear of a version that was saved another way than by a run of this object."""
        for one in self.own():
            one.saved(version.run, version.id)

    def close(self, *, at_once: bool = False) -> NotReplicatedError | None:
        """End them; return the first failure."""
        first: NotReplicatedError | None = None
        for one in self.own():
            try:
                one.close(0.0 if at_once else one.close_timeout_s)
            except NotReplicatedError as error:
                first = first or error
        self._begun.clear()
        return first


def _listener(one: WriteBack) -> Callable[[SaveEvent], None]:
    def hear(event: SaveEvent) -> None:
        if event.kind == "durable":
            one.saved(event.run, event.version)

    return hear
