"""From what a caller wants to the operations of a commit, on the catalog as it now is.

These functions are called inside :meth:`ckptstore.catalog.log.Log.append`, again for every number
that is tried, so that what they rely on (the head of a run, that a run exists) is what the commit
before theirs left. They raise when a precondition fails, and touch nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckptstore import limits
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import check_directions, check_metrics
from ckptstore.catalog.suggestions import did_you_mean
from ckptstore.errors import (
    CommitConflictError,
    CondemnedError,
    InvalidInputError,
    LimitError,
    RunNotFoundError,
    VersionNotFoundError,
)
from ckptstore.format.commit import (
    Annotate,
    CreateRun,
    Declare,
    ManifestPointer,
    Op,
    RoleSizes,
    Save,
    Tag,
    Untag,
)
from ckptstore.format.names import check_listed, check_run_name, check_tag, encode_metadata
from ckptstore.model import RoleBytes

__all__ = ["annotate", "check_not_condemned", "ensure_run", "save", "tag", "untag"]


def ensure_run(catalog: Catalog, run: str, directions: Mapping[str, str]) -> list[Op]:
    """Return what makes the run exist and know these directions: nothing, if that is so already.

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
            raise InvalidInputError(msg, hint="use another name for the other direction")
    fresh = {name: direction for name, direction in wanted.items() if name not in known}
    if len(known) + len(fresh) > limits.METRICS_MAX:
        msg = f"run {run!r} would declare more than {limits.METRICS_MAX} metrics"
        raise LimitError(msg)
    return [Declare(run=run, metrics=fresh)] if fresh else []


def save(
    catalog: Catalog,
    *,
    run: str,
    version: str,
    step: int,
    manifest: ManifestPointer,
    content: str,
    directions: Mapping[str, str] | None = None,
    metrics: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
    metadata: Mapping[str, object] | None = None,
    roles: Mapping[str, RoleBytes] | None = None,
    receipt: Mapping[str, float] | None = None,
    relies_on: Iterable[str] = (),
) -> list[Op]:
    """Return what makes a version visible; its parent is the run's head at this moment.

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
    step = _step(step)
    check_listed(tags, "tags")
    if len(tags) > limits.TAGS_PER_VERSION_MAX:
        msg = f"{len(tags)} tags are more than the {limits.TAGS_PER_VERSION_MAX} allowed"
        raise LimitError(msg)
    check_not_condemned(catalog, relies_on)
    ops = ensure_run(catalog, run, directions or {})
    head = catalog.head_id(run)
    if catalog.has_version(version):
        msg = f"the version {version} is in the log already"
        raise CommitConflictError(msg)
    sizes = {
        role: RoleSizes(logical=item.logical, new=item.new, stored=item.stored)
        for role, item in (roles or {}).items()
    }
    ops.append(
        Save(
            version=version,
            run=run,
            step=step,
            parent=head,
            manifest=manifest,
            content=content,
            metrics=check_metrics(metrics or {}),
            tags=sorted({check_tag(name) for name in tags}),
            metadata=msgspec.Raw(encode_metadata(metadata or {})),
            roles=sizes,
            receipt=dict(receipt or {}),
        )
    )
    return ops


def _step(step: object) -> int:
    """Return a step as a plain integer, also one of NumPy's or a tensor's; a bool is none."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:  # a float, a text
        number = -1
    if not 0 <= number <= limits.STEP_MAX:
        msg = f"a step is an integer from 0 to {limits.STEP_MAX}, not {step!r}"
        raise InvalidInputError(msg)
    return number


def check_not_condemned(catalog: Catalog, keys: Iterable[str]) -> None:
    """Return if no object of `keys` was condemned; raises CondemnedError that names those."""
    condemned = catalog.gone(keys)
    if condemned:
        msg = f"{len(condemned)} objects were condemned meanwhile, such as {min(condemned)}"
        error = CondemnedError(msg, hint="save again; or collect with a longer grace")
        error.keys = frozenset(condemned)
        raise error


def annotate(catalog: Catalog, version: str, metrics: Mapping[str, object]) -> list[Op]:
    """Return what adds metrics to a version, or replaces their values.

    Raises
    ------
    VersionNotFoundError
        If there is no version of this id.
    InvalidInputError
        If a metric is not accepted, or none is given.
    LimitError
        If the version would have more than ``METRICS_MAX``.
    """
    checked = check_metrics(metrics)
    if not checked:
        msg = "no metric to annotate with"
        raise InvalidInputError(msg)
    count = len({*catalog.version(version).metrics, *checked})
    if count > limits.METRICS_MAX:
        msg = f"version {version} would have {count} metrics, more than {limits.METRICS_MAX}"
        raise LimitError(msg)
    return [Annotate(version=version, metrics=checked)]


def tag(catalog: Catalog, run: str, version: str, name: str) -> list[Op]:
    """Return what points a tag of the run to a version; a tag of this name moves.

    Raises
    ------
    RunNotFoundError, VersionNotFoundError
        If there is no such run or version.
    InvalidInputError
        If the tag is not accepted, or the version is of another run.
    """
    if not catalog.has_run(run):
        raise RunNotFoundError(f"there is no run {run!r}")
    found = catalog.version(version)
    if found.run != run:
        msg = f"version {version} is of run {found.run!r}, not {run!r}"
        raise InvalidInputError(msg, hint=f"tag it in run {found.run!r}")
    return [Tag(run=run, tag=check_tag(name), version=version)]


def untag(catalog: Catalog, run: str, name: str, *, version: str | None = None) -> list[Op]:
    """Return what takes a tag of the run away.

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
        raise VersionNotFoundError(msg, hint=did_you_mean(name, tags))
    if version not in (None, tags[name]):
        at = catalog.version(tags[name])
        msg = f"#{str(version)[:8]} has no tag {name[:100]!r}"
        raise VersionNotFoundError(msg, hint=f"{run}@{at.step} #{at.id[:8]} has it: name that one")
    return [Untag(run=run, tag=name)]
