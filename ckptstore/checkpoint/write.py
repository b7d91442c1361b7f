"""From pieces to a version: packs, manifest and one commit, in that order. Needs no torch.

Nothing is visible before the commit, and the commit never names anything that is not durable. A
failure anywhere raises and leaves no version; what was written before it is an orphan for gc.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ckptstore import limits
from ckptstore.catalog import changes
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_metrics
from ckptstore.checkpoint import pacing
from ckptstore.checkpoint.content import content_digest
from ckptstore.checkpoint.encode import Content, Encoded, encode_content
from ckptstore.checkpoint.kept import noting
from ckptstore.checkpoint.manifests import Manifests
from ckptstore.checkpoint.older import ancestors, older_of
from ckptstore.checkpoint.sizes import role_bytes
from ckptstore.codecs.registry import check_choice
from ckptstore.config import Options
from ckptstore.errors import CondemnedError, FormatError, IntegrityError
from ckptstore.events import ProgressCallback, silent
from ckptstore.format import manifest as manifests
from ckptstore.format.commit import ManifestPointer, Op
from ckptstore.format.keys import manifest_key, pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.names import check_listed, encode_metadata
from ckptstore.hashing import blake3_hex
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.deltas import Deltas, Keyframes, Older
from ckptstore.objects.index import KnownPieces
from ckptstore.objects.writer import Written, write_pieces
from ckptstore.repo import Repo

__all__ = [
    "Content",
    "WriteRequest",
    "check_wishes",
    "save_ops",
    "shareable",
    "write_version",
]

_log = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """What the catalog is to say of a version, besides what it holds."""

    run: str
    step: int
    directions: Mapping[str, str] = field(default_factory=dict)
    """Which way each metric gets better, for a run that is new."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    codec: str = "auto"
    derive: bool = True
    """Tensors that are another one, rounded, are stored as recipes."""

    def plain(self) -> WriteRequest:
        """Return the same in values of its own, which no one changes and a pickle can hold.

        Raises
        ------
        InvalidInputError, LimitError
            A metric, or the metadata, is not accepted; or `tags` is a single text.
        """
        step = self.step
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):  # what is no integer is refused with the rest
                step = operator.index(step)
        return WriteRequest(
            run=self.run,
            step=step,
            directions=dict(self.directions),
            metrics=check_metrics(self.metrics),
            tags=tuple(check_listed(self.tags, "tags")),
            metadata=msgspec.json.decode(encode_metadata(self.metadata)),
            codec=self.codec,
            derive=self.derive,
        )


def _nothing() -> None:
    """Let a commit go ahead."""


