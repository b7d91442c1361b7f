"""Mends the log and the catalog's snapshots: from a copy of the same log, and only with proof.

Commit n may be put back if it is known to be the one that was there: its digest stands in commit
n+1 (which is sound, or was put back by the same proof), in a sound catalog snapshot of number n,
or still in the damaged object itself. A commit that is missing is put if absent. A damaged one
occupies its name: it is only replaced for a caller who vouches that no one else writes, since
between the two steps a writer that looked long ago could take the number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore import limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.catalog import snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import decode_commit, extended
from ckptstore.catalog.reading import LogReader
from ckptstore.errors import (
    CorruptObjectError,
    FormatError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    UnsupportedFeatureError,
)
from ckptstore.format.keys import (
    COMMITS_PREFIX,
    SNAPSHOTS_PREFIX,
    commit_key,
    commit_number,
    snapshot_number,
)
from ckptstore.maintenance.repair.repair_report import CommitFinding
from ckptstore.repo import Repo

_DIGEST = re.compile(rb'"blake3":"([0-9a-f]{64})"}\n?\Z')


@dataclass(slots=True)
class _Link:
    """What is known of one number."""

    digest: str = ""
    previous: str = ""
    error: str = ""
    """Why it cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How one commit is put back, or why it is not."""

    data: bytes | None = None
    why: str = ""


def mend_log(repo: Repo, source: Repo | None, *, dry_run: bool) -> tuple[CommitFinding, ...]:
    """Find the commits that are missing or damaged, and put back what can be proven.

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
    links = _links(repo, max(evidence, default=0))
    plans: dict[int, _Plan] = {}
    for number in range(max(links, default=0), 0, -1):
        link = links[number]
        if not link.digest:
            damaged = _bytes_at(repo.backend, number) if link.error else None
            digest = _proof(number, links.get(number + 1), evidence, damaged)
            plans[number] = _plan(repo, source, number, link, digest)
    for number in sorted(plans):
        below = plans.get(number - 1)
        joined = below.data is not None if below else _joins(links, number)
        if plans[number].data is not None and not joined:
            plans[number] = _Plan(why="what the second store has does not follow the commit before")
    for number in sorted(plans, reverse=True):
        data = plans[number].data
        if data is not None and not dry_run:
            _put(repo, commit_key(number), data, replace=bool(links[number].error))
    return tuple(_finding(number, links[number], plans[number]) for number in sorted(plans))


def _joins(links: dict[int, _Link], number: int) -> bool:
    """Say whether a commit that is to be put back follows the sound one before it."""
    return number == 1 or links[number].previous == links[number - 1].digest


def _finding(number: int, link: _Link, plan: _Plan) -> CommitFinding:
    key = commit_key(number)
    what = link.error or f"{key} is missing"
    return CommitFinding(
        number=number,
        key=key,
        what="damaged" if link.error else "missing",
        mended=plan.data is not None,
        why=f"{what}: {plan.why}" if plan.why else what,
    )


def _links(repo: Repo, last: int) -> dict[int, _Link]:
    """Return what is known of each number up to the last that is listed, and up to `last`."""
    keys = (commit_number(info.key) for info in repo.backend.list(COMMITS_PREFIX))
    listed = [number for number in keys if number is not None]
    links = {number: _Link() for number in range(1, max(last, *listed, 0) + 1)}
    reader = LogReader(repo.backend, repo.environment)
    for start in range(0, len(listed), limits.COMMIT_READ_BATCH):
        todo: Sequence[int] = listed[start : start + limits.COMMIT_READ_BATCH]
        while todo:
            commits, error = reader.read_many(todo)
            for commit in commits:
                links[commit.number] = _Link(digest=commit.digest, previous=commit.body.previous)
            if error is None:
                break
            if isinstance(error, UnsupportedFeatureError) or not isinstance(
                error, (IntegrityError, FormatError)
            ):
                raise error
            links[todo[len(commits)]].error = error.message
            todo = todo[len(commits) + 1 :]
    return links


