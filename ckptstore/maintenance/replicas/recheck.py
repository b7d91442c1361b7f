"""The look after a commit: what another store no longer holds comes back, if this one let it go.

No lock spans two stores. Whoever lets go of a version here because another store holds it looks
there before the commit, and once more after it: what was lost there in between is taken back, from
the chunks that are still here, since nothing is swept before its grace. Who is killed between the
commit and the second look leaves it undone. Why so: docs/design/0021-replication.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from ckptstore.catalog import replica_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Quarantine
from ckptstore.catalog.replica_ops import Arrival
from ckptstore.catalog.state import Op
from ckptstore.errors import CkptStoreError
from ckptstore.maintenance.replicas.replicate_report import Failure
from ckptstore.maintenance.retention.remove import undelete
from ckptstore.manifests import relied_on
from ckptstore.model import Version
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")


@dataclass(slots=True, kw_only=True)
class SecondLook:
    """Looks at another store once more, and takes back what has to be; owned by one thread."""

    here: Repo
    there: Repo
    holds: Callable[[Version], bool]
    """Says whether the other store holds a version, by its log as it was last read."""
    done: str
    """What was done to versions here, such as ``evicted``; for messages."""
    returned: list[str] = field(default_factory=list)
    """Ids of versions that were taken back."""
    lost: list[Failure] = field(default_factory=list)
    """Those for which that failed, since a collection was faster, say."""

    def look(self, gone: Sequence[Version], *, deleted: Container[str] = ()) -> list[Version]:
        """Return those that the other store still holds; the rest is here as before, or lost.

        Parameters
        ----------
        gone
            Versions that a commit has just let go of, or of a part of them, as they were.
        deleted
            Ids of those that it deleted; of what somebody else has deleted, nothing comes back.

        Raises
        ------
        StorageError
            The other store does not answer: everything was taken back.
        """
        try:
            self.there.refresh()
        except CkptStoreError:
            for version in gone:
                self._return(version, f"{self.there.url} could not be looked at again", deleted)
            raise
        kept = []
        for version in gone:
            if self.holds(version):
                kept.append(version)
            else:
                self._return(version, f"{self.there.url} let it go at the same moment", deleted)
        return kept

    def _return(self, version: Version, why: str, deleted: Container[str]) -> None:
        """Take a version back, and note what became of that."""
        named = f"{version.run}@{version.step} (#{version.id[:8]})"
        try:
            if version.id in deleted:
                undelete(self.here, [version.id])
            else:
                self._take_back(version)
        except CkptStoreError as error:
            _log.warning("%s is %s, though %s: %s", named, self.done, why, error)
            message = f"it was {self.done}, though {why}; undelete it there: {error}"
            failure = Failure(
                version=version.id, run=version.run, step=version.step, message=message
            )
            self.lost.append(failure)
        else:
            _log.warning("%s is not %s: %s", named, self.done, why)
            self.returned.append(version.id)

    def _take_back(self, version: Version) -> None:
        """Make a version of which less is here be here as it was: its chunks still are.

        Raises
        ------
        CorruptObjectError, CondemnedError
            They are not: a collection without patience was faster.
        StorageError
            The storage failed.
        """
        manifest = self.here.manifests.load(version)
        pointer = self.here.manifests.put(manifest)
        arrival = Arrival(
            manifest=pointer,
            roles=version.roles,
            receipt=version.receipt,
            relies_on=relied_on(pointer, manifest),
        )
        store = self.here.superblock.store_id

        def build(now: Catalog) -> list[Op]:
            """Let the version arrive here again, by what the catalog says of it now."""
            again = () if now.version(version.id).deleted else (version.id,)
            ops = replica_ops.arrive(
                now, now, [version], store=store, arrivals={version.id: arrival}, again=again
            )
            if ops and version.damaged:  # what is lost of it is lost still: none may share with it
                ops.append(Quarantine(versions=[version.id]))
            return ops

        self.here.log.append_any(build)
