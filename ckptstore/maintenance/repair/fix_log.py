"""Mends the log and the catalog's snapshots: from a copy of the same log, and only with proof.

Commit n may be put back if it is proven to be the lost one: its digest stands in commit
n+1 (which is sound, or was put back by the same proof), in a sound catalog snapshot of number n,
or still in the damaged object itself. A commit that is missing is put if absent. A damaged one
occupies its name: it is only replaced for a caller who vouches that no one else writes, since
between the two steps a writer that looked long ago could take the number.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.catalog import snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import decode_commit, extended
from ckptstore.catalog.reading import LogReader
from ckptstore.chunking import batches
from ckptstore.format.keys import COMMITS_PREFIX, commit_key, commit_number, snapshot_key
from ckptstore.maintenance.check.verify import snapshot_numbers, wrong_snapshots
from ckptstore.maintenance.repair.repair_report import CommitFinding
from ckptstore.repo import Repo

_DIGEST = re.compile(rb'"blake3":"([0-9a-f]{64})"}\n?\Z')


@dataclass(slots=True)
class _Entry:
    """The commit of one number, as far as it is known."""

    number: int
    digest: str = ""
    """Empty if it is missing or damaged."""
    previous: str = ""
    error: str = ""
    """Why it cannot be read; empty if it can, or is missing."""
    data: bytes | None = None
    """Proven bytes of a commit that is to be put back."""
    why: str = ""
    """Why there are none."""


def mend_log(repo: Repo, source: Repo | None, *, dry_run: bool) -> tuple[CommitFinding, ...]:
    """Find the commits that are missing or damaged, and put back those that can be proven.

    Reads every commit. The end of the log is known by the newest snapshot, too: the snapshots are
    looked at first, and a commit is there before its snapshot is.

    Raises
    ------
    UnsupportedFeatureError
        A newer ckptstore wrote a commit: nothing is damaged, and nothing can be done here.
    StorageError
        One of the storages failed.
    """
    evidence = _snapshot_digests(repo.backend)
    entries = _entries(repo, max(evidence, default=0))
    lost = [entry for entry in entries.values() if not entry.digest]
    for entry in reversed(lost):
        entry.why = _find_copy(repo, source, entry, _proof(repo, entry, entries, evidence))
    for entry in lost:
        before = entries.get(entry.number - 1)
        if before is None or entry.data is None:
            continue
        joined = entry.previous == before.digest if before.digest else before.data is not None
        if not joined:
            entry.data = None
            entry.why = "what the second store has does not follow the commit before"
    for entry in reversed(lost):
        if entry.data is not None and not dry_run:
            _put(repo, commit_key(entry.number), entry.data, replace=bool(entry.error))
    return tuple(_finding(entry) for entry in lost)


def _finding(entry: _Entry) -> CommitFinding:
    key = commit_key(entry.number)
    what = entry.error or f"{key} is missing"
    return CommitFinding(
        number=entry.number,
        key=key,
        what="damaged" if entry.error else "missing",
        mended=entry.data is not None,
        why=f"{what}: {entry.why}" if entry.why else what,
    )


def _entries(repo: Repo, last: int) -> dict[int, _Entry]:
    """Return the commits of all numbers up to the last that is listed, and up to `last`."""
    keys = (commit_number(info.key) for info in repo.backend.list(COMMITS_PREFIX))
    listed = [number for number in keys if number is not None]
    entries = {number: _Entry(number) for number in range(1, max(last, *listed, 0) + 1)}
    reader = LogReader(repo.backend, repo.environment)
    for todo in batches(listed, limits.COMMIT_READ_BATCH):
        while todo:
            commits, error = reader.read_many(todo)
            for commit in commits:
                entry = entries[commit.number]
                entry.digest, entry.previous = commit.digest, commit.body.previous
            if error is None:
                break
            if isinstance(error, errors.UnsupportedFeatureError) or not isinstance(
                error, (errors.IntegrityError, errors.FormatError)
            ):
                raise error
            entries[todo[len(commits)]].error = error.message
            todo = todo[len(commits) + 1 :]
    return entries


def _snapshot_digests(backend: Backend) -> dict[int, str]:
    """Return the digest of each commit that a sound snapshot was folded to."""
    digests = {}
    for number in snapshot_numbers(backend):
        # A damaged one proves nothing.
        with suppress(errors.IntegrityError, errors.FormatError, errors.NotFoundError):
            digests[number] = snapshots.read_one(backend, number).digest
    return digests


def _proof(repo: Repo, entry: _Entry, entries: dict[int, _Entry], evidence: dict[int, str]) -> str:
    """Return the digest that a lost commit had; empty if nothing tells."""
    after = entries.get(entry.number + 1)
    if after is not None and after.previous:
        return after.previous
    if entry.number in evidence:
        return evidence[entry.number]
    damaged = _bytes_at(repo.backend, entry.number) if entry.error else None
    said = _DIGEST.search(damaged or b"")
    return said[1].decode() if said else ""


def _bytes_at(backend: Backend, number: int) -> bytes | None:
    try:
        return backend.get(commit_key(number), bytes_max=limits.COMMIT_BYTES_MAX)
    except (errors.NotFoundError, errors.CorruptObjectError):
        return None


def _find_copy(repo: Repo, source: Repo | None, entry: _Entry, digest: str) -> str:
    """Take the proven bytes of a commit from the second store; return why that cannot be.

    They name the digest that proves the commit before.
    """
    if source is None:
        return "no second store was given that may have it"
    if not digest:
        return "nothing tells what it was: no later commit, snapshot or digest"
    data = _bytes_at(source.backend, entry.number)
    if data is None:
        return f"{source.url} does not have it"
    try:
        commit = decode_commit(data, where=f"{commit_key(entry.number)} of {source.url}")
    except (errors.IntegrityError, errors.FormatError) as error:
        return error.message
    if commit.digest != digest or commit.number != entry.number:
        return f"{source.url} has another commit of this number: it is no copy of this log"
    if entry.error and not repo.options.single_writer:
        return (
            "the copy is the right one, but this name is taken by the damaged object: open "
            "the store as a single writer to have it replaced, or move it away"
        )
    entry.data, entry.previous = data, commit.body.previous
    return ""


def _put(repo: Repo, key: str, data: bytes, *, replace: bool) -> None:
    if replace:
        repo.backend.delete(key)
    conditional = repo.put_if_absent() is PutIfAbsent.ATOMIC
    try:
        (repo.backend.put_if_absent if conditional else repo.backend.put)(key, data)
    except errors.ObjectExistsError:
        # Another repair at the same time: theirs has the same proof, hence the same bytes.
        if repo.backend.get(key, bytes_max=limits.COMMIT_BYTES_MAX) != data:
            msg = f"{key} was taken by another commit meanwhile"
            hint = "stop all writers; run ckptstore repair again"
            raise errors.CorruptObjectError(msg, hint=hint) from None


def mend_snapshots(repo: Repo, *, dry_run: bool) -> tuple[str, ...]:
    """Drop snapshots that are damaged or of another log, and fold a new one from all commits.

    Snapshots are caches: a reader of one that vanishes reads the log instead.

    Returns
    -------
    tuple
        Keys of the snapshots that were dropped.

    Raises
    ------
    CorruptObjectError
        The log is damaged.
    """
    numbers = snapshot_numbers(repo.backend)
    if not numbers:
        return ()
    commits = list(repo.log.commits())
    digests = {commit.number: commit.digest for commit in commits}
    broken = [
        snapshot_key(number)
        for number, error in wrong_snapshots(repo.backend, numbers, digests)
        # Pruned since; or of a commit that came after this read the log.
        if not isinstance(error, errors.NotFoundError) and number <= max(digests, default=0)
    ]
    if broken and not dry_run:
        for key in broken:
            repo.backend.delete(key)
        catalog, error = extended(Catalog(), commits)
        if error is not None:
            raise error
        conditional = repo.put_if_absent() is PutIfAbsent.ATOMIC
        snapshots.write(repo.backend, catalog, single_writer=not conditional)
    return tuple(broken)
