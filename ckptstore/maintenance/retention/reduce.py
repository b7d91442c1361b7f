"""The part of a version that a level keeps: its manifest, and packs of rewritten tensors.

The weights part is: the tensors of role ``weights``, by the roles that are fixed for the run, then
as the roles were when they were saved; and plain values, but those of a part of the state whose
tensors all go, or which :mod:`ckptstore.format.roles` counts to the optimizer, the generators or
the data. A role that an older rule gave does not make a tensor go. A tensor that the weights share
with another part of the state stays with the weights.

Tensors stay where they lie wherever they can. Two kinds must be written: those that the level
rounds, and those that follow from a tensor that goes, such as bfloat16 weights stored as
their float32 masters alone; to keep the masters hidden would cost twice the size of the weights.
New pieces are shared with versions that were aged before, and with what stays: frozen weights that
many versions have in common are rounded once for all of them. They are no deltas; those that stay
keep their bases. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ckptstore.backends.base import Backend, Buffer, ObjectWriter
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog.levels import Level
from ckptstore.catalog.retention import fixed_roles
from ckptstore.checkpoint.content import Content, logical_bytes, read_content
from ckptstore.checkpoint.encoded_sources import source_of
from ckptstore.checkpoint.selection import part_of
from ckptstore.checkpoint.stored_sources import StoredBytes
from ckptstore.checkpoint.write import shareable
from ckptstore.config import check_choice
from ckptstore.encodings.encoding import Encoding
from ckptstore.events import silent
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable, TensorRecord
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.format.paths import Path, Pattern, path_text
from ckptstore.format.roles import Judgement, RoleRules
from ckptstore.format.skeleton import prune, retyped
from ckptstore.maintenance.retention.round_tensor import Coding, round_tensor, wanted
from ckptstore.maintenance.retention.rounding_report import RoundedTensor, Rounding
from ckptstore.model import RoleBytes, Version
from ckptstore.objects.index import KnownPieces, location_of, placed_table
from ckptstore.objects.piece_writer import Written, write_pieces
from ckptstore.objects.sources import Source
from ckptstore.repo import Repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Part of a version that is to be kept, and its form."""

    level: Level
    encodings: tuple[Encoding, ...] = ()
    """Forms that weights are rounded to, and how far they may change by it: the first that a
    tensor is within the bounds of. None: they stay as they are."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """The part of a version that stays, where more than the record is kept."""

    manifest: Manifest
    roles: dict[str, RoleBytes]
    rounding: Rounding | None
    """The result for its tensors; None if none had to be written."""
    dropped: Mapping[str, int]
    """Name to bytes in memory of the parts of the state that go."""
    reclaimable_bytes: int
    """Stored bytes that no longer have to be kept for it, less what was written. Below 0 where
    other versions go on to need the replaced pieces."""


def lower(
    repo: Repo,
    version: Version,
    target: Target,
    recent: list[PieceTable],
    *,
    backend: Backend | None = None,
) -> Lowered:
    """Return the part of a version at a level above ``record``; packs for it are durable.

    Host memory stays within ``options.host_bytes``, and what a save takes for each worker.

    Parameters
    ----------
    recent
        Where pieces lie that this process has written for others and not committed yet; those of
        this version are added.
    backend
        Where packs go; None for the store's.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    CorruptTensorError
        A tensor that has to be read is.
    StorageError
        The storage failed; nothing has changed.
    """
    part, dropped = weights_of(repo, version)
    manifest, work = part, None
    if target.encodings or (part.sources and _orphans(read_content(part))):
        content = read_content(part)
        shared = [*recent, *_alike(repo, version, target.level)]
        keys = {pack_key(pack): pack for table in shared for pack in table.packs}
        without = [keys[key] for key in repo.catalog.gone(keys)]
        tables, target_backend = [part.pieces, *shared], backend or repo.backend
        work = _Rewriting(repo, content, _orphans(content), tables, without, target_backend)
        manifest = work.run(target.encodings)
        recent.append(manifest.pieces)
    rounding = None if work is None else work.rounding
    roles, freed = _roles(manifest, version, work), _reclaimable(version, rounding)
    return Lowered(manifest, roles, rounding, dropped, reclaimable_bytes=freed)


def weigh(repo: Repo, version: Version, target: Target, recent: list[PieceTable]) -> Lowered:
    """Return the result of :func:`lower`, and keep nothing: all is read and encoded, none stored.

    Raises
    ------
    CkptStoreError
        As :func:`lower`.
    """
    return lower(repo, version, target, recent, backend=_Scales(repo.backend))


def _alike(repo: Repo, version: Version, level: Level) -> list[PieceTable]:
    """Return the pieces of the versions of the run next to one that are at a level, if any are."""
    before: Version | None = None
    after: Version | None = None
    for one in repo.catalog.versions(version.run):
        if one.id == version.id or one.level != level:
            continue
        if one.commit < version.commit:
            before = one
        elif after is None:
            after = one
    return [table for one in (before, after) if one is not None for table in shareable(repo, one)]


def _roles(manifest: Manifest, version: Version, work: _Rewriting | None) -> dict[str, RoleBytes]:
    """Return the bytes that stay by role; those that were new are at most as before."""
    none = RoleBytes(logical=0, new=0, stored=0)
    share = 1.0 if work is None else work.rounding.kept_share
    found = {}
    for role, size in logical_bytes(manifest).items():
        before = version.roles.get(role, none)
        new, stored = (0, 0) if work is None else (work.new_bytes[role], work.stored_bytes[role])
        found[role] = RoleBytes(
            logical=size,
            new=min(int(before.new * share) + new, size),
            stored=int(before.stored * share) + stored,
        )
    return found


def _reclaimable(version: Version, rounding: Rounding | None) -> int:
    """Return the bytes that the version had brought and that go, less those that were written."""
    weights = sum(part.stored for role, part in version.roles.items() if role == "weights")
    rest = sum(part.stored for part in version.roles.values()) - weights
    if rounding is None:
        return rest
    return rest + int(weights * (1 - rounding.kept_share)) - rounding.written_bytes


class _Scales(WrapperBackend):
    """Reads from a store; takes packs, and keeps nothing of them."""

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that drops what it is given."""
        return _Nowhere()


