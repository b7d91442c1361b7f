"""Operations about other stores: their names, what arrives from them, and what they have too.

As in :mod:`ckptstore.catalog.run_ops`: the method ``apply`` of a record changes the catalog, and
functions return the operations for what a caller wants.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from sys import intern
from typing import Final

import msgspec

from ckptstore import limits
from ckptstore.catalog import content_ops, lifecycle_ops, run_ops
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.levels import LEVEL_FLAGS, LEVELS, STORED, Part, level_of
from ckptstore.catalog.lifecycle_ops import Fork, Ids
from ckptstore.catalog.state import Fold, Op
from ckptstore.chunking import batches
from ckptstore.errors import ConflictError, LimitError, NotFoundError
from ckptstore.format import names
from ckptstore.format.fields import EncodingName, Id, ManifestPointer, TimeMs
from ckptstore.format.snapshot import Flag, VersionRow, decode_details, with_details
from ckptstore.model import ReplicaInfo, RoleBytes, Version
from ckptstore.suggestions import did_you_mean

CHECKED_KEY: Final = "read_back_s"
"""In the receipt of a version that came: how long it took to read it back, before it was shown."""
UNCHECKED_KEY: Final = "not_read_back"
"""In the receipt of a version that came, or came back to where it was saved, without that."""
_NOWHERE: Final = ManifestPointer(
    key=f"manifests/00/{'0' * 32}.manifest", stored_bytes=0, digest="0" * 64
)
"""In the place of a manifest of a version that never had one here; no object has this name."""
_CONTENT: Final = Flag.DELETED | Flag.WEIGHTS_ONLY | Flag.RECORD_ONLY | Flag.VERIFIED | Flag.DAMAGED
"""Flags that are about content that was here before."""
# Operations of one commit that brings records, or metrics and tags. Source: as for relocations.
_OPS_PER_COMMIT: Final = 256
# Their bytes: half of what a commit may have, since the last may be as large as a save of its own.
_BYTES_PER_COMMIT: Final = limits.COMMIT_BYTES_MAX // 2


class Replicate(run_ops.NewVersion, frozen=True, kw_only=True, tag="replicate"):
    """A version of another store appears, under the id, step and parent that it has there.

    Where only its record is here, its content arrives. Its receipt is that of the save, as it was,
    with what the copy took.
    """

    created_at_ms: TimeMs
    """When it was first saved, by the writer's clock."""
    store: Id
    """Id of the store that it was first saved in."""
    level: Part
    """The part of it that arrives: a record alone of an ancestor that is not copied."""
    manifest: ManifestPointer | None = None
    """None exactly at level ``record``."""
    encoding: EncodingName = ""
    """At level ``weights``: what the weights were rounded to, if they were."""
    abandoned: bool = False
    """A rollback left it beside the line of its run."""
    head: bool = False
    """It becomes the head of its run."""

    def __post_init__(self) -> None:
        """Check names, and that manifest and level agree."""
        super().__post_init__()
        content_ops.check_kept(self.level, self.encoding, self.manifest)

    def apply(self, fold: Fold) -> None:
        """Add the row, or the content to the one that is there."""
        run = fold.run(self.run)
        row = self.row(fold, self.manifest or _NOWHERE, self.created_at_ms, self.store)
        if self.manifest is not None and self.manifest.key in fold.gone:
            raise fold.broken(f"{self.manifest.key} was condemned")
        known = fold.versions.get(self.version)
        row = msgspec.structs.replace(
            row,
            flags=LEVEL_FLAGS[self.level] | (Flag.ABANDONED if self.abandoned else 0),
            encoding=intern(self.encoding),
        )
        if known is None:
            run.versions.append(row.id)
        else:
            row = self._completed(fold, known, row)
        fold.versions[row.id] = row
        if self.head:
            run.head, run.held = row.id, False
        elif not run.head and known is not None and known.flags & Flag.DELETED:
            run.head = row.id

    def _completed(self, fold: Fold, known: VersionRow, row: VersionRow) -> VersionRow:
        """Return the row of a version that is known, with the content that arrives."""
        same = (known.run, known.step, known.parent) == (row.run, row.step, row.parent)
        less = LEVELS.index(level_of(known)) < LEVELS.index(level_of(row))
        if self.level == "record" or not same or not (less or known.flags & Flag.DELETED):
            raise fold.broken(f"the version {self.version} exists")
        # Its place in the log, and what was said of it here, stay.
        before = decode_details(known)
        row = with_details(
            row, origin=before.origin, replicas=before.replicas, pinned_by=before.pinned_by
        )
        return msgspec.structs.replace(
            row,
            commit=known.commit,
            metrics=known.metrics,
            flags=LEVEL_FLAGS[self.level] | (known.flags & ~_CONTENT),
        )


