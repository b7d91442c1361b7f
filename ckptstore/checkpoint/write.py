"""From pieces to a version: packs, manifest and one commit, in that order. Needs no torch.

Nothing is visible before the commit, and the commit never names anything that is not durable. A
failure anywhere raises and leaves no version; what was written before it is an orphan for gc.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.state import Op
from ckptstore.checkpoint import save_speed
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.encode import Draft, encode_draft, listing
from ckptstore.checkpoint.request import WriteRequest, check_wishes, save_ops
from ckptstore.checkpoint.role_sizes import role_bytes
from ckptstore.codecs.codec_table import check_choice
from ckptstore.committing import commit_retrying
from ckptstore.config import Options
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import skeleton
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.deltas import Deltas, Keyframes, Older
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.piece_writer import Written, write_pieces
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")

# Versions before the parent whose manifests are read to learn what the deltas to a keyframe took.
# Source: cycles of a GPT have up to 9 versions (docs/design/0012-deltas.md); of a longer one, a
# part tells too, and a new process asks once.
_ANCESTORS_MAX = 8

_DIGITS = re.compile(r"\d+")

_NO_TABLE = PieceTable(
    ids=np.zeros((0, 32), np.uint8),
    raw=np.zeros(0, np.uint32),
    pack=np.zeros(0, np.uint32),
    offset=np.zeros(0, np.uint64),
    stored=np.zeros(0, np.uint32),
    inner=np.zeros(0, np.uint32),
    slab=np.zeros(0, np.uint32),
    packs=(),
)


def _go_ahead() -> None:
    """Let a commit go ahead."""


def write_version(
    repo: Repo,
    draft: Draft,
    request: WriteRequest,
    *,
    version: str,
    options: Options | None = None,
    receipt: Mapping[str, float] | None = None,
    blocked_since: float | None = None,
    progress: ProgressCallback = silent,
    before_commit: Callable[[], None] = _go_ahead,
) -> tuple[Version, dict[str, float]]:
    """Write everything and commit it; return the version, and the receipt with all of its seconds.

    Pieces that the run's head holds already are shared with it. What a collection condemns between
    the look-up and the commit is written again under new names: the check and the commit are one
    step on the log.

    Parameters
    ----------
    version
        Its id: 32 hex digits, never used before.
    options
        Other threads and memory than the store's.
    receipt
        What is known already (``blocked_s``, ``staging_s``); kept with the version. The seconds of
        the commit itself are in the receipt that is returned, and in the catalog only up to it.
    blocked_since
        When the caller began to wait, if it waits for all of this; on the environment's clock.
    before_commit
        Called right before each try to commit; what it raises is raised, and nothing is committed.

    Raises
    ------
    InvalidInputError
        A name, metric, tag or step is not accepted; nothing was written.
    CondemnedError
        Collections condemned what this save wrote, again and again.
    StorageError
        The storage failed; no version appeared.
    """
    catalog = repo.log.refresh()
    check_wishes(catalog, request, version=version)
    parent = catalog.head(request.run) if catalog.has_run(request.run) else None
    before = None if parent is None else _readable(repo, parent)
    shared = [] if before is None else [before.pieces]
    options = options or repo.options
    proved = frozenset() if parent is None else repo.manifests.proved(parent)
    draft, measured = _encoded(repo, draft, before, options, request, proved)
    saving = _VersionWrite(
        repo=repo,
        request=replace(request, metadata=listing(request.metadata, draft.fallbacks)),
        version=version,
        draft=draft,
        options=options,
        receipt={**(receipt or {}), **measured},
        blocked_since=blocked_since,
        progress=progress,
        before_commit=before_commit,
    )
    if check_choice(request.codec) == "delta":
        saving.keyframes = repo.manifests.keyframes
        saving.older = _older(repo, draft, parent if shared else None)
    manifest, pointer = saving.run(shared)
    repo.manifests.keep(pointer.digest, manifest, proved=draft.proved)
    return repo.log.catalog.version(version), saving.receipt


def shareable(repo: Repo, parent: Version) -> list[PieceTable]:
    """Return what can be shared with the parent; damage to it must not stop the training."""
    before = _readable(repo, parent)
    return [] if before is None else [before.pieces]


def _readable(repo: Repo, parent: Version) -> Manifest | None:
    """Return the manifest of the parent, if anything can be shared with it."""
    if parent.level == "record":
        return None
    if parent.damaged:
        _log.warning("nothing is shared with version #%s, parts of which are lost", parent.id[:8])
        return None
    try:
        return repo.manifests.load(parent)
    except (IntegrityError, FormatError) as error:
        _log.warning("nothing is shared with the version before, which is damaged: %s", error)
        return None


def _encoded(
    repo: Repo,
    draft: Draft,
    before: Manifest | None,
    options: Options,
    request: WriteRequest,
    proved: Collection[int],
) -> tuple[Draft, dict[str, float]]:
    """Return what is written of a state, and what the receipt says of it."""
    began = repo.environment.monotonic()
    encoded = encode_draft(
        draft,
        parent=before,
        chunk_bytes=repo.superblock.chunk_bytes,
        workers=options.workers,
        derive=request.derive,
        proved=proved,
    )
    if not encoded.numbers:
        return encoded, {}
    return encoded, {**encoded.numbers, "measuring_s": repo.environment.monotonic() - began}


def _older(repo: Repo, draft: Draft, parent: Version | None) -> Older:
    """Return what a save may take deltas to.

    How many bytes earlier deltas to the same keyframes took is learned from older versions, where
    this process does not know it: that decides when a new keyframe pays.
    """
    before = None if parent is None else repo.manifests.load(parent)
    chunk_bytes = repo.superblock.chunk_bytes
    older = _matched(draft.records, draft.frame, before, chunk_bytes=chunk_bytes)
    if parent is not None and (unknown := repo.manifests.keyframes.unknown(older.table)):
        repo.manifests.keyframes.learn(_ancestors(repo, repo.catalog, parent), unknown)
    return older


@dataclass(slots=True, kw_only=True)
class _VersionWrite:
    """One save under way; owned by the calling thread."""

    repo: Repo
    request: WriteRequest
    version: str
    draft: Draft
    options: Options
    receipt: dict[str, float]
    blocked_since: float | None
    progress: ProgressCallback
    before_commit: Callable[[], None]
    older: Older | None = None
    """What deltas may be taken to; None if none are wanted."""
    keyframes: Keyframes | None = None

    def run(self, shared: list[PieceTable]) -> tuple[Manifest, ManifestPointer]:
        """Write and commit, again if something was condemned; return manifest and place."""
        written: list[Written] = []

        def attempt(condemned: set[str]) -> tuple[Manifest, ManifestPointer]:
            """Write what is not known elsewhere, and commit."""
            tables = [*(part.table for part in reversed(written)), *shared]
            written.append(self._write(KnownPieces(tables, without=condemned), condemned))
            began = self.repo.environment.monotonic() - self.receipt.get("committing_s", 0.0)
            name = self.version if len(written) == 1 else ""  # a name is never used again
            manifest, pointer = self._describe(written[-1], name)
            self._commit(manifest, pointer, written, began=began)
            return manifest, pointer

        return commit_retrying(attempt)

    def _commit(
        self,
        manifest: Manifest,
        pointer: ManifestPointer,
        written: Sequence[Written],
        *,
        began: float,
    ) -> None:
        """Make the version visible; raise CondemnedError if something of it was condemned.

        Parameters
        ----------
        written
            What each try to save it has written.
        began
            When committing began; earlier by what tries before took.
        """
        visible_count = self.draft.visible_count
        roles = role_bytes(self.draft.records, written, visible_count=visible_count)
        self._count(roles)
        content = content_digest(manifest)

        def build(now: Catalog) -> list[Op]:
            """Return the operations of the commit that follows a catalog."""
            self.before_commit()
            self._clock(began)
            return save_ops(
                now,
                self.request,
                version=self.version,
                pointer=pointer,
                content=content,
                roles=roles,
                receipt=self.receipt,
                relies_on=relied_on(pointer, manifest),
            )

        try:
            self.repo.log.append(build)
        finally:
            self._clock(began)

    def _write(self, known: KnownPieces, condemned: Collection[str]) -> Written:
        """Write the packs; without those that were condemned, share what is known."""
        repo = self.repo
        deltas = None
        if self.older is not None and self.keyframes is not None:
            deltas = Deltas(
                older=self.older,
                keyframes=self.keyframes,
                backend=repo.backend,
                options=self.options,
                without=condemned,
            )
        choice, chosen = save_speed.choose(repo, self.request.codec, workers=self.options.workers)
        self.receipt.update(chosen)
        began = repo.environment.monotonic()
        written = write_pieces(
            self.draft.sources,
            backend=repo.backend,
            environment=repo.environment,
            options=self.options,
            known=known,
            chunk_bytes=repo.superblock.chunk_bytes,
            choice=choice,
            progress=self.progress,
            deltas=deltas,
        )
        spent = repo.environment.monotonic() - began
        save_speed.learn(repo, choice, written, wall_s=spent)
        self._add("packs_s", spent)
        for name, seconds in written.seconds.items():
            self._add(name, seconds)
        self._add("pack_bytes", float(written.pack_bytes))
        self._add("packs_count", float(written.packs_count))
        self.receipt["tensors_count"] = float(self.draft.visible_count or len(self.draft.records))
        return written

    def _describe(self, written: Written, name: str) -> tuple[Manifest, ManifestPointer]:
        """Write the manifest; return it and where it is."""
        manifest = Manifest(
            version=self.version,
            chunk_bytes=self.repo.superblock.chunk_bytes,
            skeleton=self.draft.frame,
            tensors=self.draft.records,
            first=written.first,
            pieces=written.table,
        )
        return manifest, self.repo.manifests.put(manifest, name=name)

    def _count(self, roles: Mapping[str, RoleBytes]) -> None:
        """Note the bytes of all roles."""
        logical = sum(part.logical for part in roles.values())
        new = sum(part.new for part in roles.values())
        self.receipt["logical_bytes"] = float(logical)
        self.receipt["new_bytes"] = float(new)
        self.receipt["shared_bytes"] = float(logical - new)
        self.receipt["stored_bytes"] = float(sum(part.stored for part in roles.values()))

    def _clock(self, began: float) -> None:
        """Note how long it took up to now."""
        now = self.repo.environment.monotonic()
        self.receipt["committing_s"] = now - began
        if self.blocked_since is not None:
            self.receipt["blocked_s"] = now - self.blocked_since

    def _add(self, name: str, value: float) -> None:
        self.receipt[name] = self.receipt.get(name, 0.0) + value


# --- what deltas are taken to ---------------------------------------------------------------------


def _matched(
    records: Sequence[TensorRecord], frame: bytes, parent: Manifest | None, *, chunk_bytes: int
) -> Older:
    """Return where the tensors of a save have their places in the version before.

    A tensor has one if that version has a tensor of the same path, dtype, shape and order, cut on
    the same grid. Tensors that no path names, but the recipe of one, count by that one's path.

    Parameters
    ----------
    records, frame
        What is saved: its tensors, and the encoded skeleton.
    parent
        The version before; None if there is none.
    """
    names = _names(records, frame)
    kinds = tuple(map(_kind, names, records))
    if parent is None or parent.chunk_bytes != chunk_bytes:
        none = (None,) * len(records)
        return Older(table=_NO_TABLE, rows=none, counts=(0,) * len(records), kinds=kinds)
    old_names = _names(parent.tensors, parent.skeleton)
    there = {name: index for index, name in enumerate(old_names) if name}
    rows: list[int | None] = []
    counts: list[int] = []
    for record, name in zip(records, names, strict=True):
        index = None if name is None else there.get(name)
        same = index is not None and _is_same(record, parent.tensors[index])
        rows.append(parent.first[index] if same and index is not None else None)
        counts.append(parent.first[index + 1] - parent.first[index] if index is not None else 0)
    return Older(table=parent.pieces, rows=tuple(rows), counts=tuple(counts), kinds=kinds)


_Name = tuple[Path, int]
"""The first path of a tensor and -1; of a source of its recipe the place of that among them."""


def _names(records: Sequence[TensorRecord], frame: bytes) -> list[_Name | None]:
    found: list[_Name | None] = [None] * len(records)
    for leaf in skeleton.iter_leaves(skeleton.decode(frame)):
        if found[leaf.index] is None:
            found[leaf.index] = (leaf.path, -1)
    for record, name in zip(records, list(found), strict=True):
        for place, source in enumerate(record.recipe.sources if record.recipe and name else ()):
            if found[source] is None and name is not None:
                found[source] = (name[0], place)
    return found


def _text(name: _Name | None) -> str:
    return "" if name is None else f"{path_text(name[0])} {name[1]}"


def _kind(name: _Name | None, record: TensorRecord) -> str:
    """Return what tensors have in common that change alike: a path but for numbers, and a shape.

    An optimizer keeps its states under numbers alone: there it is the shape that tells the moments
    of an embedding from those of other weights.
    """
    return f"{_DIGITS.sub('#', _text(name))} {list(record.shape)}"


def _is_same(one: TensorRecord, two: TensorRecord) -> bool:
    plain = one.blocks is None and two.blocks is None and one.recipe is None and two.recipe is None
    return plain and one.identity == two.identity


def _ancestors(repo: Repo, catalog: Catalog, version: Version) -> Iterator[PieceTable]:
    """Yield the tables of a version and of those before it, newest first, as far as can be read."""
    for _ in range(1 + _ANCESTORS_MAX):
        if version.level == "record":
            return
        try:
            yield repo.manifests.load(version).pieces
        except (IntegrityError, FormatError):
            return
        if not version.parent or not catalog.has_version(version.parent):
            return
        version = catalog.version(version.parent)
        if version.deleted:
            return
