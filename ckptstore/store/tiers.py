"""The part of the facade that knows other stores by name: replicas, tiers, loads from either."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore.errors import (
    CkptStoreError,
    ColdObjectError,
    ConflictError,
    CorruptObjectError,
    IntegrityError,
    InvalidInputError,
    ObjectNotFoundError,
    StoreNotFoundError,
    TransientStorageError,
    VersionNotFoundError,
)
from ckptstore.format.names import check_replica_name
from ckptstore.model import ReplicaInfo, Version
from ckptstore.repo import Repo
from ckptstore.store.evicting import Evicting
from ckptstore.store.replica_options import PLACE
from ckptstore.store.replica_pool import OpenedReplicas, is_local

if TYPE_CHECKING:
    from ckptstore.backends.base import Backend
    from ckptstore.checkpoint.content import Content
    from ckptstore.config import Options
    from ckptstore.events import ProgressCallback
    from ckptstore.format.manifest import PieceTable
    from ckptstore.maintenance.replicas.fallback import FallThrough, Found, Tier
    from ckptstore.objects.plan import Want
    from ckptstore.store.store import Store

__all__ = ["PREFIX", "Tiers"]

_log = logging.getLogger("ckptstore")

PREFIX = "replica:"
"""What a replica's name stands behind where a location may stand too."""
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