class Replicated(Op, frozen=True, kw_only=True, tag="replicated"):
    """Another store has these versions, and every byte of them was read back there."""

    versions: Ids
    store: Id
    """Id of the other store."""

    def apply(self, fold: Fold) -> None:
        """Add the store to those that have the versions; of too many the last stay."""
        for version_id in self.versions:
            row = fold.version(version_id)
            known = decode_details(row).replicas
            if self.store not in known:
                noted = (*known, self.store)[-limits.REPLICAS_MAX :]
                fold.versions[row.id] = with_details(row, replicas=noted)


class NameReplica(Op, frozen=True, kw_only=True, tag="name-replica"):
    """Another store has a name from now on; if it had it before, it is reached elsewhere now."""

    name: str
    url: str
    """Where it is, without credentials and without options."""
    store: Id
    """Its id; a store of another id at this place is another store."""

    def apply(self, fold: Fold) -> None:
        """Add the name, or replace where the replica is."""
        known = fold.replicas.get(self.name)
        if known is not None and known.store != self.store:
            raise fold.broken(f"the replica {self.name!r} is the store {known.store}")
        if known is None and len(fold.replicas) == limits.REPLICAS_MAX:
            raise fold.broken(f"more than {limits.REPLICAS_MAX} replicas have names")
        found = ReplicaInfo(name=self.name, url=self.url, store=self.store)
        fold.replicas = {**fold.replicas, self.name: found}  # one that has the name keeps its place


