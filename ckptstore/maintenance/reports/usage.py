"""Bytes that a store takes, by run, version and role; and what its replicas lack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptstore.catalog.catalog import Catalog
from ckptstore.format.keys import KEYS_PREFIX, OBJECT_PREFIXES, REFERENCES_PREFIX, STORE_KEY
from ckptstore.model import ReplicaInfo, RoleBytes, Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectTotals:
    """The objects of one kind."""

    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreStats(Shown):
    """A store as a whole."""

    runs_count: int
    versions_count: int
    commits_count: int
    total: RoleBytes
    """Over all versions: bytes in memory, new ones, and these as stored."""
    roles: dict[str, RoleBytes] = field(default_factory=dict)
    objects: dict[str, ObjectTotals] = field(default_factory=dict)
    """By kind (``packs``, ``manifests``, ``commits``, ``snapshots``, ``store.json``), as listed;
    none on storage that cannot list, such as a web server."""

    def _summary(self) -> HtmlTable:
        every = {**self.roles, "total": self.total}
        rows = [(n, *map(bytes_text, (x.logical, x.new, x.stored))) for n, x in every.items()]
        title = f"{self.runs_count} runs, {self.versions_count} versions: "
        title += f"{rows[-1][1]} in memory, {rows[-1][3]} stored"
        return HtmlTable(title=title, columns=("ROLE", "SIZE", "NEW", "STORED"), rows=rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects that were listed."""
        return sum(totals.size_bytes for totals in self.objects.values())


def sum_roles(parts: Iterable[RoleBytes]) -> RoleBytes:
    """Return the sum of byte counts."""
    logical = new = stored = 0
    for part in parts:
        logical, new, stored = logical + part.logical, new + part.new, stored + part.stored
    return RoleBytes(logical=logical, new=new, stored=stored)


def by_role(versions: Iterable[Version]) -> dict[str, RoleBytes]:
    """Return the sum of the byte counts of each role over some versions."""
    found: dict[str, list[RoleBytes]] = {}
    for version in versions:
        for role, part in version.roles.items():
            found.setdefault(role, []).append(part)
    return {role: sum_roles(parts) for role, parts in found.items()}


def store_stats(repo: Repo) -> StoreStats:
    """Return the totals of a store; lists every object, where the storage can.

    Raises
    ------
    StorageError
        The storage failed.
    """
    catalog = repo.refresh()
    versions = list(catalog.versions())
    roles = by_role(versions)
    objects = {}
    keys = () if repo.superblock.encryption is None else (KEYS_PREFIX,)
    listed = (STORE_KEY, *OBJECT_PREFIXES, REFERENCES_PREFIX, *keys)
    for prefix in listed if repo.backend.capabilities.lists else ():
        sizes = [info.size_bytes for info in repo.backend.list(prefix)]
        objects[prefix.rstrip("/")] = ObjectTotals(count=len(sizes), size_bytes=sum(sizes))
    return StoreStats(
        runs_count=len(catalog.runs()),
        versions_count=len(versions),
        commits_count=catalog.number,
        total=sum_roles(roles.values()),
        roles=roles,
        objects=objects,
    )


@dataclass(slots=True, kw_only=True)
class ReplicaLag:
    """Counts of the versions that one replica has and lacks."""

    replica: ReplicaInfo
    versions_count: int = 0
    missing_count: int = 0
    """Versions that can be loaded here, and that it does not have."""
    missing_bytes: int = 0
    """Their stored bytes here, as counted when they were saved."""
    oldest: Version | None = None
    """The first of them that was saved."""


def replica_lags(catalog: Catalog) -> list[ReplicaLag]:
    """Return the replicas in the order of their naming."""
    found = [ReplicaLag(replica=one) for one in catalog.replicas.values()]
    for version in catalog.versions() if found else ():
        for lag in found:
            if lag.replica.store in version.replicas:
                lag.versions_count += 1
            elif version.level != "record":
                lag.oldest = lag.oldest or version
                lag.missing_count += 1
                lag.missing_bytes += sum_roles(version.roles.values()).stored
    return found