class _Nowhere(ObjectWriter):
    def write(self, data: Buffer | Sequence[Buffer]) -> None:
        """Drop it."""

    def commit(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


def roles_of(repo: Repo, version: Version) -> dict[Judgement, int]:
    """Return the parts of a state that hold tensors, with roles and reasons: bytes in memory.

    Raises
    ------
    VersionNotFoundError
        Only the record of the version is left.
    CorruptObjectError
        The version's manifest is damaged.
    StorageError
        The storage failed.
    """
    content = read_content(repo.manifests.load(version))
    found: Counter[Judgement] = Counter()
    for index, part in content.judged(fixed_roles(repo.catalog, version.run)).items():
        found[part] += content.manifest.tensors[index].nbytes
    return dict(found)


def weights_of(repo: Repo, version: Version) -> tuple[Manifest, dict[str, int]]:
    """Return the manifest of the weights part of a version; and what goes, name to bytes.

    Raises
    ------
    CorruptObjectError
        The version's manifest is damaged.
    StorageError
        The storage failed.
    """
    manifest = repo.manifests.load(version)
    if version.level != "full":
        return manifest, {}
    content = read_content(manifest)
    wanted, roles, dropped = _weights(content, fixed_roles(repo.catalog, version.run))
    return part_of(manifest, prune(content.node, wanted), roles=roles), dropped


def _weights(
    content: Content, fixed: Mapping[Pattern, str]
) -> tuple[Callable[[Path], bool], dict[int, str], dict[str, int]]:
    """Return a test for leaves of the weights part, tensors that take on their role, what goes."""
    manifest, paths = content.manifest, [leaf.path for leaf in content.leaves]
    by_index: dict[int, list[Path]] = {}
    for leaf in content.leaves:
        by_index.setdefault(leaf.index, []).append(leaf.path)
    judged = content.judged(fixed)
    rules = RoleRules(fixed, node=content.node, records=manifest.tensors)
    kept: set[Path] = set()
    changed: dict[int, str] = {}
    dropped: Counter[str] = Counter()
    for index, (first, *others) in by_index.items():
        record = manifest.tensors[index]
        # Further paths of a weight may lie in the optimizer, say, and the other way round.
        stay = [path for path in others if rules(path) == "weights"]
        stay += [first] if judged[index].role == "weights" else []
        kept.update(stay)
        if not stay:
            dropped[path_text(judged[index].place or first)] += record.nbytes
        elif record.role != "weights":
            changed[index] = "weights"
    gone = _prefixes(paths) - _prefixes(kept)
    tensors = set(paths)
    fate: dict[Path, bool] = {}

    def wanted(path: Path) -> bool:
        """Say whether a leaf stays; a plain one does unless a container of it loses all tensors."""
        if path in tensors:
            return path in kept
        parent = path[:-1]
        if parent not in fate:
            fate[parent] = not any(parent[:length] in gone for length in range(1, len(path)))
        return fate[parent] and path not in gone and rules(path) in ("weights", "extra")

    return wanted, changed, dict(dropped)


def _prefixes(paths: Sequence[Path] | set[Path]) -> set[Path]:
    return {path[:length] for path in paths for length in range(1, len(path))}


# --- tensors that are written ------------------------------------------------------------------


def _orphans(content: Content) -> frozenset[int]:
    """Return the visible tensors that keep a hidden one alive which is larger than they are."""
    records = content.manifest.tensors
    found = set()
    for index, record in enumerate(records):
        recipe = record.recipe
        if recipe is not None and recipe.exact:
            hidden = [source for source in recipe.sources if source in content.hidden]
            if sum(records[source].nbytes for source in hidden) > record.nbytes:
                found.add(index)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A record whose pieces are known; those of `table` from `first` to `last`."""

    record: TensorRecord
    table: PieceTable
    first: int
    last: int


@dataclass(slots=True)
class _Rewriting:
    """One version on its way; owned by one thread."""

    repo: Repo
    content: Content
    orphans: Collection[int]
    """Tensors that must be written, since they follow from larger hidden ones."""
    tables: list[PieceTable]
    """Where pieces lie already."""
    without: Collection[str]
    """Packs that may not be shared, since they were condemned."""
    backend: Backend
    """Where packs go."""
    report: dict[int, RoundedTensor] = field(default_factory=dict)
    written: dict[int, tuple[Coding | None, list[_Placed]]] = field(default_factory=dict)
    """Tensors that were, in fewer bits or as they are."""
    waiting: list[tuple[int, Coding | None, tuple[Source, ...]]] = field(default_factory=list)
    held_bytes: int = 0
    """Memory of tensors that wait for being written."""
    new_bytes: Counter[str] = field(default_factory=Counter)
    """By role: bytes of new pieces, as they are in memory."""
    stored_bytes: Counter[str] = field(default_factory=Counter)
    """By role: bytes that were stored for them."""
    rounding: Rounding = field(init=False)

    def run(self, encodings: Sequence[Encoding]) -> Manifest:
        """Write what must be, and what is rounded, durably; return the manifest over it.

        Parameters
        ----------
        encodings
            Tried on each tensor one after the other; the first that holds it within its bounds
            counts.
        """
        leaves, records = self.content.leaves, self.content.manifest.tensors
        paths = {leaf.index: leaf.path for leaf in reversed(leaves)}
        exact = retyped(leaves, records)
        for index in sorted(paths):
            self._take(index, paths[index], encodings, exact=index in exact)
        self._flush()
        return self._result()

    # --- one tensor -----------------------------------------------------------------------------

    def _take(self, index: int, path: Path, encodings: Sequence[Encoding], *, exact: bool) -> None:
        """Queue a tensor if it must be written, or is rounded; `exact` if views read its bits."""
        record = self.content.manifest.tensors[index]
        tried = [] if exact else wanted(record, self._item_bytes(record), path, encodings)
        must = index in self.orphans or (bool(encodings) and self._follows_visible(record))
        if not tried and not must:
            return
        window = max(1, self.repo.options.host_bytes // 8)
        source = source_of(record, StoredBytes(self.repo, self.content, index, window_bytes=window))
        coding = None
        if tried:
            name, chunk = self.content.labels[index], self.repo.superblock.chunk_bytes
            coding, problems = round_tensor(record, source, tried, name=name, chunk_bytes=chunk)
            self.report[index] = _reported(name, record, coding, problems)
        if coding is not None or must:
            room = self.repo.options.host_bytes // 4
            size = min(source.nbytes, room)
            if self.waiting and self.held_bytes + size > room:
                self._flush()
            self.waiting.append((index, coding, (source,) if coding is None else coding.sources))
            self.held_bytes += size

    def _item_bytes(self, record: TensorRecord) -> int:
        """Return what an element of a tensor takes as it is stored now."""
        recipe = record.recipe
        if recipe is None or recipe.sources[0] not in self.content.hidden:
            return ITEM_BYTES[record.dtype]
        stored = ITEM_BYTES[self.content.manifest.tensors[recipe.sources[0]].dtype]
        return min(stored, ITEM_BYTES[record.dtype])

    def _follows_visible(self, record: TensorRecord) -> bool:
        """Return whether a tensor follows from a visible one, which may be rounded itself."""
        sources = () if record.recipe is None else record.recipe.sources
        return any(source not in self.content.hidden for source in sources)

    def _flush(self) -> None:
        """Write what waits."""
        sources = [source for _, _, part in self.waiting for source in part]
        if sources:
            repo = self.repo
            written = write_pieces(
                sources,
                backend=self.backend,
                environment=repo.environment,
                options=repo.options,
                known=KnownPieces(self.tables, without=self.without, deltas=False),
                chunk_bytes=repo.superblock.chunk_bytes,
                choice=check_choice("auto"),
                progress=silent,
            )
            self._note(written)
            self.tables.append(written.table)
        self.waiting, self.held_bytes = [], 0

    def _note(self, written: Written) -> None:
        """Remember where everything that waited lies."""
        at = 0
        for index, coding, sources in self.waiting:
            record = self.content.manifest.tensors[index]
            records = (record.replace(recipe=None),) if coding is None else coding.records
            placed = []
            for one, _ in zip(records, sources, strict=True):
                first, last = written.first[at], written.first[at + 1]
                placed.append(_Placed(record=one, table=written.table, first=first, last=last))
                raw = written.table.raw[first:last].astype(np.int64)
                self.new_bytes[record.role] += int(raw[written.is_new[first:last]].sum())
                self.stored_bytes[record.role] += int(written.stored_new[first:last].sum())
                at += 1
            self.written[index] = (coding, placed)

    # --- all of them ----------------------------------------------------------------------------

    def _result(self) -> Manifest:
        """Put everything together: visible tensors, then those that are hidden."""
        old = self.content.manifest
        visible = [n for n in range(len(old.tensors)) if n not in self.content.hidden]
        needed = (old.tensors[n].recipe for n in visible if n not in self.written)
        sources = {source for recipe in needed if recipe is not None for source in recipe.sources}
        kept_hidden = sorted(sources & self.content.hidden)
        places = {n: place for place, n in enumerate([*visible, *kept_hidden])}
        hidden = [self._old(n) for n in kept_hidden]
        placed: list[_Placed] = []
        for n in visible:
            coding, made = self.written.get(n, (None, []))
            if coding is not None:
                start = len(visible) + len(hidden)
                recipe = replace(coding.recipe, sources=tuple(range(start, start + len(made))))
                hidden += made
                record = old.tensors[n].replace(recipe=recipe)
                placed.append(_Placed(record=record, table=old.pieces, first=0, last=0))
            else:
                placed += made or [self._moved(n, places)]
        manifest = _assembled(old, [*placed, *hidden])
        kept_bytes = self._kept_bytes(visible, kept_hidden)
        read_content(manifest)  # what would not load is never written
        self.rounding = Rounding(
            tensors=tuple(self.report[n] for n in sorted(self.report)),
            written_bytes=self.stored_bytes.total(),
            replaced_bytes=_bytes_of(old) - kept_bytes,
            kept_bytes=kept_bytes,
        )
        return manifest

    def _old(self, index: int) -> _Placed:
        old = self.content.manifest
        first, last = old.first[index], old.first[index + 1]
        return _Placed(record=old.tensors[index], table=old.pieces, first=first, last=last)

    def _moved(self, index: int, places: Mapping[int, int]) -> _Placed:
        """Return a tensor that stays as it is, over sources at their new places."""
        found = self._old(index)
        recipe = found.record.recipe
        if recipe is None:
            return found
        return replace(found, record=found.record.replace(recipe=recipe.moved(places)))

    def _kept_bytes(self, visible: Sequence[int], hidden: Sequence[int]) -> int:
        old = self.content.manifest
        stay = [n for n in visible if n not in self.written]
        rows = [np.arange(old.first[n], old.first[n + 1]) for n in (*stay, *hidden)]
        return _bytes_of(old, np.concatenate([np.zeros(0, np.int64), *rows]))


def _reported(
    name: str, record: TensorRecord, coding: Coding | None, problems: Sequence[str]
) -> RoundedTensor:
    recipe = record.recipe if coding is None else coding.recipe
    return RoundedTensor(
        path=name,
        dtype=record.dtype,
        form="unchanged" if coding is None else coding.form,
        nbytes=record.nbytes,
        max_abs=0.0 if recipe is None else recipe.max_abs,
        rel_l2=0.0 if recipe is None else recipe.rel_l2,
        problem="; ".join(problems),
    )


def _assembled(old: Manifest, placed: Sequence[_Placed]) -> Manifest:
    """Return the manifest of records whose pieces lie in several tables."""
    first = tuple(accumulate((one.last - one.first for one in placed), initial=0))
    ids = [one.table.ids[one.first : one.last] for one in placed]
    raw = [one.table.raw[one.first : one.last] for one in placed]
    pieces = placed_table(
        np.concatenate([np.zeros((0, 32), np.uint8), *ids]),
        np.concatenate([np.zeros(0, np.uint32), *raw]),
        (location_of(one.table, row) for one in placed for row in range(one.first, one.last)),
    )
    return replace(old, tensors=tuple(one.record for one in placed), first=first, pieces=pieces)


def _bytes_of(manifest: Manifest, rows: npt.NDArray[np.int64] | None = None) -> int:
    """Return the size of pieces in packs, each its share of its chunk; those of one id once."""
    table = manifest.pieces
    chosen = np.arange(manifest.first[-1]) if rows is None else rows
    if not len(chosen):
        return 0
    _, once = np.unique(table.ids[chosen], axis=0, return_index=True)
    chosen = chosen[once]
    stored = table.stored[chosen].astype(np.float64) + CHUNK_HEADER_BYTES
    return int((stored * table.raw[chosen] / table.slab[chosen]).sum())