def _snapshot_digests(backend: Backend) -> dict[int, str]:
    """Return the digest of each commit that a sound snapshot was folded to."""
    digests = {}
    for info in backend.list(SNAPSHOTS_PREFIX):
        number = snapshot_number(info.key)
        if number:
            try:
                digests[number] = snapshots.read_one(backend, number).digest
            except (IntegrityError, FormatError, NotFoundError):
                continue  # it proves nothing; it is mended later
    return digests


def _proof(number: int, after: _Link | None, evidence: dict[int, str], data: bytes | None) -> str:
    """Return the digest that commit `number` had; empty if nothing tells."""
    if after is not None and after.previous:
        return after.previous
    if number in evidence:
        return evidence[number]
    said = _DIGEST.search(data or b"")
    return said[1].decode() if said else ""


def _bytes_at(backend: Backend, number: int) -> bytes | None:
    try:
        return backend.get(commit_key(number), bytes_max=limits.COMMIT_BYTES_MAX)
    except (NotFoundError, CorruptObjectError):
        return None


def _plan(repo: Repo, source: Repo | None, number: int, link: _Link, digest: str) -> _Plan:
    """Say how one commit is put back; keeps what it says, since it proves the one before it."""
    key = commit_key(number)
    if source is None:
        return _Plan(why="no second store was given that may have it")
    if not digest:
        return _Plan(why="nothing tells what it was: no later commit, snapshot or digest")
    data = _bytes_at(source.backend, number)
    if data is None:
        return _Plan(why=f"{source.url} does not have it")
    try:
        commit = decode_commit(data, where=f"{key} of {source.url}")
    except (IntegrityError, FormatError) as error:
        return _Plan(why=error.message)
    if commit.digest != digest or commit.number != number:
        why = f"{source.url} has another commit of this number: it is no copy of this log"
        return _Plan(why=why)
    if link.error and not repo.options.single_writer:
        return _Plan(
            why="the copy is the right one, but this name is taken by the damaged object: open "
            "the store as a single writer to have it replaced, or move it away"
        )
    link.previous = commit.body.previous
    return _Plan(data=data)


def _put(repo: Repo, key: str, data: bytes, *, replace: bool) -> None:
    if replace:
        repo.backend.delete(key)
    atomic = repo.put_if_absent() is PutIfAbsent.ATOMIC
    try:
        (repo.backend.put_if_absent if atomic else repo.backend.put)(key, data)
    except ObjectExistsError:
        # Another repair at the same time: theirs has the same proof, hence the same bytes.
        if repo.backend.get(key, bytes_max=limits.COMMIT_BYTES_MAX) != data:
            msg = f"{key} was taken by another commit meanwhile"
            raise CorruptObjectError(
                msg, hint="stop all writers; run ckptstore repair again"
            ) from None


def mend_snapshots(repo: Repo, *, dry_run: bool) -> tuple[str, ...]:
    """Drop snapshots that are damaged or of another log, and fold a new one from all commits.

    Snapshots are caches: whoever reads one that vanishes reads the log instead.

    Returns
    -------
    tuple
        Keys of the snapshots that were dropped.

    Raises
    ------
    CorruptObjectError
        The log is damaged.
    """
    infos = repo.backend.list(SNAPSHOTS_PREFIX)
    numbers = {number: info.key for info in infos if (number := snapshot_number(info.key))}
    if not numbers:
        return ()
    commits = list(repo.log.commits())
    digests = {commit.number: commit.digest for commit in commits}
    broken = []
    for number, key in numbers.items():
        try:
            sound = snapshots.read_one(repo.backend, number).digest == digests.get(number)
        except NotFoundError:
            continue  # pruned meanwhile
        except (IntegrityError, FormatError):
            sound = False
        # One of a commit that came after this read the log is not known to be wrong.
        if not sound and number <= max(digests, default=0):
            broken.append(key)
    if broken and not dry_run:
        for key in broken:
            repo.backend.delete(key)
        catalog, error = extended(Catalog(), commits)
        if error is not None:
            raise error
        atomic = repo.put_if_absent() is PutIfAbsent.ATOMIC
        snapshots.write(repo.backend, catalog, single_writer=not atomic)
    return tuple(broken)
