"""Moves of versions to other manifests: the records of them, and the commits that carry them out.

The new manifest is written first, so that a crash before the commit leaves an orphan and the
version as it was. The commit that makes the version point to it condemns the manifest before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ckptstore.catalog import content_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.content_ops import Move
from ckptstore.catalog.levels import Level
from ckptstore.catalog.state import Op
from ckptstore.checkpoint.content import content_digest
from ckptstore.config import check_choice
from ckptstore.errors import IntegrityError
from ckptstore.events import silent
from ckptstore.format.manifest import Manifest
from ckptstore.manifests import relied_on
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.index import KnownPieces, Location
from ckptstore.objects.piece_writer import write_pieces
from ckptstore.objects.sources import PieceSource
from ckptstore.repo import Repo

T = TypeVar("T")


def write_move(
    repo: Repo,
    version: Version,
    manifest: Manifest,
    *,
    level: Level | None = None,
    roles: Mapping[str, RoleBytes] | None = None,
) -> Move:
    """Write a manifest under a name of its own; return the move of a version to it.

    Parameters
    ----------
    level
        The level of the version from then on; None where its pieces only lie elsewhere.
    roles
        Bytes by role that are then stored; None for those of the version.

    Raises
    ------
    StorageError
        It could not be written.
    """
    pointer = repo.manifests.put(manifest)
    return Move(
        version=version.id,
        based_on=version.manifest_digest,
        level=level or version.level,
        manifest=pointer,
        content=version.content if level is None else content_digest(manifest),
        roles=version.roles if roles is None else roles,
        relies_on=relied_on(pointer, manifest),
    )


def write_alone(
    repo: Repo, pieces: Mapping[bytes, PieceSource], *, codec: str = "auto"
) -> tuple[dict[bytes, Location], int]:
    """Write pieces, given by their ids, to new chunks, which hold nothing else.

    Returns
    -------
    tuple
        Where each lies, durable, and the bytes of the new packs.

    Raises
    ------
    IntegrityError
        A piece changed in memory meanwhile.
    StorageError
        The storage failed.
    """
    written = write_pieces(
        list(pieces.values()),
        backend=repo.backend,
        environment=repo.environment,
        options=repo.options,
        known=KnownPieces([]),
        chunk_bytes=max(repo.chunk_bytes, *(source.nbytes for source in pieces.values())),
        choice=check_choice(codec),
        progress=silent,
    )
    known = KnownPieces([written.table])
    places: dict[bytes, Location] = {}
    for piece_id, source in pieces.items():
        place = known.find(piece_id, source.nbytes)
        if place is None:  # pragma: no cover - its digest was checked before
            msg = f"a piece of {source.nbytes} bytes changed in memory while it was written"
            raise IntegrityError(msg)
        places[piece_id] = place
    return places, written.pack_bytes


def record_move(version: Version) -> Move:
    """Return the move by which only the record of a version is kept."""
    return Move(
        version=version.id,
        based_on=version.manifest_digest,
        level="record",
        manifest=None,
        content=version.content,
    )


def still(now: Catalog, move: Move) -> bool:
    """Return whether a version is there, and lies where it did when its move was made."""
    version = now.version(move.version)
    return not version.deleted and version.manifest_digest == move.based_on


def relocating(catalog: Catalog, moves: Sequence[Move]) -> list[Op]:
    """Return the operations that carry moves out and condemn the manifests that they replace.

    Raises
    ------
    CommitConflictError, CondemnedError, PolicyError
        As :func:`ckptstore.catalog.content_ops.relocate`.
    """
    replaced = [catalog.version(move.version).manifest_key for move in moves]
    return [*content_ops.relocate(catalog, moves), *content_ops.condemn(catalog, replaced)]


def relocate(repo: Repo, choose: Callable[[Catalog], Sequence[Move]]) -> Sequence[Move]:
    """Commit moves; return those that were carried out.

    Parameters
    ----------
    choose
        Returns the moves that stand on the catalog that the commit follows; with none of them,
        nothing is committed. It may refuse by raising.

    Raises
    ------
    CommitConflictError, CondemnedError, PolicyError
        As :func:`relocating`; nothing was committed.
    CkptStoreError
        As :meth:`ckptstore.catalog.log.Log.append`, and what `choose` raises.
    """
    moves: Sequence[Move] = ()

    def build(now: Catalog) -> list[Op]:
        nonlocal moves
        moves = choose(now)
        return relocating(now, moves)

    return moves if repo.log.append_any(build) is not None else ()
