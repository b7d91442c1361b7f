"""One version becomes one of another store: its chunks are copied, read back and committed.

Chunks first, then they are read back, then the manifest, then the commit that makes it visible: a
crash at any moment leaves objects that nobody names, or the whole version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ckptstore import errors, limits
from ckptstore.catalog import replica_ops
from ckptstore.catalog.content_ops import Condemn
from ckptstore.catalog.replica_ops import CHECKED_KEY, UNCHECKED_KEY, Arrival
from ckptstore.checkpoint.cold_reads import naming_cold
from ckptstore.checkpoint.content import content_digest, read_content
from ckptstore.committing import commit_retrying
from ckptstore.events import ProgressCallback, silent
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest
from ckptstore.maintenance.replicas.copy_manifest import Landed, Orphans, transplant
from ckptstore.maintenance.retention.by_hand import undelete
from ckptstore.manifests import relied_on
from ckptstore.model import NamedVersion, RoleBytes, Version
from ckptstore.objects.copying import ChunkCopies
from ckptstore.objects.piece_reader import ReadItem
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")

Fate = Literal["copied", "present", "deleted in the target", "deleted in the source"]
_Outcome = tuple[Fate | errors.IntegrityError | errors.ColdObjectError, "Landed | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRequest:
    """Options of a replication, besides the versions."""

    dry_run: bool = False
    check: bool = True
    """Read back what was written, before the version becomes visible in the target."""
    bytes_per_s: float = 0.0
    """Bandwidth to the target, both directions together; 0 for no limit."""
    again: frozenset[str] = frozenset()
    """Ids of versions that come also if the target has deleted them, or keeps less of them."""
    resume: bool = True
    """Look in the target for chunks that an interrupted copy left there."""
    alone: bool = False
    """Bring these versions and no records of ancestors; do not note in the source who has them."""
    progress: ProgressCallback = silent
    """Told the bytes in memory of the versions that are done, of those that are to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(NamedVersion):
    """A version that could not be copied, while others were."""

    message: str
    kind: str = errors.IntegrityError.kind
    """Code of the error: it is damaged, or cold and must be thawed first."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Source and target of a replication, with its options."""

    source: Repo
    target: Repo
    request: ReplicateRequest
    copies: ChunkCopies
    orphans: Orphans | None
    """Finds what an interrupted copy left in the target; None looks for nothing."""

    def forget_orphans(self) -> None:
        """Have the next copy look for what the last one has written, too."""
        if self.orphans is not None:
            self.orphans.forget()


def bring(
    sides: Sides, version: Version, near: Callable[[Version], list[Version]], tell: ProgressCallback
) -> _Outcome:
    """Copy a version and commit it; return its fate, or why it failed, and the copy.

    One that is damaged does not keep the others back. One that was moved meanwhile is copied from
    where it is now, and one that was deleted is left out. If a collection in the target deletes
    packs before they are read back, they are written again.

    Parameters
    ----------
    near
        Gives the versions of the target that are likely to have chunks of one.
    tell
        Told how much of the version has travelled.

    Raises
    ------
    CondemnedError
        Collections condemned what it needs, again and again.
    StorageError
        One of the storages failed.
    """
    tries = 0

    def attempt(without: set[str]) -> _Outcome:
        """Copy and commit, from where the version is now."""
        nonlocal version, tries
        tries += 1
        folded = sides.target.catalog.number
        try:
            landed = _land(sides, version, near(version), without, tell)
        except errors.ColdObjectError as error:  # of the source: the others are not held up
            return error, None
        except errors.IntegrityError as error:
            now = sides.source.refresh().version(version.id)
            if now.deleted or now.level == "record":
                return "deleted in the source", None
            moved = now.manifest_digest != version.manifest_digest
            last = tries >= limits.CONDEMNED_TRIES_MAX
            if last or not (moved or _has_collected(sides.target, folded)):
                return error, None
            version = now
            sides.target.refresh()  # what was collected is shared no more
            sides.forget_orphans()
            return attempt(without)
        try:
            return _commit(sides, version, landed), landed
        except errors.CondemnedError:
            sides.forget_orphans()
            raise

    return commit_retrying(attempt)


def _has_collected(target: Repo, folded: int) -> bool:
    """Return whether a commit after one has condemned objects, such as packs of a copy at work."""
    later = target.log.commits(folded + 1)
    return any(isinstance(op, Condemn) for commit in later for op in commit.body.ops)


def take_back_deletion(sides: Sides, version: Version) -> bool:
    """Undelete a version in the target; return whether as much of it is there then."""
    try:
        undelete(sides.target, [version.id])
    except (errors.VersionNotFoundError, errors.CondemnedError, errors.CorruptObjectError):
        return False
    except errors.InvalidInputError:  # somebody else did meanwhile
        pass
    now = sides.target.catalog.version(version.id)
    return not now.deleted and not replica_ops.has_less(now, version)


