"""Operations by which runs grow: a run begins, a version is saved, gets metrics and tags.

Each operation is one record of a commit's ``ops``, with what it does to the catalog in ``apply``.
It raises :meth:`ckptstore.catalog.state.Fold.broken` where the commit contradicts those before.

The functions make operations of what a caller wants, on the catalog as it now is. They are called
inside :meth:`ckptstore.catalog.log.Log.append`, again for every number that is tried, so that what
they rely on (the head of a run, that a run exists) is what the commit before theirs left. They
raise when a precondition fails, and touch nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import isfinite
from sys import intern
from typing import Annotated, Final

import msgspec

from ckptstore import errors, limits
from ckptstore.argument_checks import integer
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_directions, check_metrics
from ckptstore.catalog.state import Fold, Op, RunState
from ckptstore.format import fields, snapshot
from ckptstore.format.names import check_listed, check_run_name, check_tag, encode_metadata
from ckptstore.model import RoleBytes, Version
from ckptstore.suggestions import did_you_mean


class CreateRun(Op, frozen=True, kw_only=True, tag="create-run"):
    """A run begins; its name must not be taken."""

    run: str
    metrics: fields.Directions = msgspec.field(default_factory=dict)

    def apply(self, fold: Fold) -> None:
        """Add the run."""
        fold.add_run(RunState.begin(self.run, fold.at_ms, self.metrics))


class Declare(Op, frozen=True, kw_only=True, tag="declare"):
    """A run learns directions of further metrics; what it knows must not change."""

    run: str
    metrics: fields.Directions

    def apply(self, fold: Fold) -> None:
        """Add the directions to those of the run."""
        known = fold.run(self.run).metrics
        for name, direction in self.metrics.items():
            if known.setdefault(name, direction) != direction:
                raise fold.broken(f"metric {name!r} of run {self.run!r} changes its direction")
        if len(known) > limits.METRICS_MAX:
            raise fold.broken(f"run {self.run!r} declares more than {limits.METRICS_MAX} metrics")


class Measured(Op, frozen=True, kw_only=True):
    """An operation that brings metrics of a version; texts for values that are not finite too."""

    metrics: fields.Metrics

    def __post_init__(self) -> None:
        """Check the names; replace texts by floats."""
        super().__post_init__()
        if any(isinstance(value, str) for value in self.metrics.values()):
            msgspec.structs.force_setattr(self, "metrics", self.floats)

    @property
    def floats(self) -> dict[str, float]:
        """The metrics, each a float."""
        return {name: float(value) for name, value in self.metrics.items()}

    def for_json(self) -> Op:
        """Return the operation with texts for metrics that are not finite."""
        texts = {name: str(value) for name, value in self.floats.items() if not isfinite(value)}
        made = copy(self)
        msgspec.structs.force_setattr(made, "metrics", {**self.floats, **texts})
        return made


class NewVersion(Measured, frozen=True, kw_only=True):
    """An operation that makes a version known."""

    version: fields.Id
    run: str
    step: fields.Count
    parent: fields.IdOrEmpty
    """Id of the version that it continues, or empty."""
    content: fields.Digest
    """Digest of the state: equal for equal states, wherever they lie."""
    metrics: fields.Metrics = msgspec.field(default_factory=dict)
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """The user's JSON object as :func:`ckptstore.format.names.encode_metadata` made it."""
    roles: Annotated[Mapping[str, fields.RoleSizes], msgspec.Meta(max_length=limits.ROLES_MAX)] = {}
    receipt: Annotated[
        Mapping[str, float], msgspec.Meta(max_length=limits.RECEIPT_ENTRIES_MAX)
    ] = {}
    """Seconds and bytes of the save's stages; each name ends in its unit."""

    def row(
        self, fold: Fold, manifest: fields.ManifestPointer, at_ms: int, origin: str
    ) -> snapshot.VersionRow:
        """Return its row in the catalog.

        The row shares its strings with the rows before it: a quarter of a catalog's memory.
        """
        details = snapshot.Details(
            manifest.key, manifest.stored_bytes, bytes.fromhex(manifest.digest),
            bytes.fromhex(self.content), pack_roles(self.roles), dict(self.receipt),
            bytes(self.metadata), origin=intern(origin),
        )  # fmt: skip
        run, parent = fold.run(self.run).name, fold.version(self.parent).id if self.parent else ""
        return snapshot.VersionRow(
            self.version, run, self.step, parent, at_ms, fold.number,
            snapshot.encode_metrics(self.floats), msgspec.msgpack.encode(details),
        )  # fmt: skip


class Save(NewVersion, frozen=True, kw_only=True, tag="save"):
    """A version appears and becomes the head of its run."""

    manifest: fields.ManifestPointer
    tags: Annotated[Sequence[str], msgspec.Meta(max_length=limits.TAGS_PER_VERSION_MAX)] = ()

    def apply(self, fold: Fold) -> None:
        """Add its row, which becomes the head of the run."""
        run = fold.run(self.run)
        if self.version in fold.versions:
            raise fold.broken(f"the version {self.version} exists")
        row = fold.versions[self.version] = self.row(fold, self.manifest, fold.at_ms, "")
        run.versions.append(row.id)
        run.head = row.id
        run.held = False
        for tag in self.tags:
            run.tags[tag] = row.id