def write_version(
    repo: Repo,
    cache: Manifests,
    content: Content,
    request: WriteRequest,
    *,
    version: str,
    options: Options | None = None,
    receipt: Mapping[str, float] | None = None,
    blocked_since: float | None = None,
    progress: ProgressCallback = silent,
    before_commit: Callable[[], None] = _nothing,
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
    _wishes(catalog, request, version=version)
    parent = catalog.head(request.run) if catalog.has_run(request.run) else None
    before = None if parent is None else _readable(cache, parent)
    shared = [] if before is None else [before.pieces]
    options = options or repo.options
    proved = frozenset() if parent is None else cache.proved(parent)
    encoded, measured = _encoded(repo, content, before, options, request, proved)
    content = encoded.content
    saving = _Saving(
        repo=repo,
        request=replace(request, metadata=noting(request.metadata, encoded.kept)),
        version=version,
        content=content,
        options=options,
        receipt={**(receipt or {}), **measured},
        blocked_since=blocked_since,
        progress=progress,
        before_commit=before_commit,
    )
    if check_choice(request.codec) == "delta":
        saving.keyframes = cache.keyframes
        saving.older = _older(repo, cache, content, parent if shared else None)
    manifest, pointer = saving.run(shared)
    cache.keep(pointer.digest, manifest, proved=encoded.proved)
    return repo.log.catalog.version(version), saving.receipt


def check_wishes(repo: Repo, request: WriteRequest) -> None:
    """Raise now what the commit would raise for a name, a metric, a tag, metadata or a step.

    Raises
    ------
    InvalidInputError, LimitError
        One of them is not accepted.
    """
    _wishes(repo.catalog, request, version="0" * 32)


def shareable(cache: Manifests, parent: Version) -> list[PieceTable]:
    """Return what can be shared with the parent; damage to it must not stop the training."""
    before = _readable(cache, parent)
    return [] if before is None else [before.pieces]


def _readable(cache: Manifests, parent: Version) -> Manifest | None:
    """Return the manifest of the parent, if anything can be shared with it."""
    if parent.level == "record":
        return None
    if parent.damaged:
        _log.warning("nothing is shared with version #%s, parts of which are lost", parent.id[:8])
        return None
    try:
        return cache.load(parent)
    except (IntegrityError, FormatError) as error:
        _log.warning("nothing is shared with the version before, which is damaged: %s", error)
        return None


def _encoded(
    repo: Repo,
    content: Content,
    before: Manifest | None,
    options: Options,
    request: WriteRequest,
    proved: Collection[int],
) -> tuple[Encoded, dict[str, float]]:
    """Return what is written of a state, and what the receipt says of it."""
    began = repo.environment.monotonic()
    encoded = encode_content(
        content,
        parent=before,
        chunk_bytes=repo.superblock.chunk_bytes,
        workers=options.workers,
        derive=request.derive,
        proved=proved,
    )
    if not encoded.numbers:
        return encoded, {}
    return encoded, {**encoded.numbers, "measuring_s": repo.environment.monotonic() - began}


def _older(repo: Repo, cache: Manifests, content: Content, parent: Version | None) -> Older:
    """Return what a save may take deltas to, and know what those took that were taken already."""
    before = None if parent is None else cache.load(parent)
    chunk_bytes = repo.superblock.chunk_bytes
    older = older_of(content.records, content.frame, before, chunk_bytes=chunk_bytes)
    if parent is not None and (unknown := cache.keyframes.unknown(older.table)):
        cache.keyframes.learn(ancestors(cache, repo.catalog, parent), unknown)
    return older


_NOWHERE = ManifestPointer(
    key=manifest_key("0" * 32), stored_bytes=0, digest="0" * 64
)  # for the trial that refuses bad names before a byte is written


@dataclass(slots=True, kw_only=True)
class _Saving:
    """One save under way; owned by the calling thread."""

    repo: Repo
    request: WriteRequest
    version: str
    content: Content
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
        environment = self.repo.environment
        written: list[Written] = []
        without: set[str] = set()
        name = self.version
        for attempt in range(limits.CONDEMNED_TRIES_MAX):
            tables = [*(part.table for part in reversed(written)), *shared]
            written.append(self._write(KnownPieces(tables, without=without), without))
            began = environment.monotonic()
            committing = self.receipt.get("committing_s", 0.0)
            manifest, pointer = self._describe(written[-1], name)
            packs = {pack_key(pack): pack for pack in manifest.pieces.packs}
            roles = role_bytes(
                self.content.records, written, visible_count=self.content.visible_count
            )
            self._count(roles)

            def build(
                now: Catalog,
                pointer: ManifestPointer = pointer,
                roles: dict[str, RoleBytes] = roles,
                content: str = content_digest(manifest),
                relies_on: tuple[str, ...] = (pointer.key, *packs),
                spent: float = committing - began,
            ) -> list[Op]:
                self.before_commit()
                self._clock(spent)
                return save_ops(
                    now,
                    self.request,
                    version=self.version,
                    pointer=pointer,
                    content=content,
                    roles=roles,
                    receipt=self.receipt,
                    relies_on=relies_on,
                )

            try:
                self.repo.log.append(build)
            except CondemnedError as error:
                if attempt + 1 == limits.CONDEMNED_TRIES_MAX:
                    raise
                without.update(packs[key] for key in error.keys if key in packs)
                name = environment.random_hex(16)  # a name is never used again
            else:
                return manifest, pointer
            finally:
                self._clock(committing - began)
        raise AssertionError  # pragma: no cover - the loop has no other end

    def _write(self, known: KnownPieces, without: Collection[str]) -> Written:
        repo = self.repo
        deltas = None
        if self.older is not None and self.keyframes is not None:
            deltas = Deltas(
                older=self.older,
                keyframes=self.keyframes,
                backend=repo.backend,
                options=self.options,
                without=without,
            )
        choice, chosen = pacing.choose(repo, self.request.codec, workers=self.options.workers)
        self.receipt.update(chosen)
        began = repo.environment.monotonic()
        written = write_pieces(
            self.content.sources,
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
        pacing.learn(repo, choice, written, wall_s=spent)
        self._add("packs_s", spent)
        for name, seconds in written.seconds.items():
            self._add(name, seconds)
        self._add("pack_bytes", float(written.pack_bytes))
        self._add("packs_count", float(written.packs_count))
        self.receipt["tensors_count"] = float(
            self.content.visible_count or len(self.content.records)
        )
        return written

    def _describe(self, written: Written, name: str) -> tuple[Manifest, ManifestPointer]:
        """Write the manifest; return it and where it is."""
        manifest = Manifest(
            version=self.version,
            chunk_bytes=self.repo.superblock.chunk_bytes,
            skeleton=self.content.frame,
            tensors=self.content.records,
            first=written.first,
            pieces=written.table,
        )
        data = manifests.encode(manifest)
        key = manifest_key(name)
        self.repo.backend.put(key, data)
        return manifest, ManifestPointer(key=key, stored_bytes=len(data), digest=blake3_hex(data))

    def _count(self, roles: Mapping[str, RoleBytes]) -> None:
        """Note the bytes of all roles."""
        logical = sum(part.logical for part in roles.values())
        new = sum(part.new for part in roles.values())
        self.receipt["logical_bytes"] = float(logical)
        self.receipt["new_bytes"] = float(new)
        self.receipt["shared_bytes"] = float(logical - new)
        self.receipt["stored_bytes"] = float(sum(part.stored for part in roles.values()))

    def _clock(self, spent: float) -> None:
        """Note how long it took up to now."""
        now = self.repo.environment.monotonic()
        self.receipt["committing_s"] = spent + now
        if self.blocked_since is not None:
            self.receipt["blocked_s"] = now - self.blocked_since

    def _add(self, name: str, value: float) -> None:
        self.receipt[name] = self.receipt.get(name, 0.0) + value


def _wishes(catalog: Catalog, request: WriteRequest, *, version: str) -> None:
    save_ops(
        catalog,
        request,
        version=version,
        pointer=_NOWHERE,
        content="0" * 64,
        roles={},
        receipt={},
        relies_on=(),
    )


def save_ops(
    catalog: Catalog,
    request: WriteRequest,
    *,
    version: str,
    pointer: ManifestPointer,
    content: str,
    roles: Mapping[str, RoleBytes],
    receipt: Mapping[str, float],
    relies_on: Collection[str],
) -> list[Op]:
    """Return the operations that make a version visible; see :func:`changes.save`."""
    return changes.save(
        catalog,
        run=request.run,
        version=version,
        step=request.step,
        manifest=pointer,
        content=content,
        directions=request.directions,
        metrics=request.metrics,
        tags=request.tags,
        metadata=request.metadata,
        roles=roles,
        receipt=receipt,
        relies_on=relies_on,
    )