class UnnameReplica(Op, frozen=True, kw_only=True, tag="unname-replica"):
    """A replica has no name any more; what lies there stays."""

    name: str

    def apply(self, fold: Fold) -> None:
        """Remove the name."""
        if self.name not in fold.replicas:
            raise fold.broken(f"there is no replica {self.name!r}")
        fold.replicas = {name: one for name, one in fold.replicas.items() if name != self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The content of one version, as it lies in the store that it comes to."""

    manifest: ManifestPointer
    roles: Mapping[str, RoleBytes]
    receipt: Mapping[str, float] = field(default_factory=dict)
    """Seconds and bytes of the copy, beside those of the save."""
    relies_on: Collection[str]
    """Keys of the manifest and of all packs that it names."""


def lineage(source: Catalog, versions: Iterable[str]) -> list[Version]:
    """Return versions and all their ancestors, of every run, in the order of their commits.

    Records that came in one commit: each after its parent.
    """
    found: dict[str, Version] = {}
    for version_id in versions:
        line: list[Version] = []
        for version in source.ancestors(version_id):
            if version.id in found:
                break
            line.append(version)
        found.update((version.id, version) for version in reversed(line))
    return sorted(found.values(), key=lambda version: version.commit)


def check_line(target: Catalog, source: Catalog, runs: Iterable[str]) -> None:
    """Refuse to mix a run with one of the same name that has nothing to do with it.

    Raises
    ------
    ConflictError
        The target has a run of this name that shares no version with the source's.
    """
    for name in runs:
        if not target.has_run(name):
            continue
        own = target.ids(name)
        if own and not any(source.has_version(version_id) for version_id in own):
            msg = f"the run {name!r} of the target has nothing in common with the source's"
            hint = "another name for it there: ckptstore fork REF NEW_RUN --to URL"
            raise ConflictError(msg, hint=hint)


def arrive(
    target: Catalog,
    source: Catalog,
    versions: Sequence[Version],
    *,
    store: str,
    arrivals: Mapping[str, Arrival],
    again: Container[str] = (),
    alone: bool = False,
) -> list[Op]:
    """Return the operations that make versions of another store visible here.

    Parameters
    ----------
    source
        The catalog that the versions are of.
    versions
        In the order of their commits, each after its parent, unless that is here already.
    store
        Id of the source, for versions that were first saved there.
    arrivals
        Content by id of the version; the others come as records.
    again
        Ids of versions that come back if this store has deleted them, or keeps but a part.
    alone
        Where a parent is unknown here, the nearest known ancestor takes its place.

    Raises
    ------
    CondemnedError
        An object that a version relies on was condemned meanwhile.
    ConflictError
        The target has another run of this name.
    """
    check_line(target, source, {version.run for version in versions})
    ops: list[Op] = []
    made: set[str] = set()
    coming: set[str] = set()
    for version in versions:
        arrival = arrivals.get(version.id)
        here = target.version(version.id) if target.has_version(version.id) else None
        if here is not None and (arrival is None or not _is_open(here, version, again)):
            continue
        if arrival is not None:
            run_ops.check_not_condemned(target, arrival.relies_on)
        if version.run not in made:
            made.add(version.run)
            ops += _run(target, source, version.run, coming)
        if alone:
            parents = (one.id for one in source.ancestors(version.parent)) if version.parent else ()
            known = (one for one in parents if one in coming or target.has_version(one))
            version = replace(version, parent=next(known, "") if here is None else here.parent)
        coming.add(version.id)
        head = arrival is not None and _advances(target, source, version)
        ops.append(_replicate(version, arrival, store=store, head=head))
        if here is not None and not here.deleted and here.level != "record":
            ops += content_ops.condemn(target, [here.manifest_key])
    return ops


def _is_open(here: Version, there: Version, again: Container[str]) -> bool:
    """Return whether the content of a version that is known here can come."""
    if here.deleted or here.level != "record":
        return here.id in again and (here.deleted or has_less(here, there))
    return True


def has_less(one: Version, other: Version) -> bool:
    """Return whether less of a version is kept in its store than in the other's."""
    return LEVELS.index(one.level) < LEVELS.index(other.level)


def had_content(version: Version) -> bool:
    """Return whether there ever was more than the record of a version, in its store."""
    return version.level != "record" or version.manifest_key != _NOWHERE.key


def _advances(target: Catalog, source: Catalog, version: Version) -> bool:
    """Return whether a version is further on the line on which the run's head is here.

    Not past one that a rollback left here: what comes of that, :func:`follow` decides.
    """
    head = target.head_id(version.run)
    if version.abandoned or not head:
        return not version.abandoned
    way = source.way(version.id, head)
    return bool(way) and not target.any_abandoned(way or ())


def _run(target: Catalog, source: Catalog, name: str, coming: Collection[str]) -> list[Op]:
    info = source.run(name)
    known = target.has_version(info.origin) and not target.version(info.origin).deleted
    if not target.has_run(name) and info.origin and (known or info.origin in coming):
        run = names.check_run_name(name)
        return [Fork(run=run, source=info.origin, metrics=dict(info.metrics))]
    return run_ops.ensure_run(target, name, _new_directions(target, source, name))


def _replicate(version: Version, arrival: Arrival | None, *, store: str, head: bool) -> Replicate:
    level, encoding = STORED["record" if arrival is None else version.level]
    roles = version.roles if arrival is None else arrival.roles
    # Only of the store that it was read back in does a receipt say so.
    about_another = (CHECKED_KEY, UNCHECKED_KEY)
    receipt = {key: value for key, value in version.receipt.items() if key not in about_another}
    if arrival is not None:
        receipt.update(arrival.receipt)
    return Replicate(
        version=version.id,
        run=version.run,
        step=version.step,
        parent=version.parent,
        created_at_ms=round(version.created_at.timestamp() * 1000),
        store=version.origin or store,
        level=level,
        encoding=encoding,
        manifest=None if arrival is None else arrival.manifest,
        content=version.content,
        metrics=dict(version.metrics),
        metadata=msgspec.Raw(names.encode_metadata(version.metadata)),
        roles=run_ops.sizes(roles),
        receipt=receipt,
        abandoned=version.abandoned,
        head=head,
    )


def follow(target: Catalog, source: Catalog, runs: Iterable[str], *, store: str) -> Iterator[Op]:
    """Yield the operations that bring heads, metrics and tags of runs to those of the source.

    The head of a run moves where the source has gone on from it, or has abandoned it, or deleted it
    and gone on from elsewhere; not to a version that has only its record here. It stays where
    the training went on in the target. Where a rollback of the target's own moved it last, it stays
    too, until the source goes on from just there, and past no version that the target has left.

    Of metrics and tags that both have, those of the source count; what only the target has stays.
    Metrics that a version or run of the target has no room for are left out; see :func:`unfit`.

    Parameters
    ----------
    store
        Id of the source.
    """
    for name in runs:
        if not (target.has_run(name) and source.has_run(name)):
            continue
        yield from run_ops.ensure_run(target, name, _new_directions(target, source, name))
        yield from _metrics(target, source, name)
        yield from _tags(target, source, name)
        yield from _head(target, source, name, store)


def _new_directions(target: Catalog, source: Catalog, name: str) -> dict[str, str]:
    known = target.run(name).metrics if target.has_run(name) else {}
    fresh = [one for one in source.run(name).metrics.items() if one[0] not in known]
    return dict(fresh[: limits.METRICS_MAX - len(known)])


def _metrics(target: Catalog, source: Catalog, name: str) -> Iterator[Op]:
    for version_id, there, here in source.other_metrics(target, name):
        room = limits.METRICS_MAX - len(here)
        new = [item for item in there.items() if item[0] not in here]
        changed = {m: value for m, value in there.items() if not _same(here.get(m, value), value)}
        if fresh := changed | dict(new[:room]):
            yield from run_ops.annotate(target, version_id, fresh)


def unfit(target: Catalog, source: Catalog, runs: Iterable[str]) -> int:
    """Return the number of metric values that the target has no room for."""
    count = 0
    for name in runs:
        if target.has_run(name) and source.has_run(name):
            for _, there, here in source.other_metrics(target, name):
                count += max(0, len({**here, **there}) - limits.METRICS_MAX)
    return count


def _same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)  # NaN is the same as NaN


