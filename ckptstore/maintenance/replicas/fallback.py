"""Loads that fall through: content that a store does not have is read from its replicas.

Two ways lead here. A version's content is not here: only its record is, or a part, or its manifest
is damaged; then the manifest comes from a replica, and of its pieces those that other versions of
this store share are read here, the others there, at the same time. Or some pieces are lost here;
then these are read from a replica, after the others. Either way a manifest of a replica counts only
if it describes the very state that this store's log names, and each piece only if it has its id.

Nothing is written. Replicas are asked in their order, and only when they are needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.stoppable import StoppableBackend
from ckptstore.backends.transfers import FillingThreads
from ckptstore.catalog.commits import decode_commit
from ckptstore.catalog.replica_ops import Replicate
from ckptstore.catalog.run_ops import Save
from ckptstore.checkpoint.cold_reads import thaw_command
from ckptstore.checkpoint.content import Content, content_digest, read_content
from ckptstore.config import Options
from ckptstore.events import Progress, ProgressCallback
from ckptstore.format.keys import commit_key, pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.maintenance.replicas.copy_manifest import near_versions, newest_heads
from ckptstore.manifests import read_manifest
from ckptstore.model import ReplicaInfo, Version
from ckptstore.objects.index import KnownPieces, remap
from ckptstore.objects.piece_reader import read_pieces
from ckptstore.objects.plan import ReadItem
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A replica that may be asked; is opened when it is."""

    info: ReplicaInfo
    open: Callable[[], Repo]
    """Raises what opening a store raises, and ReplicaChangedError."""

    def __str__(self) -> str:
        """Return name and location."""
        return f"replica {self.info.name!r} ({self.info.url})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A version as a replica has it."""

    tier: Tier
    repo: Repo
    version: Version
    manifest: Manifest


