"""Operations on runs and versions that are there: fork, rollback, delete, undelete, pin, policy.

No operation forgets a version: deleted ones stay as records, so that lineage, the audit trail and
ids remain, and so that they can come back until their objects are condemned.

A version is pinned for this store, by a person, or for another store that let its own content of
it go: for each on its own, and it may be deleted when no pin is left.

As in :mod:`ckptstore.catalog.run_ops`: the method ``apply`` of a record changes the catalog, and
functions return the operations for what a caller wants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_directions
from ckptstore.catalog.rows import newest, pins_of
from ckptstore.catalog.run_ops import Save, check_not_condemned, there
from ckptstore.catalog.state import Fold, Op, RunState
from ckptstore.chunking import batches
from ckptstore.errors import ConflictError, InvalidInputError, LimitError, PolicyError
from ckptstore.format.fields import Directions, Id, IdOrEmpty
from ckptstore.format.names import check_metadata_json, check_run_name, encode_metadata
from ckptstore.format.snapshot import Flag, VersionRow, decode_details, with_details
from ckptstore.model import Version

T = TypeVar("T")

_SHOWN: Final = 8
"""Characters of the id of a store in messages."""

Ids = Annotated[Sequence[Id], msgspec.Meta(min_length=1, max_length=limits.VERSIONS_PER_OP_MAX)]
HINT_LATE: Final = "it is too late: after a collection a deleted version does not come back"
HINT_REDUCED: Final = (
    "undelete brings back versions that were deleted whole; what a replica has, a load with "
    "refill=True does"
)


class Fork(Op, frozen=True, kw_only=True, tag="fork"):
    """A run begins at a version of another; a save of its first version follows in the commit."""

    run: str
    source: Id
    """The version that it begins at, recorded for good."""
    metrics: Directions = msgspec.field(default_factory=dict)

    def apply(self, fold: Fold) -> None:
        """Add the run, with the version as its origin."""
        source = fold.version(self.source)
        if source.flags & Flag.DELETED:
            raise fold.broken(f"run {self.run!r} is forked from the deleted version {source.id}")
        fold.add_run(RunState.begin(self.run, fold.at_ms, self.metrics, origin=source.id))


class Rollback(Op, frozen=True, kw_only=True, tag="rollback"):
    """The head of a run moves to a version of it; what came after is abandoned, not deleted."""

    run: str
    version: Id
    reason: Annotated[str, msgspec.Meta(max_length=limits.REASON_CHARS_MAX)] = ""
    store: IdOrEmpty = ""
    """Id of the store whose head it follows, in a replica; empty: it was decided here."""

    def apply(self, fold: Fold) -> None:
        """Move the head, and mark the versions that it leaves."""
        run = fold.run(self.run)
        target = fold.version(self.version)
        if target.run != self.run or target.flags & Flag.DELETED:
            raise fold.broken(f"run {self.run!r} cannot go back to {target.id}")
        kept = _line(fold, target.id, self.run)
        fold.mark(set(_line(fold, run.head, self.run)) - set(kept), add=Flag.ABANDONED)
        fold.mark(kept, remove=Flag.ABANDONED)
        run.head = target.id
        run.held = not self.store


def _line(fold: Fold, head: str, run: str) -> list[str]:
    """Return a version and its ancestors within one run, newest first."""
    found = []
    while head and fold.versions[head].run == run:
        found.append(head)
        head = fold.versions[head].parent
    return found


class Delete(Op, frozen=True, kw_only=True, tag="delete"):
    """Versions are no longer there; until a collection condemns their objects, they can return."""

    versions: Ids
    reason: Annotated[str, msgspec.Meta(max_length=limits.REASON_CHARS_MAX)] = ""

    def apply(self, fold: Fold) -> None:
        """Mark the versions; heads move to what is left."""
        for version_id in self.versions:
            row = fold.version(version_id)
            if row.flags & (Flag.DELETED | Flag.PINNED):
                what = "deleted already" if row.flags & Flag.DELETED else "pinned"
                raise fold.broken(f"version {row.id} is {what}")
            fold.mark([row.id], add=Flag.DELETED)
        for version_id in self.versions:
            row = fold.versions[version_id]
            run = fold.run(row.run)
            if run.head == version_id:
                run.head = _newest(fold, run.versions)


def _newest(fold: Fold, ids: Iterable[str]) -> str:
    """Return the newest version that is there, abandoned ones last; empty if none is."""
    found = newest(fold.versions[version_id] for version_id in ids)
    return "" if found is None else found.id


class Undelete(Op, frozen=True, kw_only=True, tag="undelete"):
    """Deleted versions are there again; nothing that they need was condemned."""

    versions: Ids

    def apply(self, fold: Fold) -> None:
        """Take the marks away where nothing was condemned."""
        for version_id in self.versions:
            row = fold.version(version_id)
            if not row.flags & Flag.DELETED:
                raise fold.broken(f"version {row.id} is not deleted")
            if not row.flags & Flag.RECORD_ONLY and decode_details(row).manifest_key in fold.gone:
                raise fold.broken(f"the manifest of version {row.id} was condemned")
            fold.mark([row.id], remove=Flag.DELETED)
            run = fold.run(row.run)
            if not run.head:
                run.head = _newest(fold, run.versions)


class Pin(Op, frozen=True, kw_only=True, omit_defaults=True, tag="pin"):
    """A version may not be deleted, by anyone, until it is unpinned."""

    version: Id
    store: IdOrEmpty = ""
    """Id of the store that it is kept for, since only its record is there; empty: somebody wants
    it here."""

    def apply(self, fold: Fold) -> None:
        """Add the store to those that the version is pinned for."""
        row = fold.version(self.version)
        if row.flags & Flag.DELETED:
            raise fold.broken(f"the deleted version {row.id} is pinned")
        stores = dict.fromkeys((*pins_of(row), self.store))
        if len(stores) > limits.REPLICAS_MAX + 1:
            raise fold.broken(f"version {row.id} is pinned for too many stores")
        _set_pins(fold, row, stores)


class Unpin(Op, frozen=True, kw_only=True, omit_defaults=True, tag="unpin"):
    """A version may be deleted again, unless pins of others are left."""

    version: Id
    store: IdOrEmpty = ""
    """Id of the store that gives up its pin; empty: all pins go."""

    def apply(self, fold: Fold) -> None:
        """Remove the pin of one store, or all."""
        row = fold.version(self.version)
        # One without a store ends them all: so do readers that do not know the field.
        left = [store for store in pins_of(row) if self.store and store != self.store]
        _set_pins(fold, row, left)


def _set_pins(fold: Fold, row: VersionRow, stores: Iterable[str]) -> None:
    pinned_by = tuple(stores)
    flags = row.flags | Flag.PINNED if pinned_by else row.flags & ~Flag.PINNED
    if pinned_by == ("",):
        pinned_by = ()
    pinned = with_details(row, pinned_by=pinned_by)
    fold.versions[row.id] = msgspec.structs.replace(pinned, flags=flags)


class SetPolicy(Op, frozen=True, kw_only=True, tag="set-policy"):
    """The retention policy of a run, or of all runs that have none."""

    run: str
    """Empty for the store's."""
    policy: msgspec.Raw
    """A JSON object of :mod:`ckptstore.catalog.retention`; empty object: none."""

    def __post_init__(self) -> None:
        """Check the name, and that the policy is sound JSON."""
        if self.run:
            check_run_name(self.run)
        check_metadata_json(bytes(self.policy))

    def apply(self, fold: Fold) -> None:
        """Replace the policy."""
        policy = b"" if bytes(self.policy) == b"{}" else bytes(self.policy)
        if self.run:
            fold.run(self.run).policy = policy
        else:
            fold.policy = policy


