"""Is the log whole? What lies in a store without a commit can tell that commits were lost.

A log that lost commits in its middle shows a gap. One that lost its newest, or all, looks like a
shorter one: to it, the versions of the lost commits are nobody's objects. A collection that took
it at its word would delete them, so what cannot come from saves that died is refused.

What tells the two apart is when the objects came. A save that dies leaves its manifest between the
commits of others, or of its successor; lost commits leave theirs in one stretch of time without a
single commit. Both times are the storage's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import CorruptObjectError, FormatError, IntegrityError, NotFoundError
from ckptstore.format.keys import (
    COMMITS_PREFIX,
    MANIFESTS_PREFIX,
    SNAPSHOTS_PREFIX,
    snapshot_number,
)
from ckptstore.format.manifest import outline
from ckptstore.repo import Repo


def check_log_is_whole(
    repo: Repo, catalog: Catalog, strays: Collection[str], *, in_flight: bool = False
) -> None:
    """Return if nothing says that commits were lost.

    Parameters
    ----------
    catalog
        The newest.
    strays
        Keys of manifests that no commit names and that are no save under way. A save leaves one
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
    numbers = (snapshot_number(info.key) for info in repo.backend.list(SNAPSHOTS_PREFIX))
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
    msg = f"commits seem to be lost: {what}"
    raise CorruptObjectError(
        msg,
        hint="restore commits/ from a backup before anything is saved or collected; without one, "
        "ckptstore replicate brings the versions from a replica",
    )


def _unknown(repo: Repo, strays: Collection[str]) -> list[str]:
    """Return the manifests that are of no version that the log knows by now, or cannot be read."""
    catalog = repo.refresh()
    found = []
    for key in strays:
        try:
            data = repo.backend.get(key, bytes_max=limits.MANIFEST_STORED_BYTES_MAX)
            known = catalog.has_version(outline(data, where=key)[0])
        except NotFoundError:
            continue  # another collection was faster
        except (IntegrityError, FormatError):
            known = False
        if not known:
            found.append(key)
    return found


def _together(repo: Repo, keys: Collection[str]) -> int:
    """Return how many of some manifests came, at most, between one commit and the next."""
    commits = sorted(info.modified_at for info in repo.backend.list(COMMITS_PREFIX))
    infos = repo.backend.list(MANIFESTS_PREFIX)
    times = {info.key: info.modified_at for info in infos}
    gaps = Counter(bisect_right(commits, times[key]) for key in keys if key in times)
    return max(gaps.values(), default=0)
