"""The part of the facade that lets versions go which a replica holds, and has it keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore.errors import InvalidInputError, NotFoundError
from ckptstore.format.names import check_listed
from ckptstore.model import Version
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.maintenance.replicas.evict import EvictReport
    from ckptstore.store.store import Store

__all__ = ["Evicting"]


class Evicting:
    """What :class:`ckptstore.Store` does with versions that another store holds."""

    _repo: Repo

    if TYPE_CHECKING:

        def resolve(self, ref: str) -> Version:
            """Return the version that a ref names."""

        def replica(self, name: str) -> Store:
            """Return a replica, opened."""

    def evict(
        self,
        refs: Sequence[str] | None = None,
        *,
        replica: str,
        runs: Sequence[str] | None = None,
        keep: str | Sequence[str] | None = None,
        pin: bool = True,
        dry_run: bool = False,
    ) -> EvictReport:
        """Keep only the record, here, of versions that a replica has; loads then fall through.

        Only of what the replica has now, had every byte of read back, and is seen to hold the
        objects of; never of what is tagged or pinned, nor the head of a run. The space is freed by
        the next collection (:meth:`gc`).

        What goes is pinned in the replica, for this store: no retention and no removal there takes
        what may be the only copy by then. The pin goes when the content comes back here
        (``refill=True``, :meth:`replicate`), or, with the next eviction, when the version is
        deleted here; or by hand there (:meth:`unpin`, :meth:`unpin_for`).

        Parameters
        ----------
        refs
            Versions; one of `refs`, `runs` and `keep` must be given. One that was evicted before
            is pinned in the replica, if it is not yet.
        replica
            Its name; see :meth:`add_replica`.
        runs
            Names of runs, of which all versions count.
        keep
            Rules as in a retention policy, such as ``"last 5, best 2 val_loss"``: what they name
            stays, of `runs` or of all runs.
        pin
            False leaves it to the rules of the replica how long it keeps what is evicted.
        dry_run
            Change nothing; the report says what would go.

        Raises
        ------
        NotFoundError
            No replica has the name; or something names nothing.
        InvalidInputError
            Nothing says which versions.
        ReplicaChangedError
            At the location of the replica there is another store.
        ReadOnlyError, UnsafeBackendError, StorageError
            This store cannot be written to, or with `pin` the replica; or a storage failed. What
            was evicted stays so.
        """
        from ckptstore.maintenance.replicas.evict import evict

        if refs is None and runs is None and keep is None:
            msg = "nothing says which versions are to be evicted"
            raise InvalidInputError(msg, hint="name versions or runs, or what stays: keep='last 5'")
        there = self.replica(replica)
        wanted = self._to_evict(refs, runs, keep)
        there._repo.refresh()
        return evict(
            self._repo,
            there._repo,
            wanted,
            missing=lambda versions: _missing(there, versions),
            pin=pin,
            dry_run=dry_run,
        )

    def _to_evict(
        self,
        refs: Sequence[str] | None,
        runs: Sequence[str] | None,
        keep: str | Sequence[str] | None,
    ) -> list[Version]:
        """Return what is named but for what rules keep, and what of it was evicted before."""
        from ckptstore.maintenance.core.select_versions import select_versions

        named = [self.resolve(ref) for ref in check_listed(refs or (), "refs")]
        of = check_listed(runs or (), "runs")
        wanted = select_versions(self._repo, refs=named, runs=of)
        if keep is not None:
            kept = {one.id for one in select_versions(self._repo, runs=of, rules=keep)}
            wanted = [one for one in wanted if one.id not in kept]
        return [*wanted, *(one for one in named if one.level == "record")]

    def unpin_for(self, store: str) -> list[Version]:
        """Take the pins away that another store has left here; return the versions that had one.

        For a store that is gone for good, or that shall not decide what is kept here. What it let
        go may be in no other store than this one.

        Parameters
        ----------
        store
            Its id, or the beginning of it.

        Raises
        ------
        NotFoundError
            No version is pinned for such a store.
        InvalidInputError
            Several stores have pins here whose ids begin so.
        ReadOnlyError, UnsafeBackendError, StorageError
            This store cannot be written to.
        """
        from ckptstore.maintenance.replicas.remote_pins import release

        pinning = {one for version in self._repo.refresh().pinned() for one in version.pinned_for}
        found = sorted(one for one in pinning if store and one.startswith(store))
        if not found:
            msg = f"no version is pinned for a store {store[:40]!r}"
            raise NotFoundError(msg, hint="ckptstore show REF says for which store one is pinned")
        if len(found) > 1:
            msg = f"{len(found)} stores have pins here whose ids begin with {store[:40]!r}"
            raise InvalidInputError(msg, hint=f"such as {found[0]}")
        ids = release(self._repo, found[0])
        return [self._repo.catalog.version(one) for one in ids]


def _missing(there: Store, versions: Sequence[Version]) -> set[str]:
    """Return ids of versions that a replica has let go of, or whose objects are not all there."""
    now = there._repo.refresh()
    gone = {one.id for one in versions if now.version(one.id).deleted}
    left = [f"#{one.id}" for one in versions if one.id not in gone]
    found = there.verify(left, level="records")
    return gone.union(problem.version for problem in found.problems)