def fork(
    catalog: Catalog, first: Save, *, directions: Mapping[str, str], relies_on: Iterable[str]
) -> list[Op]:
    """Return the operations that begin a run at a version of another.

    Parameters
    ----------
    first
        The first version of the run; its parent is the version that it begins at.
    directions
        Which way metrics get better, besides those that the other run has declared.
    relies_on
        Keys of the manifest of `first` and of all packs that it names.

    Raises
    ------
    ConflictError
        If the run exists already.
    VersionNotFoundError
        If the source was deleted meanwhile.
    CondemnedError
        If an object that the first version shares was condemned.
    InvalidInputError
        If the name or a direction is not accepted.
    """
    if catalog.has_run(first.run):
        msg = f"there is a run {first.run!r} already"
        hint = "fork to another name"
        deleted = list(catalog.versions(first.run, deleted=True))
        if deleted and not catalog.run(first.run).versions_count:
            msg += ", whose versions were all deleted"
            hint += f", or bring them back: ckptstore undelete {deleted[-1].id[:12]}"
        raise ConflictError(msg, hint=hint)
    inherited = catalog.run(there(catalog, first.parent).run).metrics
    check_not_condemned(catalog, relies_on)
    metrics = {**inherited, **check_directions(directions)}
    return [Fork(run=first.run, source=first.parent, metrics=metrics), first]


