"""From pieces to a version: packs, manifest and one commit, in that order. Needs no torch.

Nothing is visible before the commit, and the commit never names anything that is not durable. A
failure anywhere raises and leaves no version; what was written before it is an orphan for gc.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckptstore.backends.transfers import receipt_entries
from ckptstore.checkpoint.encode import Draft, encode_draft, listing
from ckptstore.checkpoint.request import WriteRequest, check_wishes, commit_version
from ckptstore.committing import commit_retrying
from ckptstore.config import Options, check_choice
from ckptstore.errors import FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import skeleton
from ckptstore.format.fields import ManifestPointer
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.paths import Path, path_text
from ckptstore.format.roles import RULE
from ckptstore.model import Version
from ckptstore.objects.auto_codec import auto_codec
from ckptstore.objects.deltas import Deltas, Older
from ckptstore.objects.index import KnownPieces, placed_table
from ckptstore.objects.piece_writer import Written, write_pieces
from ckptstore.objects.sources import Source
from ckptstore.repo import Repo

_log = logging.getLogger("ckptstore")

_DIGITS = re.compile(r"\d+")

_NO_TABLE = placed_table(np.zeros((0, 32), np.uint8), np.zeros(0, np.uint32), ())


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
    before_commit: Callable[[], None] = lambda: None,
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
    catalog = repo.log.refresh(writing=True)
    check_wishes(catalog, request, version=version)
    parent = catalog.head(request.run) if catalog.has_run(request.run) else None
    before = _readable(repo, parent)
    shared = [] if before is None else [before.pieces]
    options = options or repo.options
    proved = frozenset() if parent is None else repo.manifests.proved(parent)
    began = repo.environment.monotonic()
    draft = encode_draft(
        draft,
        parent=before,
        chunk_bytes=repo.chunk_bytes,
        workers=options.workers,
        derive=request.derive,
        proved=proved,
    )
    told = {**(receipt or {}), **draft.numbers}
    if draft.numbers:
        told["measuring_s"] = repo.environment.monotonic() - began
    request = replace(request, metadata=listing(request.metadata, draft.fallbacks))
    older: Older | None = None
    if check_choice(request.codec) == "delta":
        older = _matched(draft.records, draft.frame, before, chunk_bytes=repo.chunk_bytes)
    written: list[Written] = []

    def attempt(condemned: set[str]) -> tuple[Manifest, ManifestPointer]:
        """Write all but what is known elsewhere and not condemned, and commit."""
        tables = [*(part.table for part in reversed(written)), *shared]
        written.append(
            write_tensors(
                repo,
                draft.sources,
                KnownPieces(tables, without=condemned),
                told,
                codec=request.codec,
                options=options,
                progress=progress,
                deltas=_deltas(repo, older, options, condemned),
            )
        )
        told["tensors_count"] = float(draft.visible_count or len(draft.records))
        began = repo.environment.monotonic() - told.get("committing_s", 0.0)
        name = version if len(written) == 1 else ""  # a name is never used again
        manifest = Manifest(
            version=version,
            chunk_bytes=repo.chunk_bytes,
            skeleton=draft.frame,
            tensors=draft.records,
            first=written[-1].first,
            pieces=written[-1].table,
            rule=RULE,
        )
        pointer = repo.manifests.put(manifest, name=name)
        told.update(receipt_entries(repo.backend.transfers))
        commit_version(
            repo, request, manifest, pointer, written, receipt=told, began=began,
            blocked_since=blocked_since, visible_count=draft.visible_count,
            before_commit=before_commit,
        )  # fmt: skip
        return manifest, pointer

    manifest, pointer = commit_retrying(attempt)
    repo.manifests.keep(pointer.digest, manifest, proved=draft.proved)
    return repo.log.catalog.version(version), told


def shareable(repo: Repo, parent: Version | None) -> list[PieceTable]:
    """Return what can be shared with the parent; damage to it must not stop the training."""
    before = _readable(repo, parent)
    return [] if before is None else [before.pieces]


def _readable(repo: Repo, parent: Version | None) -> Manifest | None:
    """Return the manifest of the parent, if anything can be shared with it."""
    if parent is None or parent.level == "record":
        return None
    if parent.damaged:
        _log.warning("nothing is shared with version #%s, parts of which are lost", parent.id[:8])
        return None
    try:
        return repo.manifests.load(parent)
    except (IntegrityError, FormatError) as error:
        _log.warning("nothing is shared with the version before, which is damaged: %s", error)
        return None


def _deltas(
    repo: Repo, older: Older | None, options: Options, condemned: Collection[str]
) -> Deltas | None:
    if older is None:
        return None
    return Deltas(
        older=older,
        keyframes=repo.manifests.keyframes,
        backend=repo.backend,
        options=options,
        without=condemned,
    )


def write_tensors(
    repo: Repo,
    sources: Sequence[Source],
    known: KnownPieces,
    receipt: dict[str, float],
    *,
    codec: str,
    options: Options,
    progress: ProgressCallback,
    deltas: Deltas | None = None,
) -> Written:
    """Write the pieces of tensors that are not known.

    Parameters
    ----------
    receipt
        Gets the choice of the codec, and seconds and bytes, added to those that it has.
    """
    choice = check_choice(codec)
    if choice == "auto":
        speed = repo.backend.capabilities.write_bytes_per_s
        choice = auto_codec(speed, workers=options.workers)
        receipt["auto_planes"] = float(choice == "planes")
    began = repo.environment.monotonic()
    written = write_pieces(
        sources,
        backend=repo.backend,
        environment=repo.environment,
        options=options,
        known=known,
        chunk_bytes=repo.chunk_bytes,
        choice=choice,
        progress=progress,
        deltas=deltas,
    )
    wall_s = repo.environment.monotonic() - began
    sums = {
        "packs_s": wall_s,
        **written.seconds,
        "pack_bytes": float(written.pack_bytes),
        "packs_count": float(written.packs_count),
    }
    for name, value in sums.items():
        receipt[name] = receipt.get(name, 0.0) + value
    return written


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
        found[leaf.index] = found[leaf.index] or (leaf.path, -1)
    for record, name in zip(records, list(found), strict=True):
        if record.recipe is not None and name is not None:
            for place, source in enumerate(record.recipe.sources):
                found[source] = found[source] or (name[0], place)
    return found


def _kind(name: _Name | None, record: TensorRecord) -> str:
    """Return what tensors have in common that change alike: a path but for numbers, and a shape.

    An optimizer keeps its states under numbers alone: there it is the shape that tells the moments
    of an embedding from those of other weights.
    """
    text = "" if name is None else f"{path_text(name[0])} {name[1]}"
    return f"{_DIGITS.sub('#', text)} {list(record.shape)}"


def _is_same(one: TensorRecord, two: TensorRecord) -> bool:
    plain = one.blocks is None and two.blocks is None and one.recipe is None and two.recipe is None
    return plain and one.identity == two.identity