class Tiers(Evicting):
    """What :class:`ckptstore.Store` does with stores that it has names for."""

    _repo: Repo
    _opened: OpenedReplicas
    _told: set[tuple[str, str]]

    if TYPE_CHECKING:

        def resolve(self, ref: str) -> Version:
            """Return the version that a ref names."""

    def add_replica(
        self,
        name: str,
        url: str | os.PathLike[str],
        *,
        create: bool = False,
        **storage_options: Any,  # noqa: ANN401 - passed on to the storage library
    ) -> ReplicaInfo:
        """Give another store a name, by which it is a replica of this one from now on.

        Loads of what is not here (any more) turn to it; see :meth:`ckptstore.Store.load`. Its
        location and its id are noted in the log, for everyone who opens this store; options and
        credentials are not, and count for this object alone. Nothing is copied.

        Parameters
        ----------
        name
            ASCII letters, digits, and ``. _ -``. One that is there is moved to `url`, if the store
            there is the same.
        url
            A path or URL, as for :func:`ckptstore.open`.
        create
            Make the store where there is none.
        storage_options
            As for :func:`ckptstore.open`. In another process give them there, with the place that
            they are for: ``ckptstore.open(url, replicas={name: {"url": ..., ...}})``, or through
            the environment.

        Raises
        ------
        StoreNotFoundError
            There is no store, and `create` is False.
        ConflictError
            It is this store; or the name is another store's; or the store has another name.
        ReadOnlyError, UnsafeBackendError, StorageError
            It could not be opened, or not be noted.
        """
        from ckptstore.catalog.tier_ops import name_replica
        from ckptstore.store.replicating import open_target

        check_replica_name(name)
        with ExitStack() as stack:
            if create:
                made = open_target(
                    url,
                    chunk_bytes=self._repo.superblock.chunk_bytes,
                    dry_run=False,
                    encrypted=self._repo.superblock.encryption is not None,
                    **storage_options,
                )
                store = stack.enter_context(made)
            else:
                store = stack.enter_context(self._opened.open_at(url, storage_options))
            found, store_id = store.url, store.info.store_id
        if store_id == self._repo.superblock.store_id:
            msg = f"{found} is this very store, or a copy of it"
            raise ConflictError(msg, hint="a replica is a store of its own: ckptstore init URL")
        self._repo.log.append_any(
            lambda now: name_replica(now, name=name, url=found, store=store_id)
        )
        if storage_options:
            self._opened.give(name, {**storage_options, PLACE: found})
        return self._repo.catalog.replicas[name]

    def remove_replica(self, name: str) -> None:
        """Forget the name of a replica; nothing is deleted there, nor what is noted of it here.

        Raises
        ------
        NotFoundError
            No replica has it.
        """
        from ckptstore.catalog.tier_ops import unname_replica

        self._repo.log.append_any(lambda now: unname_replica(now, name))

    def replicas(self) -> list[ReplicaInfo]:
        """Return the stores that have a name here, in the order in which they were named."""
        return list(self._repo.refresh().replicas.values())

    def give_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Open a replica with these options from now on, through this object alone.

        Parameters
        ----------
        options
            As for :func:`ckptstore.open`. Never stored. Those that go to a storage library, such as
            ``endpoint_url`` and credentials, only together with ``url``, the place that they are
            for: the log, which others write too, cannot send them elsewhere.

        Raises
        ------
        InvalidInputError
            They do not say for which place they are.
        """
        self._opened.give(check_replica_name(name), options)

    def replica(self, name: str) -> Store:
        """Return a replica, opened; it is closed with this store.

        Raises
        ------
        NotFoundError
            No replica has the name.
        ReplicaChangedError
            At its location there is another store; or the options that were given for it are for
            another location.
        CkptStoreError
            It cannot be opened.
        """
        from ckptstore.catalog.tier_ops import find_replica

        try:
            return self._opened.get(find_replica(self._repo.refresh(), name))
        except StoreNotFoundError as error:
            # A new store there would be another one, and be refused.
            hint = f"is it mounted? Where it is now: ckptstore replica add {name} URL"
            raise StoreNotFoundError(error.message, hint=hint) from error

    def _named(self, text: object) -> Store | None:
        """Return the replica that ``replica:NAME`` names; None for a location."""
        if isinstance(text, str) and text.startswith(PREFIX):
            return self.replica(text.removeprefix(PREFIX))
        return None

    # --- loading ------------------------------------------------------------------------------

    def _content(self, version: Version, *, fall_through: bool = True) -> Content:
        """Return what a version holds; where something is missing here, from a replica."""
        from ckptstore.checkpoint.content import read_content

        named = self._repo.log.catalog.replicas
        try:
            content = read_content(self._repo.manifests.load(version))
        except (VersionNotFoundError, IntegrityError) as error:
            if not fall_through:
                raise
            if not named:
                if not version.replicas:
                    raise
                raise _elsewhere(error, version) from error
            damage = error.message if isinstance(error, IntegrityError) else ""
            return self._fall_through(version, error, told=damage).content()
        if not (named and fall_through):
            return content
        from dataclasses import replace

        return replace(content, read=partial(self._read, version))

    def _lent(self, version: Version, work: Callable[[Found | None], T]) -> T:
        """Return what some work gives: None where the content is here, else a replica's version.

        Replicas are tried in their order until the work succeeds.
        """
        try:
            self._repo.manifests.load(version)
        except (VersionNotFoundError, IntegrityError) as error:
            if not self._repo.log.catalog.replicas:
                if not version.replicas:
                    raise
                raise _elsewhere(error, version) from error
            damage = error.message if isinstance(error, IntegrityError) else ""
            asked = self._fall_through(version, error, told=damage)
        else:
            return work(None)
        for found in asked.candidates():
            asked.tell(found.tier, asked.why.message)
            try:
                return work(found)
            except _MAY_BE_ELSEWHERE as failure:
                asked.note(found.tier, failure)
        raise asked.failure(asked.why)

    def _whole(self, version: Version, error: CkptStoreError) -> Content:
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

        def opened(info: ReplicaInfo) -> Repo:
            return self._opened.get(info).repo

        named = sorted(self._repo.log.catalog.replicas.values(), key=lambda one: not is_local(one))
        return [Tier(info=info, open=partial(opened, info)) for info in named]

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

    def _refill(self, version: Version) -> Version:
        """Bring the content of a version back from a replica; return the version as it is then.

        Does nothing if it is here, or a part of it, or no replica is named.
        """
        if version.level != "record" or not self._repo.log.catalog.replicas:
            return version
        from ckptstore.maintenance.replicas.replicate import ReplicateRequest, replicate

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


def check_given(replicas: object) -> None:
    """Raise unless options of replicas are a mapping."""
    if replicas is not None and not isinstance(replicas, Mapping):
        msg = f"replicas is a mapping of names to options, not {type(replicas).__name__}"
        hint = "replicas={'cold': {'url': 's3://...', 'endpoint_url': ...}}"
        raise InvalidInputError(msg, hint=hint)