@dataclass(slots=True)
class FallThrough:
    """Replicas that a load of one version turns to. Any thread may use it.

    Parameters
    ----------
    why
        The error here.
    """

    repo: Repo
    version: Version
    tiers: Sequence[Tier]
    why: errors.CkptStoreError
    tell: Callable[[Tier, str], None]
    """Told, each time, which replica is read from and why."""
    whole: bool = False
    """Only the state as it was first saved will do, not what of it is kept here."""
    reasons: list[tuple[Tier, errors.CkptStoreError]] = field(default_factory=list)
    """Why replicas could not help."""

    def content(self) -> Content:
        """Return what a version holds whose content is not here; its pieces are read from both.

        Raises
        ------
        CkptStoreError
            Of the kind of the error here: no replica can help either; has all reasons.
        """
        for found in self.candidates():
            return replace(read_content(found.manifest), read=_Split(owner=self, found=found))
        raise self.failure(self.why)

    def candidates(self) -> Iterator[Found]:
        """Yield the replicas that have the version, nearest first; note why others do not."""
        for tier in self.tiers:
            try:
                found = self.find(tier)
            except errors.CkptStoreError as error:
                self.note(tier, error)
            else:
                yield found

    def note(self, tier: Tier, error: errors.CkptStoreError) -> None:
        """Note why a replica does not help; loudly if another store is in its place."""
        if isinstance(error, errors.ReplicaChangedError):
            _log.warning("%s is left out: %s", tier, error)
        self.reasons.append((tier, error))

    def find(self, tier: Tier) -> Found:
        """Return a version as one replica has it.

        Raises
        ------
        VersionNotFoundError
            It has not, or no longer, or less of it.
        CorruptObjectError
            What it has under this id is another state, or its manifest is damaged.
        CkptStoreError
            It cannot be opened or read.
        """
        repo = tier.open()
        there = repo.refresh().find(self.version.id)
        if there is None:
            raise errors.VersionNotFoundError("it does not have the version")
        if there.deleted or there.level == "record":
            what = "it has deleted the version" if there.deleted else "it keeps only the record too"
            raise errors.VersionNotFoundError(what)
        kept = not self.whole and there.content == self.version.content
        if not kept and there.content != self._first_content():
            what = "as another state" if there.level == "full" else f"only as {there.level}"
            raise errors.CorruptObjectError(f"it has the version {what}")
        manifest = repo.manifests.load(there)
        if content_digest(manifest) != there.content:
            msg = "its manifest of the version is not of the state that the log names"
            raise errors.CorruptObjectError(msg)
        return Found(tier=tier, repo=repo, version=there, manifest=manifest)

    def _first_content(self) -> str:
        """Return the digest of the state as it was first saved or brought here; from the log."""
        if self.version.level == "full":
            return self.version.content
        key = commit_key(self.version.commit)
        data = self.repo.backend.get(key, bytes_max=limits.COMMIT_BYTES_MAX)
        for op in decode_commit(data, where=key).ops:
            if isinstance(op, Save | Replicate) and op.version == self.version.id:
                return op.content
        return self.version.content

    def failure(self, error: errors.CkptStoreError) -> errors.CkptStoreError:
        """Return an error of the same kind that also says why the replicas do not help."""
        others = "; ".join(f"{tier}: {found.message}" for tier, found in self.reasons)
        made = type(error)(f"{error.message}; {others}", hint=self._next_step(error))
        made.__cause__ = self.reasons[-1][1] if self.reasons else error
        return made

    def _next_step(self, error: errors.CkptStoreError) -> str:
        """Return what to do, by the most hopeful of the reasons."""
        for tier, found in self.reasons:
            if isinstance(found, errors.ColdObjectError):
                return thaw_command(self.version.id, tier.info.url)
        for tier, found in self.reasons:
            if isinstance(found, errors.EncryptionKeyError):
                options = {tier.info.name: {"encryption_key": "file:PATH"}}
                there = f"on the command line: --from replica:{tier.info.name} --from-key SPEC"
                return f"give its key: ckptstore.open(..., replicas={options}); {there}"
            if isinstance(found, errors.TransientStorageError):
                return f"try again when {tier.info.url} answers"
            if isinstance(found, errors.StoreNotFoundError):
                return f"is it mounted? Where it is now: ckptstore replica add {tier.info.name} URL"
        for tier, found in self.reasons:
            if not isinstance(found, errors.VersionNotFoundError):
                return found.hint or f"look at it: ckptstore verify --store {tier.info.url}"
        return error.hint

    # --- pieces ---------------------------------------------------------------------------------

    def read(
        self,
        items: Sequence[ReadItem],
        *,
        first: Found | None,
        options: Options,
        progress: ProgressCallback,
        stop: list[StoppableBackend],
    ) -> None:
        """Fill pieces from replicas; what one does not give, the next may.

        Parameters
        ----------
        items
            Rows as in any manifest of the version: pieces of tensors are in the same order in each.
        first
            The replica to begin with.
        stop
            Gets what ends the reading from another thread.

        Raises
        ------
        CkptStoreError
            Not all can be had; has all reasons.
        """
        turn = replace(self, reasons=[])  # those of this reading
        left = list(items)
        lost: errors.CkptStoreError = self.why
        for found in turn._in_turn(first):
            failed: list[ReadItem] = []

            def keep(
                item: ReadItem, error: errors.CkptStoreError, failed: list[ReadItem] = failed
            ) -> None:
                """Note a piece for the next place, and why it is lost here."""
                nonlocal lost
                failed.append(item)
                lost = error

            backend = StoppableBackend(found.repo.load_backend)
            stop.append(backend)
            self.tell(found.tier, self.why.message)
            try:
                read_pieces(
                    found.manifest.pieces,
                    left,
                    backend=backend,
                    options=options,
                    progress=progress,
                    on_failure=keep,
                )
            except errors.OperationCancelledError:
                raise
            except errors.CkptStoreError as error:
                turn.note(found.tier, error)
                continue
            left = failed
            if not left:
                return
            turn.note(found.tier, lost)
        raise turn.failure(self.why)

    def _in_turn(self, first: Found | None) -> Iterator[Found]:
        """Yield a replica, once more if it has moved the version meanwhile; then the others."""
        done = ""
        if first is not None:
            yield first
            done = first.tier.info.name
            for again in replace(self, tiers=[first.tier]).candidates():
                if again.version.manifest_digest != first.version.manifest_digest:
                    yield again
        rest = [tier for tier in self.tiers if tier.info.name != done]
        yield from replace(self, tiers=rest).candidates()


def read_falling(
    fall_through: Callable[..., FallThrough],
    table: PieceTable,
    items: Sequence[ReadItem],
    *,
    backend: Backend,
    options: Options,
    progress: ProgressCallback,
) -> None:
    """Read pieces of a version that is here; those that are lost or cold, from its replicas.

    As :func:`ckptstore.objects.piece_reader.read_pieces`.

    Parameters
    ----------
    fall_through
        Given an error and, as `told`, the damage, gives the replicas to turn to.
    """
    failed = _read_here(table, items, backend, options, progress)
    if not failed:
        return
    why = failed[0][1]
    what = f"{len(failed)} pieces are lost here, the first: {why.message}"
    owner = fall_through(why, told="" if isinstance(why, errors.ColdObjectError) else what)
    lost = [item for item, _ in failed]
    meter = _Meter(table, items, progress)
    meter.done = meter.total - meter.size_of(lost)
    owner.read(lost, first=None, options=options, progress=meter.part(), stop=[])