def _tags(target: Catalog, source: Catalog, name: str) -> Iterator[Op]:
    here = target.run(name).tags
    for tag, version_id in source.run(name).tags.items():
        if here.get(tag) == version_id or not target.has_version(version_id):
            continue
        if not target.version(version_id).deleted:
            yield from run_ops.tag(target, name, version_id, tag)


def _head(target: Catalog, source: Catalog, name: str, store: str) -> Iterator[Op]:
    wanted, here = source.head_id(name), target.head_id(name)
    if not wanted or wanted == here or keeps_head(target, source, name):
        return
    found = target.version(wanted) if target.has_version(wanted) else None
    if found is not None and not found.deleted and found.level != "record":
        reason = "follows the store that it is a replica of"
        yield from lifecycle_ops.rollback(
            target, run=name, version=wanted, reason=reason, store=store
        )


def keeps_head(target: Catalog, source: Catalog, name: str) -> bool:
    """Return whether the head of a run stays here, where the source's is elsewhere.

    Since training went on here, or a rollback was decided here; or since the source's is behind.
    """
    wanted, here = source.head_id(name), target.head_id(name)
    if not (wanted and here) or wanted == here:
        return False
    if not source.has_version(here):
        return True
    way = source.way(wanted, here)
    if target.holds_head(name):
        return way is None or target.any_abandoned(way)
    return way is None and not _left(source, here, wanted)


def _left(source: Catalog, here: str, head: str) -> bool:
    """Return whether the source has left a version behind, for another line that its head is on."""
    gone = source.version(here)
    return gone.abandoned or (gone.deleted and source.way(here, head) is None)


def replicated(catalog: Catalog, versions: Iterable[str], store: str) -> list[Op]:
    """Return the operation that notes that another store has versions, if that is new.

    Of more than one operation takes, the first.
    """
    fresh = [
        version_id
        for version_id in versions
        if catalog.has_version(version_id) and store not in catalog.version(version_id).replicas
    ]
    first = next(batches(fresh, limits.VERSIONS_PER_OP_MAX), ())
    return [Replicated(versions=first, store=store)] if first else []


def fitting(ops: Iterable[Op]) -> list[Op]:
    """Return the first of some operations, as many as one commit takes; one at least."""
    found: list[Op] = []
    size = 0
    for op in islice(ops, _OPS_PER_COMMIT):
        size += len(msgspec.json.encode(op))
        if found and size > _BYTES_PER_COMMIT:
            break
        found.append(op)
    return found


def find_replica(catalog: Catalog, name: str) -> ReplicaInfo:
    """Return the replica that has a name.

    Raises
    ------
    NotFoundError
        None has it; the hint names similar ones.
    """
    found = catalog.replicas.get(name)
    if found is None:
        msg = f"no replica is called {name[:100]!r}"
        hint = did_you_mean(name, catalog.replicas) if catalog.replicas else ""
        raise NotFoundError(msg, hint=hint or f"name it: ckptstore replica add {name[:40]} URL")
    return found


def name_replica(catalog: Catalog, *, name: str, url: str, store: str) -> list[Op]:
    """Return the operation that gives a replica a name, or another location.

    Raises
    ------
    InvalidInputError
        The name or the location is not accepted.
    ConflictError
        Another store has the name, or this one has another.
    LimitError
        ``REPLICAS_MAX`` have names.
    """
    names.check_replica_name(name)
    names.check_replica_url(url)
    known = catalog.replicas.get(name)
    if known == ReplicaInfo(name=name, url=url, store=store):
        return []
    if known is not None and known.store != store:
        msg = f"the replica {name!r} is the store {known.store[:8]} at {known.url}, not {store[:8]}"
        raise ConflictError(msg, hint=f"take the name away first: ckptstore replica rm {name}")
    for other in catalog.replicas.values():
        if other.store == store and other.name != name:
            msg = f"the store at {url} is the replica {other.name!r} already"
            raise ConflictError(msg, hint=f"take that name away: ckptstore replica rm {other.name}")
    if known is None and len(catalog.replicas) >= limits.REPLICAS_MAX:
        msg = f"{limits.REPLICAS_MAX} replicas have names"
        raise LimitError(msg, hint="take one away: ckptstore replica rm NAME")
    return [NameReplica(name=name, url=url, store=store)]


def unname_replica(catalog: Catalog, name: str) -> list[Op]:
    """Return the operation that removes the name of a replica.

    Raises
    ------
    NotFoundError
        No replica has it.
    """
    return [UnnameReplica(name=find_replica(catalog, name).name)]