class Annotate(Measured, frozen=True, kw_only=True, tag="annotate"):
    """Metrics or metadata arrive for a version; later values replace earlier ones."""

    version: fields.Id
    metrics: fields.Metrics = msgspec.field(default_factory=dict)
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """Entries over those of the version's JSON object."""

    def apply(self, fold: Fold) -> None:
        """Put the metrics and the entries over those of the version."""
        row = fold.version(self.version)
        if bytes(self.metadata) != b"{}":
            before = snapshot.decode_details(row).metadata
            try:
                merged = _merged(before, bytes(self.metadata))
            except errors.CkptStoreError as error:
                raise fold.broken(f"version {row.id}: {error.message}") from error
            row = snapshot.with_details(row, metadata=merged)
        metrics = {**snapshot.decode_metrics(row), **self.floats}
        if len(metrics) > limits.METRICS_MAX:
            raise fold.broken(f"version {row.id} has more than {limits.METRICS_MAX} metrics")
        encoded = snapshot.encode_metrics(metrics)
        fold.versions[row.id] = msgspec.structs.replace(row, metrics=encoded)


class Tag(Op, frozen=True, kw_only=True, tag="tag"):
    """A tag of a run points to a version of it; it may have pointed to another."""

    run: str
    tag: str
    version: fields.Id

    def apply(self, fold: Fold) -> None:
        """Point the tag to the version."""
        row = fold.version(self.version)
        if row.run != self.run:
            raise fold.broken(f"run {self.run!r} tags a version of run {row.run!r}")
        fold.run(self.run).tags[self.tag] = row.id


class Untag(Op, frozen=True, kw_only=True, tag="untag"):
    """A tag of a run is taken away."""

    run: str
    tag: str

    def apply(self, fold: Fold) -> None:
        """Remove the tag."""
        if fold.run(self.run).tags.pop(self.tag, None) is None:
            raise fold.broken(f"run {self.run!r} has no tag {self.tag!r}")


def pack_roles(roles: Mapping[str, fields.RoleSizes]) -> dict[str, tuple[int, int, int]]:
    """Return sizes per role as a row has them."""
    return {role: (item.logical, item.new, item.stored) for role, item in roles.items()}


def ensure_run(catalog: Catalog, run: str, directions: Mapping[str, str]) -> list[Op]:
    """Return the operations that make the run exist and know these directions, where missing.

    Raises
    ------
    InvalidInputError
        If the name is not accepted, or a metric is known to get better the other way.
    """
    wanted = check_directions(directions)
    if not catalog.has_run(run):
        return [CreateRun(run=check_run_name(run), metrics=wanted)]
    known = catalog.run(run).metrics
    for name, direction in wanted.items():
        if known.get(name, direction) != direction:
            msg = f"metric {name!r} of run {run!r} has the direction {known[name]!r}"
            raise errors.InvalidInputError(msg, hint="use another name for the other direction")
    fresh = {name: direction for name, direction in wanted.items() if name not in known}
    if len(known) + len(fresh) > limits.METRICS_MAX:
        raise errors.LimitError(f"run {run!r} would declare more than {limits.METRICS_MAX} metrics")
    return [Declare(run=run, metrics=fresh)] if fresh else []


def save(
    catalog: Catalog,
    *,
    run: str,
    version: str,
    step: int,
    manifest: fields.ManifestPointer,
    content: str,
    directions: Mapping[str, str] | None = None,
    metrics: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    metadata: Mapping[str, object] | None = None,
    roles: Mapping[str, RoleBytes] | None = None,
    receipt: Mapping[str, float] | None = None,
    relies_on: Iterable[str] = (),
) -> list[Op]:
    """Return the operations that make a version visible; its parent is the run's head.

    The run is created where it does not exist. Manifest and packs must be durable already.

    Parameters
    ----------
    relies_on
        Keys of all packs that the manifest names, shared or new, and of the manifest. This check
        and the commit are one step on the log: a version never names what a sweep deletes.

    Raises
    ------
    CondemnedError
        If one of `relies_on` was condemned, by a commit up to the newest.
    InvalidInputError
        If a name, a metric, the metadata or the step is not accepted, or `tags` is a single text.
    LimitError
        If there are too many tags or metrics, or the metadata is too large.
    """
    step = integer("a step", step, 0, limits.STEP_MAX, _STEP_HINT)
    tags = check_listed(tags, "tags")
    if len(tags) > limits.TAGS_PER_VERSION_MAX:
        msg = f"{len(tags)} tags are more than the {limits.TAGS_PER_VERSION_MAX} allowed"
        raise errors.LimitError(msg)
    check_not_condemned(catalog, relies_on)
    ops = ensure_run(catalog, run, directions or {})
    head = catalog.head_id(run)
    if catalog.has_version(version):
        raise errors.CommitConflictError(f"the version {version} is in the log already")
    ops.append(
        Save(
            version=version,
            run=run,
            step=step,
            parent=head,
            manifest=manifest,
            content=content,
            metrics=check_metrics({} if metrics is None else metrics),
            tags=sorted({check_tag(name) for name in tags}),
            metadata=msgspec.Raw(encode_metadata({} if metadata is None else metadata)),
            roles=sizes(roles or {}),
            receipt=dict(receipt or {}),
        )
    )
    return ops


