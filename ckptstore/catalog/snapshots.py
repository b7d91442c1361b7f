"""Catalog snapshots in a store: writes, reads and drops them.

A snapshot saves reading the log from its beginning and nothing else: a damaged one is skipped
with a warning, one that cannot be written or dropped is only logged. None of this can change a
result, because a snapshot counts only if the log's own commit of its number has its digest.

Who writes: the one whose commit has a number that is due, which needs no agreement. Should that
one die, the next to commit once ``SNAPSHOT_OVERDUE_PERIODS`` have passed does it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import CkptStoreError, CorruptObjectError, ObjectExistsError
from ckptstore.format.keys import SNAPSHOTS_PREFIX, snapshot_key, snapshot_number
from ckptstore.format.snapshot import decode_snapshot, encode_snapshot

_log = logging.getLogger("ckptstore")


def period(number: int) -> int:
    """Return the number of commits between two snapshots at this length of the log."""
    commits = limits.SNAPSHOT_COMMITS_MIN
    while 2 * commits <= number * limits.SNAPSHOT_GROWTH:
        commits *= 2
    return commits


def due(number: int, last: int) -> bool:
    """Return whether the writer of commit `number` writes a snapshot.

    Parameters
    ----------
    last
        Number of the newest snapshot that the writer knows of; 0 for none.
    """
    commits = period(number)
    return number % commits == 0 or number - last >= limits.SNAPSHOT_OVERDUE_PERIODS * commits


def read_newest_first(backend: Backend, numbers: Iterable[int]) -> Iterator[Catalog]:
    """Yield the catalogs of the newest of some snapshots that can be read, at most a few.

    What cannot be read is skipped with a warning of the logger ``ckptstore``. One read for each
    catalog that is taken.
    """
    for number in sorted(numbers, reverse=True)[: limits.SNAPSHOT_TRIES_MAX]:
        try:
            catalog = read_one(backend, number)
        except CkptStoreError as error:
            _log.warning("skipped a catalog snapshot, the log is read instead: %s", error)
            continue
        yield catalog


def read_one(backend: Backend, number: int) -> Catalog:
    """Return the catalog in one snapshot.

    Raises
    ------
    CorruptObjectError
        It is damaged, or of another number than its name says.
    ObjectNotFoundError, StorageError
        It cannot be read.
    """
    key = snapshot_key(number)
    data = backend.get(key, bytes_max=limits.SNAPSHOT_STORED_BYTES_MAX)
    body = decode_snapshot(data, where=key)
    if body.number != number:
        raise CorruptObjectError(f"{key} holds the catalog after commit {body.number}")
    return Catalog.from_snapshot(body, where=key)


def warn_unconfirmed(number: int) -> None:
    """Log that a snapshot is sound in itself, but not of this log."""
    what = "skipped the catalog snapshot %s: the log's commit %d has another digest, or is missing"
    _log.warning(what, snapshot_key(number), number)


def write(backend: Backend, catalog: Catalog, *, single_writer: bool = False) -> bool:
    """Write a snapshot of `catalog` and drop those that it makes superfluous; never raises.

    Returns
    -------
    bool
        True if the snapshot is there now.
    """
    key = snapshot_key(catalog.number)
    try:
        data = encode_snapshot(catalog.to_snapshot())
        if single_writer:
            backend.put(key, data)
        else:
            backend.put_if_absent(key, data)
    except ObjectExistsError:
        return True
    except CkptStoreError as error:
        _log.warning("could not write the catalog snapshot %s: %s", key, error)
        return False
    _prune(backend, catalog.number)
    return True


def newest_number(backend: Backend, number_max: int) -> int:
    """Return the number of the newest snapshot up to `number_max`, 0 for none; never raises."""
    try:
        return max((number for number in listed(backend) if number <= number_max), default=0)
    except CkptStoreError as error:
        _log.warning("could not list the catalog snapshots: %s", error)
        return 0


def _prune(backend: Backend, newest: int) -> None:
    """Drop all but the newest few up to `newest`; those beyond belong to a faster writer."""
    try:
        older = sorted(number for number in listed(backend) if number <= newest)
        for number in older[: -limits.SNAPSHOTS_KEPT]:
            backend.delete(snapshot_key(number))
    except CkptStoreError as error:
        _log.warning("could not drop old catalog snapshots: %s", error)


def listed(backend: Backend) -> list[int]:
    """Return the numbers of all snapshots."""
    numbers = (snapshot_number(info.key) for info in backend.list(SNAPSHOTS_PREFIX))
    return [number for number in numbers if number]