def _read_here(
    table: PieceTable,
    items: Sequence[ReadItem],
    backend: Backend,
    options: Options,
    progress: ProgressCallback,
) -> list[tuple[ReadItem, errors.CkptStoreError]]:
    """Read pieces from this store; return those that it cannot give, all if any is cold."""
    failed: list[tuple[ReadItem, errors.CkptStoreError]] = []
    try:
        read_pieces(
            table,
            items,
            backend=backend,
            options=options,
            progress=progress,
            on_failure=lambda item, error: failed.append((item, error)),
        )
    except errors.ColdObjectError as cold:  # here, and maybe not in a replica
        return [(item, cold) for item in items]
    return failed


class _Meter:
    """Adds up the progress of several readings; any thread."""

    def __init__(
        self, table: PieceTable, items: Iterable[ReadItem], progress: ProgressCallback
    ) -> None:
        self._table = table
        self._progress = progress
        self._lock = threading.Lock()
        self.total = self.size_of(items)
        self.done = 0

    def size_of(self, items: Iterable[ReadItem]) -> int:
        """Return the bytes of some pieces."""
        return int(sum(int(self._table.raw[item.row]) for item in items))

    def part(self) -> ProgressCallback:
        """Return the callback of one reading; it counts from 0."""
        last = 0

        def tell(step: Progress) -> None:
            """Add the progress of this reading to that of all."""
            nonlocal last
            with self._lock:
                self.done += step.done - last
                last = step.done
                done = min(max(self.done, 0), self.total)
                self._progress(Progress(stage=step.stage, done=done, total=self.total))

        return tell


@dataclass(slots=True, kw_only=True)
class _Split:
    """Reads pieces of a version of a replica: those that are here too, here."""

    owner: FallThrough
    found: Found
    _known: KnownPieces | None = None

    def __call__(
        self,
        table: PieceTable,
        items: Sequence[ReadItem],
        *,
        backend: Backend,
        options: Options,
        progress: ProgressCallback,
    ) -> None:
        """Read from both at once; as :func:`ckptstore.objects.piece_reader.read_pieces`."""
        near, mapped, away = self._split(table, items)
        meter = _Meter(table, items, progress)
        stop: list[StoppableBackend] = []

        def from_replicas(part: Sequence[ReadItem], share: Options) -> None:
            self.owner.read(part, first=self.found, options=share, progress=meter.part(), stop=stop)

        if near is None:
            from_replicas(away, options)
            return
        back = {id(new): old for new, old in mapped}
        share = replace(options, host_bytes=max(1, options.host_bytes // 2)) if away else options
        with FillingThreads(1, "ckptstore-replica") as pool:
            there = pool.submit(from_replicas, away, share) if away else None
            try:
                lost = _read_here(near, [new for new, _ in mapped], backend, share, meter.part())
                if there is not None:
                    there.result()
            except BaseException:  # the other ends after its piece
                for each in stop:
                    each.stop()
                raise
        failed = [back[id(new)] for new, _ in lost]
        if failed:
            meter.done -= meter.size_of(failed)
            from_replicas(failed, options)

    def _split(
        self, table: PieceTable, items: Sequence[ReadItem]
    ) -> tuple[PieceTable | None, list[tuple[ReadItem, ReadItem]], list[ReadItem]]:
        """Return a table of the pieces that are here, items of it with theirs, and the others."""
        if self._known is None:
            self._known = _known_here(self.owner.repo, self.owner.version)
        places = {}
        for row in {item.row for item in items}:
            place = self._known.find(table.ids[row].tobytes(), int(table.raw[row]))
            if place is not None:
                places[row] = place
        away = [item for item in items if item.row not in places]
        if not places:
            return None, [], away
        rows = sorted(places)
        at = {row: own for own, row in enumerate(rows)}
        mapped = [(w._replace(row=at[w.row]), w) for w in items if w.row in at]
        return remap(table, rows, places.__getitem__), mapped, away


def _known_here(repo: Repo, version: Version) -> KnownPieces:
    """Return the pieces of versions of this store that are likely to share some with one."""
    catalog = repo.catalog
    ids = catalog.ids(version.run)

    def is_at_hand(version_id: str) -> bool:
        """Return whether a version is here with some of its content."""
        found = catalog.find(version_id)
        return found is not None and not found.deleted and found.level != "record"

    near = near_versions(
        catalog,
        version,
        ids=ids,
        place=ids.index(version.id) if version.id in ids else len(ids),
        heads=newest_heads(catalog),
        wanted=is_at_hand,
    )
    tables: list[PieceTable] = []
    for one in near:
        try:
            tables.append(read_manifest(repo.backend, one).pieces)
        except errors.IntegrityError:  # that one is damaged: nothing is known of it
            continue
    gone = {pack for table in tables for pack in table.packs if catalog.gone([pack_key(pack)])}
    return KnownPieces(tables, without=gone)
