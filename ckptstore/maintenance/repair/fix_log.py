"""Mends the log and the catalog's snapshots: from copies of the same log, and only with proof.

Commit n may be put back if it is proven to be the lost one: its digest stands in commit
n+1 (which is sound, or was put back by the same proof), in a sound catalog snapshot of number n,
or still in the damaged object itself. A commit that is missing is put if absent. A damaged one
occupies its name: it is only replaced for a caller who vouches that no one else writes, since
between the two steps a writer that looked long ago could take the number.

Damaged records at the end of the log, with nothing sound after them, are set aside: a new commit
past them follows the last sound one. It restates the operations that a copy proves. The damaged
objects stay under their names, so that no slow writer can take these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.catalog import snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit, decode_commit, extended
from ckptstore.catalog.content_ops import SetAside
from ckptstore.catalog.reading import LogReader
from ckptstore.catalog.run_ops import CreateRun, Save
from ckptstore.catalog.state import Op
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.keys import commit_key, snapshot_key
from ckptstore.hashing import blake3_hex
from ckptstore.maintenance.check.verify import snapshot_numbers, wrong_snapshots
from ckptstore.repo import Repo

_UNSURE = "what "
_DIGEST = re.compile(rb'"blake3":"([0-9a-f]{64})"}\n?\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFinding:
    """One commit that is not as it should be."""

    number: int
    key: str
    what: Literal["missing", "damaged"]
    mended: bool
    """What it held is there again; in a dry run, it can be brought back."""
    set_aside: bool = False
    """The log goes on past it, a damaged record at its end, which stays where it is; in a dry run,
    it would."""
    why: str
    """The damage, and the obstacle to mending it."""


@dataclass(slots=True)
class _Entry:
    """The commit of one number, as far as it is known."""

    number: int
    digest: str = ""
    """Empty if it is missing or damaged."""
    previous: str = ""
    error: str = ""
    """Why it cannot be read; empty if it can, or is missing."""
    copy: Commit | None = None
    """The proven commit, from a copy."""
    data: bytes = b""
    """Its bytes."""
    why: str = ""
    """Why there is none, or what else is in the way."""
    aside: bool = False
    """It is set aside."""


def mend_log(repo: Repo, sources: Sequence[Repo], *, dry_run: bool) -> tuple[CommitFinding, ...]:
    """Find the commits that are missing or damaged; put back those that can be proven.

    Reads every commit. The end of the log is known by the newest snapshot, too: the snapshots are
    looked at first, and a commit is there before its snapshot is. Each of the other stores may
    have a part of the lost commits.

    Raises
    ------
    UnsupportedFeatureError
        A newer ckptstore wrote a commit: nothing is damaged, and nothing can be done here.
    CommitConflictError
        The log changed meanwhile.
    StorageError
        One of the storages failed.
    """
    evidence = _snapshot_digests(repo.backend)
    entries = _entries(repo, max(evidence, default=0))
    lost = [entry for entry in entries.values() if not entry.digest]
    sound = max((n for n, entry in entries.items() if entry.digest), default=0)
    damaged = max((entry.number for entry in lost if entry.error), default=0)
    end = [entry for entry in lost if entry.number > sound] if damaged > sound else []
    for entry in reversed(lost):
        _find_copy(sources, entry, _proof(repo, entry, entries, evidence))
    for entry in lost:
        before = entries.get(entry.number - 1, _Entry(0))
        due = before.copy.digest if before.copy is not None else before.digest
        if entry.copy is None and entry in end and (due or entry.number == 1):
            _find_likely(repo, sources, entry, due)
        if entry.copy is not None and entry.copy.body.previous != due and before.number:
            entry.copy = None
            entry.why = "what the second store has does not follow the commit before"
    alone = repo.options.single_writer
    for entry in lost:
        if entry.copy is not None and entry.error and not alone and entry not in end:
            entry.copy = None
            entry.why = (
                "the copy is the right one, but this name is taken by the damaged object: open "
                "the store as a single writer to have it replaced, or move it away"
            )
    back = [e for e in lost if e.copy is not None and (alone or not e.error)]
    if not dry_run:
        for entry in reversed(back):
            _put(repo, commit_key(entry.number), entry.data, replace=bool(entry.error))
    left = [entry for entry in end if entry not in back]
    if any(entry.error for entry in left):
        _set_aside(repo, left, max(evidence, default=0), dry_run=dry_run)
    return tuple(_finding(entry) for entry in lost)


def _set_aside(repo: Repo, left: list[_Entry], newest: int, *, dry_run: bool) -> None:
    """Commit past the damaged end of the log, unless something shows that its records were read."""
    for entry in left:
        if entry.copy is None and newest >= entry.number:
            entry.why = (
                f"{snapshot_key(newest)} shows that it was whole: repair from a copy that has it, "
                "or move that away to go on without it"
            )
            return
        if entry.why.startswith(_UNSURE):
            return
    ops = [op for entry in left if entry.copy is not None for op in entry.copy.ops]
    reason = "; ".join(entry.error or f"{commit_key(entry.number)} is missing" for entry in left)
    for entry in left:
        entry.aside = True
    if dry_run:
        return

    due, again = left[0].number - 1, ops

    def build(catalog: Catalog) -> list[Op]:
        """Restate what is proven, if the log still ends where it did."""
        if catalog.number != due:
            msg = "the log changed meanwhile, or this process had read what is damaged now"
            raise errors.CommitConflictError(msg, hint="open the store again, and repair it")
        return [SetAside(follows=due, reason=reason[: limits.REASON_CHARS_MAX]), *again]

    # A record that only seems damaged, in a stale view of the storage, gets time to show.
    lag_s = max(limits.VISIBILITY_WAIT_MIN_S, 2 * repo.backend.capabilities.lookup_lag_s)
    repo.environment.sleep(min(lag_s, limits.VISIBILITY_WAIT_S))
    while (commit := repo.log.append_any(build, mending=True)) is not None:
        due, again = commit.number, []


def _finding(entry: _Entry) -> CommitFinding:
    key = commit_key(entry.number)
    what = entry.error or f"{key} is missing"
    return CommitFinding(
        number=entry.number,
        key=key,
        what="damaged" if entry.error else "missing",
        mended=entry.copy is not None,
        set_aside=entry.aside,
        why=f"{what}: {entry.why}" if entry.why else what,
    )


def _entries(repo: Repo, last: int) -> dict[int, _Entry]:
    """Return the commits of all numbers up to the last that is listed, and up to `last`."""
    reader = LogReader(repo.backend, repo.environment)
    listed = reader.numbers(0)
    entries = {number: _Entry(number) for number in range(1, max(last, *listed, 0) + 1)}
    for record in reader.settled(listed):
        entry = entries[record.number]
        if isinstance(record, Commit):
            entry.digest, entry.previous = record.digest, record.body.previous
            for number in range(record.follows + 1, record.number):
                entries.pop(number, None)
        elif not record.damaged:
            raise record.error
        elif not record.missing:
            entry.error = record.error.message
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
    with suppress(errors.NotFoundError, errors.CorruptObjectError):
        return backend.get(commit_key(number), bytes_max=limits.COMMIT_BYTES_MAX)
    return None


def _find_copy(sources: Sequence[Repo], entry: _Entry, digest: str) -> None:
    """Take the proven commit from one of the other stores, or note why that cannot be.

    It names the digest that proves the commit before.
    """
    why = ["no second store was given that may have it"] if not sources else []
    if sources and not digest:
        why = ["nothing tells what it was: no later commit, snapshot or digest"]
    for source in sources if digest else ():
        commit, found = _commit_of(source, entry)
        if isinstance(commit, str):
            why.append(commit)
        elif commit.digest != digest:
            why.append(f"{source.url} has another commit of this number: it is no copy of this log")
        else:
            entry.copy, entry.data, entry.previous = commit, found, commit.body.previous
            return
    entry.why = "; ".join(dict.fromkeys(why))


def _find_likely(repo: Repo, sources: Sequence[Repo], entry: _Entry, before: str) -> None:
    """Take the commit that follows from a copy of the log, if what it saves is stored here.

    Any other that follows may be the lost one, or the first of a copy that went its own way.
    """
    for source in sources:
        commit, found = _commit_of(source, entry)
        if isinstance(commit, str) or commit.body.previous != before:
            continue
        saves = [op for op in commit.ops if isinstance(op, Save)]
        others = {type(op) for op in commit.ops} - {Save, CreateRun}
        if saves and not others and all(_is_here(repo, op.manifest) for op in saves):
            entry.copy, entry.data, entry.why = commit, found, ""
            return
        entry.why = f"{_UNSURE}{source.url} has may be it, but nothing proves that: leave it out"


def _is_here(repo: Repo, manifest: ManifestPointer) -> bool:
    with suppress(errors.NotFoundError, errors.IntegrityError):
        data = repo.backend.get(manifest.key, bytes_max=limits.MANIFEST_STORED_BYTES_MAX)
        return blake3_hex(data) == manifest.digest
    return False


def _commit_of(source: Repo, entry: _Entry) -> tuple[Commit | str, bytes]:
    """Return the commit of a number in another store with its bytes; a text if it has none."""
    data = _bytes_at(source.backend, entry.number)
    if data is None:
        return f"{source.url} does not have it", b""
    try:
        commit = decode_commit(data, where=f"{commit_key(entry.number)} of {source.url}")
    except (errors.IntegrityError, errors.FormatError) as error:
        return error.message, b""
    if commit.number != entry.number:
        return f"{source.url} has another commit of this number: it is no copy of this log", b""
    return commit, data


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
    commits = list(repo.log.commits(whole=True))
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