_STEP_HINT: Final = "count steps, and write int(step) where it is a float"
_AGAIN: Final = "save again; or collect with a longer grace"


def check_not_condemned(catalog: Catalog, keys: Iterable[str], hint: str = _AGAIN) -> None:
    """Return if no object of `keys` was condemned; raises CondemnedError that names those."""
    condemned = catalog.gone(keys)
    if condemned:
        msg = f"a collection has condemned {len(condemned)} of the objects, as {min(condemned)}"
        error = errors.CondemnedError(msg, hint=hint)
        error.keys = frozenset(condemned)
        raise error


def there(catalog: Catalog, version_id: str) -> Version:
    """Return a version that is not deleted; raises VersionNotFoundError for one that is."""
    version = catalog.version(version_id)
    if version.deleted:
        msg = f"{version.label} was deleted"
        raise errors.VersionNotFoundError(msg, hint=f"ckptstore undelete {version.id[:12]}")
    return version


def sizes(roles: Mapping[str, RoleBytes]) -> dict[str, fields.RoleSizes]:
    """Return bytes per role as the log has them."""
    return {
        role: fields.RoleSizes(logical=item.logical, new=item.new, stored=item.stored)
        for role, item in roles.items()
    }


def _merged(metadata: bytes, entries: bytes) -> bytes:
    """Return a JSON object with the entries of another one over its own; checked."""
    return encode_metadata({**msgspec.json.decode(metadata), **msgspec.json.decode(entries)})


def annotate(
    catalog: Catalog,
    version: str,
    metrics: Mapping[str, object],
    metadata: Mapping[str, object] | None = None,
) -> list[Op]:
    """Return the operation that adds metrics and metadata to a version, or replaces their values.

    Raises
    ------
    VersionNotFoundError
        If there is no version of this id.
    InvalidInputError
        If a metric or the metadata is not accepted, or neither is given.
    LimitError
        If the version would have more than ``METRICS_MAX``, or too much metadata.
    """
    checked = check_metrics(metrics)
    entries = encode_metadata({} if metadata is None else metadata)
    if not checked and entries == b"{}":
        msg = "nothing to annotate with: no metric, no note and no other metadata"
        raise errors.InvalidInputError(msg, hint="such as val_loss=2.31, or --note TEXT")
    found = catalog.version(version)
    _merged(encode_metadata(found.metadata), entries)
    count = len({*found.metrics, *checked})
    if count > limits.METRICS_MAX:
        msg = f"version {version} would have {count} metrics, more than {limits.METRICS_MAX}"
        raise errors.LimitError(msg)
    return [Annotate(version=version, metrics=checked, metadata=msgspec.Raw(entries))]


def tag(catalog: Catalog, run: str, version: str, name: str) -> list[Op]:
    """Return the operation that points a tag of the run to a version; a tag of this name moves.

    Raises
    ------
    RunNotFoundError, VersionNotFoundError
        If there is no such run or version.
    InvalidInputError
        If the tag is not accepted, or the version is of another run.
    """
    if not catalog.has_run(run):
        raise errors.RunNotFoundError(f"there is no run {run!r}")
    found = there(catalog, version)
    if found.run != run:
        msg = f"version {version} is of run {found.run!r}, not {run!r}"
        raise errors.InvalidInputError(msg, hint=f"tag it in run {found.run!r}")
    return [Tag(run=run, tag=check_tag(name), version=version)]


def untag(catalog: Catalog, run: str, name: str, *, version: str | None = None) -> list[Op]:
    """Return the operation that removes a tag of the run.

    Parameters
    ----------
    version
        Only from this one.

    Raises
    ------
    RunNotFoundError
        If there is no such run.
    VersionNotFoundError
        If it has no such tag, or another version has it.
    """
    tags = catalog.run(run).tags
    if name not in tags:
        msg = f"run {run!r} has no tag {name[:100]!r}"
        raise errors.VersionNotFoundError(msg, hint=did_you_mean(name, tags))
    if version not in (None, tags[name]):
        at = catalog.version(tags[name])
        msg = f"#{str(version)[:8]} has no tag {name[:100]!r}"
        hint = f"{run}@{at.step} #{at.id[:8]} has it: name that one"
        raise errors.VersionNotFoundError(msg, hint=hint)
    return [Untag(run=run, tag=name)]
