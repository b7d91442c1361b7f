"""Notices that somebody else saves to the run that this process saves to, and says so once.

Nothing is wrong with such a log: the saves form one line, each with the one before for a parent.
But two trainings that were given one name by mistake look like one that jumps, and ``best`` and
retention choose among both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.run_ops import Save
from ckptstore.errors import CkptStoreError

_log = logging.getLogger("ckptstore")


class Interleaving:
    """What one log has saved, by run; its owner calls it under the lock of the log.

    Parameters
    ----------
    read
        Returns the commit of a number; asked for when somebody else has saved.
    by
        Who this process is: ``user@host pid``.
    """

    def __init__(self, read: Callable[[int], Commit], *, by: str) -> None:
        self._read = read
        self._where = by.rpartition(" ")[0]
        """The user and host of this process."""
        self._kin = {by} if by else set()
        self._last: dict[str, int] = {}
        """Number of the commit with this log's newest version of each run."""
        self._told: set[str] = set()

    def befriend(self, pid: int) -> None:
        """Take the saves of another process of this host for this one's own: it saves for it."""
        self._kin.add(f"{self._where} {pid}")

    def note(self, commit: Commit, after: Catalog) -> None:
        """Look at a commit of this log's own, and warn if others' saves came in between."""
        for op in commit.ops:
            if not isinstance(op, Save):
                continue
            last = self._last.get(op.run)
            self._last[op.run] = commit.number
            if last is None or op.run in self._told or not op.parent:
                continue
            parent = after.version(op.parent)
            # A rollback, whoever made it, leads to an older one.
            if parent.run == op.run and parent.commit > last:
                who = self._who(parent.commit)
                if who in self._kin:
                    continue
                self._told.add(op.run)
                _log.warning(
                    "run %s: %s saved step %d between two saves of this process; if these are two "
                    "trainings, give each a run of its own",
                    op.run,
                    who,
                    parent.step,
                )

    def _who(self, number: int) -> str:
        try:
            return self._read(number).body.by or "somebody else"
        except CkptStoreError:
            return "somebody else"
