"""Objects that no version needs: no damage, but they can tell that the log lost commits.

A log that lost commits in its middle shows a gap. One that lost its newest, or all, looks like a
shorter one: to it, the versions of the lost commits are nobody's objects. A collection that
believed it would delete them, so it refuses manifests that cannot come from saves that died.

The two differ in when the objects came. A save that dies leaves its manifest between the commits of
others, or of its successor; lost commits leave theirs in one stretch of time without a single
commit. Both times are the storage's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptstore import errors, limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.format import keys
from ckptstore.format.manifest import outline
from ckptstore.model import Version
from ckptstore.repo import Repo

if TYPE_CHECKING:
    from ckptstore.maintenance.check.integrity_scan import Survey


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

    Lists everything. The manifests of deleted versions are read if need be, since the objects that
    they name are not left over: they can be undeleted. Where a manifest cannot be read, packs that
    only it names are reported; a collection must know better, and does.
    """
    repo = survey.repo
    # A save that is under way when this lists, and commits before this looks, is no orphan.
    infos = [info for prefix in keys.OBJECT_PREFIXES for info in repo.backend.list(prefix)]
    catalog = repo.refresh()
    live = list(catalog.versions())
    named = {version.manifest_key for version in live}
    named.update(map(keys.pack_key, survey.packs))
    left = [
        info
        for info in infos
        if info.key not in named
        and keys.commit_number(info.key) is None
        and keys.snapshot_number(info.key) is None
    ]
    if any(info.key.startswith((keys.PACKS_PREFIX, keys.MANIFESTS_PREFIX)) for info in left):
        late = [version for version in live if version.id not in survey.seen]
        for version in (*late, *catalog.versions(deleted=True)):
            named.update(_names(repo, version))
    return tuple(
        Notice(kind=_kind(info.key, catalog.condemned), key=info.key, size_bytes=info.size_bytes)
        for info in left
        if info.key not in named
    )


def _names(repo: Repo, version: Version) -> Iterator[str]:
    """Yield the keys that a version names, as far as its manifest can be read."""
    if version.level == "record":
        return
    yield version.manifest_key
    try:
        yield from map(keys.pack_key, repo.manifests.load(version).pieces.packs)
    except errors.StorageError:
        raise
    except errors.CkptStoreError:
        return  # its objects were swept, or it is damaged and reported as such


def _kind(key: str, condemned: Collection[str]) -> Literal["condemned", "orphan", "unknown"]:
    if key in condemned:
        return "condemned"
    known = keys.pack_id(key) is not None or keys.version_id_of(key) is not None
    return "orphan" if known else "unknown"


def report_lost_commits(
    survey: Survey, notices: Sequence[Notice]
) -> errors.CorruptObjectError | None:
    """Report and return the damage of the log if leftovers say that it lost its end, or all."""
    strays = [
        n.key for n in notices if n.kind == "orphan" and keys.version_id_of(n.key) is not None
    ]
    try:
        check_log_is_whole(survey.repo, survey.repo.catalog, strays)
    except errors.CorruptObjectError as error:
        survey.found(error, None)
        return error
    return None


def check_log_is_whole(
    repo: Repo, catalog: Catalog, strays: Collection[str], *, in_flight: bool = False
) -> None:
    """Check that no object says that commits were lost.

    Parameters
    ----------
    catalog
        The newest.
    strays
        Keys of unreferenced manifests that do not belong to a running save. A save leaves one
        behind only if it dies in the moment between its manifest and its commit. A repack may leave
        hundreds, but of versions that the log knows: where there are many, they are read.
    in_flight
        Some of them may be of saves under way after all: a first save is no lost log.

    Raises
    ------
    CorruptObjectError
        A snapshot is newer than the log; there is no commit at all, but a manifest; or many stray
        manifests (``STRAY_MANIFESTS_MAX``, and a tenth of the live versions) came between two
        commits that follow each other, or after the last.
    """
    numbers = (keys.snapshot_number(info.key) for info in repo.backend.list(keys.SNAPSHOTS_PREFIX))
    newest = max((number for number in numbers if number is not None), default=0)
    if newest > catalog.number and newest > repo.refresh().number:
        what = (
            f"the catalog snapshot {newest} is newer than the log, which ends at {catalog.number}"
        )
    elif not catalog.number and strays and not in_flight:
        what = f"there is no commit, but {len(strays)} manifests of versions"
    else:
        bound = max(limits.STRAY_MANIFESTS_MAX, catalog.versions_count // 10)
        unknown = _unknown(repo, strays) if len(strays) > bound else ()
        together = _together(repo, unknown) if len(unknown) > bound else 0
        if together <= bound:
            return
        what = f"{together} manifests are of versions that no commit names, with no commit between"
    raise errors.CorruptObjectError(
        f"commits seem to be lost: {what}",
        hint="restore commits/ from a backup before anything is saved or collected; without one, "
        "ckptstore replicate brings the versions from a replica",
    )


def _unknown(repo: Repo, strays: Collection[str]) -> list[str]:
    """Return the manifests that are of no version in the newest log, or cannot be read."""
    catalog = repo.refresh()
    found = []
    for key in strays:
        try:
            data = repo.backend.get(key, bytes_max=limits.MANIFEST_STORED_BYTES_MAX)
            known = catalog.has_version(outline(data, where=key)[0])
        except errors.NotFoundError:
            continue  # another collection was faster
        except (errors.IntegrityError, errors.FormatError):
            known = False
        if not known:
            found.append(key)
    return found


def _together(repo: Repo, unknown: Collection[str]) -> int:
    """Return how many of some manifests came, at most, between one commit and the next."""
    commits = sorted(info.modified_at for info in repo.backend.list(keys.COMMITS_PREFIX))
    times = {info.key: info.modified_at for info in repo.backend.list(keys.MANIFESTS_PREFIX)}
    gaps = Counter(bisect_right(commits, times[key]) for key in unknown if key in times)
    return max(gaps.values(), default=0)
