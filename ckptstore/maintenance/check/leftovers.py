"""Objects that no version needs: not damage, but worth knowing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptstore.backends.base import ObjectInfo
from ckptstore.errors import CkptStoreError, CorruptObjectError, StorageError
from ckptstore.format.keys import (
    COMMITS_PREFIX,
    MANIFESTS_PREFIX,
    OBJECT_PREFIXES,
    PACKS_PREFIX,
    SNAPSHOTS_PREFIX,
    commit_number,
    pack_id,
    pack_key,
    snapshot_number,
    version_id_of,
)
from ckptstore.maintenance.check.integrity_scan import Survey
from ckptstore.maintenance.check.lost_log import check_log_is_whole
from ckptstore.model import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One object that no version needs."""

    kind: Literal["condemned", "orphan", "unknown"]
    """Waiting to be swept; named by no version (an upload in flight, one that was given up, or
    superseded); or no object of a store at all."""
    key: str
    size_bytes: int


def find_leftovers(survey: Survey) -> tuple[Notice, ...]:
    """Return the objects below the store's prefixes that no version names, in order of keys.

    Lists everything. The manifests of deleted versions are read if need be, since what they name
    is not left over: they can be undeleted. Where a manifest cannot be read, packs that only it
    names are reported; a collection must know better, and does.
    """
    repo = survey.repo
    # A save that is under way when this lists, and commits before this looks, is no orphan.
    infos = [info for prefix in OBJECT_PREFIXES for info in repo.backend.list(prefix)]
    catalog = repo.refresh()
    live = list(catalog.versions())
    named = {version.manifest_key for version in live}
    named.update(pack_key(pack) for pack in survey.packs)
    left = [info for info in infos if info.key not in named and not _of_the_log(info.key)]
    if _objects(left):
        late = [version for version in live if version.id not in survey.seen]
        for version in (*late, *catalog.versions(deleted=True)):
            named.update(_names(survey, version))
    return tuple(
        Notice(kind=_kind(info.key, catalog.condemned), key=info.key, size_bytes=info.size_bytes)
        for info in left
        if info.key not in named
    )


def cut_short(survey: Survey, notices: Sequence[Notice]) -> CorruptObjectError | None:
    """Return what is wrong if what lies in the store says that the log lost its end, or all."""
    strays = [n.key for n in notices if n.kind == "orphan" and version_id_of(n.key) is not None]
    try:
        check_log_is_whole(survey.repo, survey.repo.catalog, strays)
    except CorruptObjectError as error:
        return error
    return None


def _of_the_log(key: str) -> bool:
    if key.startswith(COMMITS_PREFIX):
        return commit_number(key) is not None
    return key.startswith(SNAPSHOTS_PREFIX) and snapshot_number(key) is not None


def _objects(infos: list[ObjectInfo]) -> bool:
    return any(info.key.startswith((PACKS_PREFIX, MANIFESTS_PREFIX)) for info in infos)


def _names(survey: Survey, version: Version) -> Iterator[str]:
    """Yield the keys that a version names, as far as its manifest can be read."""
    if version.level == "record":
        return
    yield version.manifest_key
    try:
        yield from map(pack_key, survey.repo.manifests.load(version).pieces.packs)
    except StorageError:
        raise
    except CkptStoreError:
        return  # its objects were swept, or it is damaged and reported as such


def _kind(key: str, condemned: object) -> Literal["condemned", "orphan", "unknown"]:
    if isinstance(condemned, dict) and key in condemned:
        return "condemned"
    known = pack_id(key) is not None or version_id_of(key) is not None
    return "orphan" if known else "unknown"