def rollback(
    catalog: Catalog, *, run: str, version: str, reason: str = "", store: str = ""
) -> list[Op]:
    """Return the operations that move the head of a run to one of its versions, if it is elsewhere.

    Parameters
    ----------
    store
        Id of the store that a replica follows with it; empty for a decision of this store's own.

    Raises
    ------
    VersionNotFoundError
        If there is no such version, or it was deleted.
    InvalidInputError
        If it is of another run.
    """
    target = there(catalog, version)
    if target.run != run:
        msg = f"version #{version[:8]} is of run {target.run!r}, not {run!r}"
        raise InvalidInputError(msg, hint=f"fork it: ckptstore fork {version[:12]} NEW_RUN")
    if catalog.head_id(run) == version:
        return []
    return [Rollback(run=run, version=version, reason=_reason(reason), store=store)]


def delete(
    catalog: Catalog, versions: Sequence[str], *, reason: str = "", force: bool = False
) -> list[Op]:
    """Return the operations that delete versions.

    Parameters
    ----------
    force
        Also those that are tagged, and the head of a run that has other versions.

    Raises
    ------
    VersionNotFoundError
        If one is not there.
    PolicyError
        If one is pinned, or needs `force`.
    """
    wanted = list(dict.fromkeys(versions))
    chosen = set(wanted)
    for version_id in wanted:
        version = there(catalog, version_id)
        if version.pinned:
            raise pinned_error(version)
        if version.tags and not force:
            msg = f"{version.label} is tagged {', '.join(version.tags)}"
            raise PolicyError(msg, hint="take the tags away, or force it (--force)")
        head = not force and catalog.head_id(version.run) == version_id
        if head and any(v.id not in chosen for v in catalog.versions(version.run)):
            msg = f"{version.label} is the head of its run: the next save continues it"
            hint = "roll back to another version first, or force it (--force)"
            raise PolicyError(msg, hint=hint)
    parts = batches(wanted, limits.VERSIONS_PER_OP_MAX)
    ops: list[Op] = [Delete(versions=part, reason=_reason(reason)) for part in parts]
    for run in sorted({catalog.version(one).run for one in chosen}):
        if catalog.head_id(run) in chosen:
            ids = [one for one in catalog.state.runs[run].versions if one not in chosen]
            left = [catalog.state.versions[one] for one in ids]
            last = newest(left)  # a record has nothing to load, or to go on with
            then = newest(row for row in left if not row.flags & Flag.RECORD_ONLY) or last
            if then is not None and (then is not last or then.flags & Flag.ABANDONED):
                ops.append(Rollback(run=run, version=then.id, reason="the head was deleted"))
    return ops


def undelete(
    catalog: Catalog, versions: Sequence[str], needs: Mapping[str, Collection[str]]
) -> list[Op]:
    """Return the operations that bring deleted versions back.

    Parameters
    ----------
    needs
        Per version: keys of its manifest and of all packs that it names.

    Raises
    ------
    VersionNotFoundError
        If there is no such version.
    InvalidInputError
        If one is not deleted.
    CondemnedError
        If something that one needs was condemned: it is too late.
    """
    wanted = list(dict.fromkeys(versions))
    for version_id in wanted:
        version = catalog.version(version_id)
        if not version.deleted:
            if version.level != "full":
                msg = f"{version.label} was reduced to {version.level}, which is for good"
                raise InvalidInputError(msg, hint=HINT_REDUCED)
            raise InvalidInputError(f"{version.label} is not deleted")
        check_not_condemned(catalog, needs[version_id], HINT_LATE)
    # The first becomes the head of a run without: the newest, not abandoned if one is.
    back = sorted(map(catalog.version, wanted), key=lambda one: (one.abandoned, -one.commit))
    parts = batches([version.id for version in back], limits.VERSIONS_PER_OP_MAX)
    return [*(Undelete(versions=part) for part in parts), *_places(catalog, back)]


