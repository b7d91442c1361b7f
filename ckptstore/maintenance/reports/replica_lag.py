"""Lag of the named replicas behind their store, from the catalog alone."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.catalog.catalog import Catalog
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import ReplicaInfo, Version


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