def check_whole(version: Version) -> None:
    """Raise CorruptObjectError for a version of which parts are lost."""
    if version.damaged:
        msg = f"parts of {version.label} are lost"
        raise errors.CorruptObjectError(msg, hint="mend it first: ckptstore repair")


def _land(
    sides: Sides, version: Version, near: list[Version], without: set[str], tell: ProgressCallback
) -> Landed:
    """Bring the chunks of a version, and read them back.

    Packs of an interrupted copy that do not hold what they should are added to `without`.
    """
    check_whole(version)
    manifest = sides.source.manifests.load(version)
    if content_digest(manifest) != version.content:
        msg = f"the manifest of #{version.id[:8]} is not of the state that the log names"
        raise errors.CorruptObjectError(msg, hint="run ckptstore verify")
    shown = f"{version.run}@{version.step}"
    while True:
        with naming_cold(version.id, sides.source.url, shown=shown):
            landed = transplant(
                manifest, source=sides.source, target=sides.target, copies=sides.copies,
                candidates=near, without=without, progress=tell, orphans=sides.orphans,
                alone=sides.request.alone,
            )  # fmt: skip
        began = sides.target.environment.monotonic()
        try:
            _read_resumed(sides, landed)
        except (errors.IntegrityError, errors.ColdObjectError) as error:
            _log.warning("what an interrupted copy left is copied again: %s", error)
            without |= landed.resumed_packs
            continue
        break
    unread = replace(landed, receipt={**landed.receipt, UNCHECKED_KEY: 1.0})
    if not sides.request.check or landed.is_cold:
        return unread
    try:
        _read_deltas(sides, landed)
    except errors.ColdObjectError:  # its base is cold there: it came, and does not count as read
        return unread
    seconds = landed.read_back_s + sides.target.environment.monotonic() - began
    return replace(landed, receipt={**landed.receipt, CHECKED_KEY: seconds})


def _read_resumed(sides: Sides, landed: Landed) -> None:
    """Read what an interrupted copy had written to the target, and what refers to it.

    Its writer may have stopped when it was visible, and not durable yet.
    """
    table, old = landed.manifest.pieces, landed.resumed_packs

    def is_old(row: int | None) -> bool:
        return row is not None and table.chunk_of(row)[0] in old

    if old:
        _read(sides, landed, lambda row: is_old(row) or is_old(table.base_of(row)))
        sides.target.backend.make_durable(map(pack_key, old))


def _read_deltas(sides: Sides, landed: Landed) -> None:
    """Decode the deltas that were written to the target, and what was stored by itself there.

    All else was read as soon as it was there (:class:`ckptstore.objects.copying.ReadBack`).
    """
    table = landed.manifest.pieces
    _read(sides, landed, lambda row: row in landed.rewritten or table.base_of(row) is not None)


def _read(sides: Sides, landed: Landed, is_wanted: Callable[[int], bool]) -> None:
    """Read some of the pieces that are new to the target, as a load does."""
    labels = read_content(landed.manifest).labels
    pairs = zip(landed.rows, landed.owners, strict=True)
    wanted = [(row, labels[owner]) for row, owner in pairs if is_wanted(row)]
    items = [ReadItem(row=row, out=None, label=label) for row, label in wanted]
    sides.copies.read_back(landed.manifest.pieces, items)


def _commit(sides: Sides, version: Version, landed: Landed) -> Fate:
    """Write the manifest of a version whose chunks are there, and make it visible.

    Not if another brought it, or the target deleted it, meanwhile.
    """
    target, source = sides.target, sides.source
    arrival = put_arriving(target, landed.manifest, landed.roles, landed.receipt)
    commit = target.log.append_any(
        lambda now: replica_ops.arrive(
            now,
            source.catalog,
            [version],
            store=source.superblock.store_id,
            arrivals={version.id: arrival},
            again=sides.request.again,
            alone=sides.request.alone,
        )
    )
    if commit is None:
        return "deleted in the target" if target.catalog.version(version.id).deleted else "present"
    target.manifests.keep(arrival.manifest.digest, landed.manifest)
    return "copied"


def put_arriving(
    repo: Repo, manifest: Manifest, roles: Mapping[str, RoleBytes], receipt: Mapping[str, float]
) -> Arrival:
    """Write the manifest of a version that comes to a store; return what its commit says of it."""
    pointer = repo.manifests.put(manifest)
    needed = relied_on(pointer, manifest)
    return Arrival(manifest=pointer, roles=roles, receipt=receipt, relies_on=needed)


def read_back(version: Version) -> bool:
    """Return whether a store has saved a version itself, or has read back all that came of it.

    What was saved here, let go, and came back unchecked, is as unsure as what came from elsewhere.
    """
    own = not version.origin and UNCHECKED_KEY not in version.receipt
    return own or CHECKED_KEY in version.receipt or version.verified