def _places(catalog: Catalog, back: Sequence[Version]) -> Iterator[Op]:
    """Yield what puts versions that come back on the line of their run, or marks them beside it.

    One that goes on from the head is the head again; one that the run went on without is abandoned.
    """
    heads = {run: catalog.head_id(run) for run in {version.run for version in back}}
    for version in back:
        run, head = version.run, heads[version.run]
        if not head or version.abandoned or version.level == "record":
            continue
        if head in _ancestors(catalog, version):
            yield Rollback(run=run, version=version.id, reason="came back")
            heads[run] = version.id
        elif version.id not in _ancestors(catalog, catalog.version(head)):
            yield Rollback(run=run, version=version.id, reason="came back")
            yield Rollback(run=run, version=head, reason="goes on")


def _ancestors(catalog: Catalog, version: Version) -> Iterator[str]:
    """Yield a version's id and those of its ancestors, deleted ones too, within one run."""
    found: Version | None = version
    while found is not None and found.run == version.run:
        yield found.id
        found = catalog.find(found.parent)


def set_policy(
    catalog: Catalog, run: str, policy: Mapping[str, object], *, is_new: bool = False
) -> list[Op]:
    """Return the operation that gives a run (or the store, if `run` is empty) a retention policy.

    Parameters
    ----------
    is_new
        The same commit may make the run.

    Raises
    ------
    RunNotFoundError
        If there is no such run.
    InvalidInputError, LimitError
        If the policy is no JSON object, or too large.
    """
    if run and not is_new:
        catalog.run(run)
    return [SetPolicy(run=run, policy=msgspec.Raw(encode_metadata(policy)))]


def _reason(text: str) -> str:
    return text[: limits.REASON_CHARS_MAX]


def pin(catalog: Catalog, version: str) -> list[Op]:
    """Return the operation that pins a version for this store, unless it has that pin alone."""
    found = there(catalog, version)
    return [] if found.pinned and not found.pinned_for else [Pin(version=version)]


def unpin(catalog: Catalog, version: str) -> list[Op]:
    """Return the operation that removes all pins of a version; nothing if it has none."""
    return [Unpin(version=version)] if catalog.version(version).pinned else []


def pin_for(catalog: Catalog, versions: Iterable[str], store: str) -> list[Op]:
    """Return the operations that pin versions for another store; deleted ones are left out.

    Raises
    ------
    LimitError
        One is pinned for ``REPLICAS_MAX`` others.
    """
    found = [catalog.version(one) for one in versions if catalog.has_version(one)]
    for version in found:
        if len(version.pinned_for) >= limits.REPLICAS_MAX and store not in version.pinned_for:
            msg = f"#{version.id[:8]} is pinned for {limits.REPLICAS_MAX} stores"
            hint = "take those of stores that are gone away: pin --delete --for"
            raise LimitError(msg, hint=hint)
    return [
        Pin(version=version.id, store=store)
        for version in found
        if not version.deleted and store not in version.pinned_for
    ]


def unpin_for(catalog: Catalog, versions: Iterable[str], store: str) -> list[Op]:
    """Return the operations that remove the pins of another store, no others.

    Where others are left, one of them is said once more, which changes nothing: readers that do not
    know for whom a pin is see it go, and come back.
    """
    ops: list[Op] = []
    for version_id in versions:
        pins = catalog.pins(version_id) if catalog.has_version(version_id) else ()
        if store not in pins:
            continue
        ops.append(Unpin(version=version_id, store=store))
        left = [one for one in pins if one != store]
        ops += [Pin(version=version_id, store=one) for one in left[:1]]
    return ops


def pinned_text(version: Version) -> str:
    """Return the reason why a version is pinned."""
    if not version.pinned_for:
        return "pinned"
    stores = " and ".join(one[:_SHOWN] for one in version.pinned_for)
    return f"pinned for the store {stores}, which evicted it"


def pinned_error(version: Version) -> PolicyError:
    """Return the error that refuses to delete a pinned version, or a part of it."""
    hint = f"unpin it first: ckptstore pin --delete {version.id[:12]}"
    if version.pinned_for:
        hint += "; this may be the only copy: there, load with refill=True brings it back"
    return PolicyError(f"{version.label} is {pinned_text(version)}", hint=hint)
