"""The named replicas of one store: found by name, and turned to by loads of what is not here.

What is not here (any more), or is damaged, is read from the nearest replica that has the version.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.errors import (
    CkptStoreError,
    ColdObjectError,
    ConflictError,
    CorruptObjectError,
    IntegrityError,
    ObjectNotFoundError,
    StoreNotFoundError,
    TransientStorageError,
    VersionNotFoundError,
)
from ckptstore.format.names import check_replica_name
from ckptstore.model import ReplicaInfo, Version
from ckptstore.replicas.options import ReplicaOptions, open_place
from ckptstore.replicas.places import PLACE, PREFIX, is_local
from ckptstore.replicas.pool import OpenedReplicas
from ckptstore.replicas.targets import open_target
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.checkpoint.content import Content
    from ckptstore.config import Options
    from ckptstore.events import ProgressCallback
    from ckptstore.format.manifest import PieceTable
    from ckptstore.maintenance.replicas.fallback import FallThrough, Found, Tier
    from ckptstore.objects.plan import Want

_log = logging.getLogger("ckptstore")

T = TypeVar("T")

_MAY_BE_ELSEWHERE = (
    ColdObjectError,
    IntegrityError,
    ObjectNotFoundError,
    TransientStorageError,
)
"""Of what one replica does not give another may have it."""
# Versions and replicas of which it is remembered that it was told. Source: 100 bytes each.
_TOLD_MAX = 10_000


class Replicas:
    """The replicas that one open store has names for. Any thread may use it.

    Parameters
    ----------
    repo
        The store.
    given
        Options, or open stores, by the name of a replica.
    """

    def __init__(self, repo: Repo, given: ReplicaOptions | None = None) -> None:
        self._repo = repo
        self.pool = OpenedReplicas(repo, given)
        """What is open of them."""
        self._told: set[tuple[str, str]] = set()

    def add(
        self,
        name: str,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any],
        *,
        create: bool,
    ) -> ReplicaInfo:
        """Give another store a name; see :meth:`ckptstore.Store.add_replica`."""
        from ckptstore.catalog.tier_ops import name_replica

        check_replica_name(name)
        with ExitStack() as stack:
            if create:
                made = open_target(self._repo, url, dry_run=False, **storage_options)
                store = stack.enter_context(made)
            else:
                opened = open_place(url, self.pool.options(storage_options))
                store = stack.enter_context(opened)
            found, store_id = store.url, store.superblock.store_id
        if store_id == self._repo.superblock.store_id:
            msg = f"{found} is this very store, or a copy of it"
            raise ConflictError(msg, hint="a replica is a store of its own: ckptstore init URL")
        self._repo.log.append_any(
            lambda now: name_replica(now, name=name, url=found, store=store_id)
        )
        if storage_options:
            self.pool.give(name, {**storage_options, PLACE: found})
        return self._repo.catalog.replicas[name]

    def info(self, name: str) -> ReplicaInfo:
        """Return a replica by its name, as the log has it now; raises NotFoundError."""
        from ckptstore.catalog.tier_ops import find_replica

        return find_replica(self._repo.refresh(), name)

    def find(self, name: str) -> Repo:
        """Return a replica, opened; see :meth:`ckptstore.Store.replica`."""
        try:
            return self.pool.get(self.info(name))
        except StoreNotFoundError as error:
            # A new store there would be another one, and be refused.
            hint = f"is it mounted? Where it is now: ckptstore replica add {name} URL"
            raise StoreNotFoundError(error.message, hint=hint) from error

    def content(self, version: Version, *, fall_through: bool = True) -> Content:
        """Return what a version holds; where something is missing here, from a replica."""
        from ckptstore.checkpoint.content import read_content

        try:
            content = read_content(self._repo.manifests.load(version))
        except (VersionNotFoundError, IntegrityError) as error:
            if not fall_through:
                raise
            asked = self._instead(version, error)
            if asked is None:
                raise
            return asked.content()
        if not (self._repo.log.catalog.replicas and fall_through):
            return content
        return replace(content, read=partial(self._read, version))

    def lent(self, version: Version, work: Callable[[Found | None], T]) -> T:
        """Return what some work gives: None where the content is here, else a replica's version.

        Replicas are tried in their order until the work succeeds.
        """
        try:
            self._repo.manifests.load(version)
        except (VersionNotFoundError, IntegrityError) as error:
            asked = self._instead(version, error)
            if asked is None:
                raise
        else:
            return work(None)
        for found in asked.candidates():
            asked.tell(found.tier, asked.why.message)
            try:
                return work(found)
            except _MAY_BE_ELSEWHERE as failure:
                asked.note(found.tier, failure)
        raise asked.failure(asked.why)

    def _instead(self, version: Version, error: CkptStoreError) -> FallThrough | None:
        """Return the replicas to ask for a version whose content is not here; None without any.

        The caller then raises `error` itself: a frame that raises its own argument is in a circle
        with it, which keeps the memory of a large manifest that was refused.

        Raises
        ------
        CkptStoreError
            `error` with a hint that names the other stores that have the version.
        """
        if self._repo.log.catalog.replicas:
            damage = error.message if isinstance(error, IntegrityError) else ""
            return self._fall_through(version, error, told=damage)
        if not version.replicas:
            return None
        raise _elsewhere(error, version) from error

    def whole(self, version: Version, error: CkptStoreError) -> Content:
        """Return all of a version of which a part is kept here."""
        msg = f"{error.message}: only the {version.level} of {_said(version)} are kept here"
        found = type(error)(msg, hint=error.hint)
        return self._fall_through(version, found, whole=True).content()

    def _read(
        self,
        version: Version,
        table: PieceTable,
        wants: Sequence[Want],
        *,
        backend: Backend,
        options: Options,
        progress: ProgressCallback,
    ) -> None:
        """Read pieces of a version that is here; those that are lost or cold, from a replica."""
        from ckptstore.objects.piece_reader import read_pieces

        failed: list[tuple[Want, CkptStoreError]] = []
        try:
            read_pieces(
                table,
                wants,
                backend=backend,
                options=options,
                progress=progress,
                on_failure=lambda want, error: failed.append((want, error)),
            )
        except ColdObjectError as cold:
            failed = [(want, cold) for want in wants]
        if not failed:
            return
        from ckptstore.maintenance.replicas.fallback import read_lost

        first = failed[0][1]
        what = f"{len(failed)} pieces are lost here, the first: {first.message}"
        damage = "" if isinstance(first, ColdObjectError) else what
        owner = self._fall_through(version, first, told=damage)
        lost = [want for want, _ in failed]
        read_lost(owner, table, wants, lost, options=options, progress=progress)

    def _fall_through(
        self, version: Version, error: CkptStoreError, *, whole: bool = False, told: str = ""
    ) -> FallThrough:
        from ckptstore.maintenance.replicas.fallback import FallThrough

        return FallThrough(
            repo=self._repo,
            version=version,
            tiers=self._in_order(version),
            why=error,
            whole=whole,
            tell=partial(self._tell, version, told),
        )

    def _in_order(self, version: Version) -> list[Tier]:
        """Return the replicas to ask: local ones first, then in the order of their naming."""
        from ckptstore.maintenance.replicas.fallback import Tier

        named = sorted(self._repo.log.catalog.replicas.values(), key=lambda one: not is_local(one))
        return [Tier(info=info, open=partial(self.pool.get, info)) for info in named]

    def _tell(self, version: Version, damage: str, tier: Tier, why: str) -> None:
        """Say, once for a version and a replica, where bytes come from."""
        key = (version.id, tier.info.name)
        if key in self._told:
            return
        if len(self._told) >= _TOLD_MAX:
            self._told.clear()
        self._told.add(key)
        if damage:
            what = "%s is damaged and read from %s where needed: %s; mend it: %s"
            mend = f"ckptstore repair --from {PREFIX}{tier.info.name}"
            _log.warning(what, _said(version), tier, damage, mend)
        else:
            _log.info("%s is read from %s: %s", _said(version), tier, why)

    def refill(self, version: Version) -> Version:
        """Bring the content of a version back from a replica; return the version as it is then.

        Does nothing if it is here, or a part of it, or no replica is named.
        """
        if version.level != "record" or not self._repo.log.catalog.replicas:
            return version
        from ckptstore.maintenance.replicas.replicate import replicate
        from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest

        msg = f"only the record of {_said(version)} is kept"
        asked = self._fall_through(version, VersionNotFoundError(msg))
        self._repo.check_writable()
        for found in asked.candidates():
            try:
                wish = ReplicateRequest(again=frozenset({version.id}))
                report = replicate(found.repo, self._repo, [found.version], wish)
            except CkptStoreError as error:
                asked.note(found.tier, error)
                continue
            now = self._repo.catalog.version(version.id)
            if now.level != "record":
                _log.info("%s was brought back from %s", _said(version), found.tier)
                return now
            message = report.failures[0].message if report.failures else "it let it go meanwhile"
            hint = f"mend this store first: ckptstore repair --from {PREFIX}{found.tier.info.name}"
            asked.note(found.tier, CorruptObjectError(message, hint=hint))
        raise asked.failure(asked.why)


def _said(version: Version) -> str:
    return f"{version.run}@{version.step} (#{version.id[:8]})"


def _elsewhere(error: CkptStoreError, version: Version) -> CkptStoreError:
    """Return the error of a version that other stores have, though none has a name here."""
    others = ", ".join(one[:8] for one in version.replicas)
    hint = f"the stores {others} have it; name one: ckptstore replica add NAME URL"
    return type(error)(error.message, hint=hint)
