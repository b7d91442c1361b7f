"""The named replicas of one store: opened once, and turned to by loads of content that is not here.

What is not here (any more), or is damaged, is read from the nearest replica that has the version.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckptstore import errors
from ckptstore.catalog.replica_ops import find_replica, name_replica
from ckptstore.format.names import check_replica_name
from ckptstore.model import ReplicaInfo, Version
from ckptstore.replicas import options as places
from ckptstore.replicas.options import PLACE, PREFIX, ReplicaOptions
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.checkpoint.content import Content
    from ckptstore.maintenance.replicas.fallback import FallThrough, Found, Tier

_log = logging.getLogger("ckptstore")

T = TypeVar("T")

_MAY_BE_ELSEWHERE = (
    errors.ColdObjectError,
    errors.IntegrityError,
    errors.ObjectNotFoundError,
    errors.TransientStorageError,
)
"""Of what one replica does not give another may have it."""
# Pairs of version and replica that were told already. Source: 100 bytes each.
_TOLD_MAX = 10_000


@dataclass(slots=True)
class _Slot:
    """One replica: at most one thread opens it at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    repo: Repo | None = None
    own: bool = False
    failure: errors.CkptStoreError | None = None
    failed_at: float = 0.0


class Replicas:
    """The replicas that one open store has names for. Any thread may use it.

    Parameters
    ----------
    repo
        The store.
    given
        Options, or open stores, which stay their owner's, by the name of a replica. Never stored,
        never shown.
    """

    def __init__(self, repo: Repo, given: ReplicaOptions | None = None) -> None:
        self._repo = repo
        self.given = dict(given or {})
        """Options, or open stores, by name; :meth:`give` adds to them."""
        for name, options in self.given.items():
            check_replica_name(name)
            if not isinstance(options, Mapping) and not hasattr(options, "repo"):
                msg = f"the options of the replica {name!r} are no mapping"
                hint = "replicas={'cold': {'url': 's3://...', 'endpoint_url': ...}}"
                raise errors.InvalidInputError(msg, hint=hint)
            if isinstance(options, Mapping):
                places.check_bound(name, options)
        self._slots: dict[str, _Slot] = {}
        self._pid = os.getpid()
        self._told: set[tuple[str, str]] = set()
        self._content: Content | None = None  # of the version that was asked for last

    def give(self, name: str, options: Mapping[str, Any]) -> None:
        """Remember options of a replica, for this process.

        Raises
        ------
        InvalidInputError
            They go to a storage, and do not say to which; see
            :mod:`ckptstore.replicas.options`.
        """
        places.check_bound(name, options)
        self.given[name] = dict(options)

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
            except errors.CkptStoreError as error:
                slot.failure, slot.failed_at = error, self._repo.environment.monotonic()
                raise
            return slot.repo

    def _slot(self, key: str) -> _Slot:
        if self._pid != os.getpid():  # a forked child: its locks and connections are its own
            self._pid, self._slots = os.getpid(), {}
        return self._slots.setdefault(key, _Slot())

    def _open(self, info: ReplicaInfo) -> tuple[Repo, bool]:
        given = self.given.get(info.name, {})
        if not isinstance(given, Mapping):
            check_same(given.repo, info)
            return given.repo, False
        places.check_meant(info, given)
        repo = places.open_place(info.url, self.options(given))
        try:
            check_same(repo, info)
        except errors.CkptStoreError:
            repo.close()
            raise
        return repo, True

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a replica: the limits of this store unless its own say else.

        Parameters
        ----------
        given
            Options of the replica; the place that they are for is left out.
        """
        found = {"read_only": self._repo.options.read_only, **places.inherited(self._repo), **given}
        found.pop(PLACE, None)
        return found

    def close(self, close: Callable[[Repo], None] = Repo.close) -> None:
        """Close what was opened here, each by `close`, even if that raises for one; idempotent."""
        slots, self._slots = self._slots, {}
        if self._pid != os.getpid():
            return
        with ExitStack() as closing:
            for slot in slots.values():
                if slot.repo is not None and slot.own:
                    closing.callback(close, slot.repo)

    def add(
        self, name: str, url: str | os.PathLike[str], given: Mapping[str, Any], *, create: bool
    ) -> ReplicaInfo:
        """Give another store a name; see :meth:`ckptstore.Store.add_replica`."""
        check_replica_name(name)
        other: AbstractContextManager[Repo]
        if create:
            other = places.open_target(self._repo, url, dry_run=False, **given)
        else:
            other = places.open_place(url, self.options(given))
        with other as store:
            at, store_id = store.url, store.superblock.store_id
        if store_id == self._repo.superblock.store_id:
            msg = f"{at} is this very store, or a copy of it"
            hint = "a replica is a store of its own: ckptstore init URL"
            raise errors.ConflictError(msg, hint=hint)
        self._repo.log.append_any(lambda now: name_replica(now, name=name, url=at, store=store_id))
        if given:
            self.give(name, {**given, PLACE: at})
        return self._repo.catalog.replicas[name]

    def info(self, name: str) -> ReplicaInfo:
        """Return a replica by its name, as the log has it now; raises NotFoundError."""
        return find_replica(self._repo.refresh(), name)

    def find(self, name: str) -> Repo:
        """Return a replica, opened; see :meth:`ckptstore.Store.replica`."""
        try:
            return self.get(self.info(name))
        except errors.StoreNotFoundError as error:
            # A new store there would be another one, and be refused.
            hint = f"is it mounted? Where it is now: ckptstore replica add {name} URL"
            raise errors.StoreNotFoundError(error.message, hint=hint) from error

    def content(self, version: Version, *, fall_through: bool = True) -> Content:
        """Return the content of a version; where something is missing here, from a replica."""
        from ckptstore.checkpoint.content import read_content

        try:
            manifest = self._repo.manifests.load(version)
            content = self._content
            if content is None or content.manifest is not manifest:
                content = self._content = read_content(manifest)
        except (errors.VersionNotFoundError, errors.IntegrityError) as error:
            asked = self._instead(version, error) if fall_through else None
            if asked is None:
                raise
            return asked.content()
        if not (self._repo.log.catalog.replicas and fall_through):
            return content
        from ckptstore.maintenance.replicas.fallback import read_falling

        return replace(content, read=partial(read_falling, partial(self._fall_through, version)))

    def lent(self, version: Version, work: Callable[[Found | None], T]) -> T:
        """Return the result of some work, given None where the content is here, else a replica's.

        Replicas are tried in their order until the work succeeds.
        """
        try:
            self._repo.manifests.load(version)
        except (errors.VersionNotFoundError, errors.IntegrityError) as error:
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

    def _instead(self, version: Version, error: errors.CkptStoreError) -> FallThrough | None:
        """Return the replicas to ask for a version whose content is not here; None without any.

        The caller then raises `error` itself: a frame that raises its own argument is in a circle
        with it, which keeps the memory of a large manifest that was refused.

        Raises
        ------
        CkptStoreError
            `error` with a hint that names the other stores that have the version.
        """
        if self._repo.log.catalog.replicas:
            damage = error.message if isinstance(error, errors.IntegrityError) else ""
            return self._fall_through(version, error, told=damage)
        if not version.replicas:
            return None
        others = ", ".join(one[:8] for one in version.replicas)
        hint = f"the stores {others} have it; name one: ckptstore replica add NAME URL"
        raise type(error)(error.message, hint=hint) from error

    def whole(self, version: Version, error: errors.CkptStoreError) -> Content:
        """Return the whole content of a version that is kept here in part."""
        msg = f"{error.message}: only the {version.level} of {version.label} are kept here"
        found = type(error)(msg, hint=error.hint)
        return self._fall_through(version, found, whole=True).content()

    def _fall_through(
        self, version: Version, error: errors.CkptStoreError, *, whole: bool = False, told: str = ""
    ) -> FallThrough:
        """Return the replicas to ask: local ones first, then in the order of their naming."""
        from ckptstore.maintenance.replicas.fallback import FallThrough, Tier

        known = self._repo.log.catalog.replicas.values()
        named = sorted(known, key=lambda one: not places.is_local(one))
        tiers = [Tier(info=info, open=partial(self.get, info)) for info in named]
        tell = partial(self._tell, version, told)
        return FallThrough(self._repo, version, tiers, error, tell, whole=whole)

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
            _log.warning(what, version.label, tier, damage, mend)
        else:
            _log.info("%s is read from %s: %s", version.label, tier, why)

    def refill(self, version: Version) -> Version:
        """Bring the content of a version back from a replica; return the version as it is then.

        Does nothing if it is here, or a part of it, or no replica is named.
        """
        if version.level != "record" or not self._repo.log.catalog.replicas:
            return version
        from ckptstore.maintenance.replicas.replicate import replicate
        from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest

        msg = f"only the record of {version.label} is kept"
        asked = self._fall_through(version, errors.VersionNotFoundError(msg))
        self._repo.check_writable()
        for found in asked.candidates():
            try:
                wish = ReplicateRequest(again=frozenset({version.id}))
                report = replicate(found.repo, self._repo, [found.version], wish)
            except errors.CkptStoreError as error:
                asked.note(found.tier, error)
                continue
            now = self._repo.catalog.version(version.id)
            if now.level != "record":
                _log.info("%s was brought back from %s", version.label, found.tier)
                return now
            message, hint = "it let it go meanwhile", "try again"
            if version.id in report.copied:
                message = "it came, and was evicted here again meanwhile"
            elif report.failures:
                message = report.failures[0].message
                hint = f"mend this store: ckptstore repair --from {PREFIX}{found.tier.info.name}"
            asked.note(found.tier, errors.CorruptObjectError(message, hint=hint))
        raise asked.failure(asked.why)


def check_same(repo: Repo, info: ReplicaInfo) -> None:
    """Raise ReplicaChangedError unless a store is the one that was named."""
    found = repo.superblock.store_id
    if found != info.store:
        here, wanted = found[:8], info.store[:8]
        msg = f"at {repo.url} there is the store {here}; the replica {info.name!r} is {wanted}"
        hint = f"if that is meant: ckptstore replica rm {info.name}, then replica add"
        raise errors.ReplicaChangedError(msg, hint=hint)
