"""Job files: TOML that selects the versions to copy to another store, and what each store keeps.

::

    [source]
    url = "/nvme/ckpts"

    [target]
    url = "s3://archive/ckpts"

    [select]
    keep = ["tagged", "best 3 val_loss", "every 10000 steps"]
    older_than = "1h"

    [retain]
    source = { full = "last 5" }

    [alert]
    not_replicated_after = "24h"

Everything but ``source`` and ``target`` is optional. Unknown words are refused: a misspelt word
must not turn a rule off.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_args

import msgspec

from ckptstore import limits
from ckptstore.argument_checks import check_between
from ckptstore.backends.storage_classes import check_class
from ckptstore.catalog.policy import Policy
from ckptstore.catalog.retention_rules import parse_bytes, parse_duration
from ckptstore.engine.engine import THREADS, check_spec
from ckptstore.errors import InvalidInputError, NotFoundError, PolicyError
from ckptstore.replicas.options import PLACE, PREFIX
from ckptstore.store import open_store
from ckptstore.suggestions import did_you_mean

_Texts: TypeAlias = str | list[str]


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two stores."""

    url: Annotated[str, msgspec.Meta(min_length=1)]
    """For the target also ``replica:NAME``, a replica that has a name in the source."""
    options: dict[str, Any] = {}
    """For the storage library, such as ``endpoint_url``; credentials come from their usual chain.
    With ``replica:NAME`` also ``url``, the location to which the options apply."""
    single_writer: bool = False
    """No other process writes to the store while the job runs."""
    key: str | None = None
    """Opens an encrypted store; a new target becomes encrypted: ``file:PATH``, ``env:NAME`` or
    ``command:CMD``; never a key itself."""


class Select(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selection of versions of the source: all, less what each given rule excludes."""

    refs: list[str] = []
    """Versions that are always selected."""
    runs: list[str] = []
    keep: _Texts | None = None
    """Rules as in a retention policy."""
    older_than: str | None = None
    """Only versions saved at least this long ago, since younger ones may still be replaced."""
    since: str | None = None
    """Only versions saved within this time."""


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the copy."""

    check: bool = True
    """Read back all copied bytes."""
    rate: str | int = 0
    """Bytes a second, such as ``50MiB``; 0: no limit."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=limits.WORKERS_MAX)] | None = None
    """Threads on either side; by default the usable processors."""
    engine: str = THREADS
    """Engine of copies, scrubs and collections: ``threads`` of the job, or ``dask://HOST:PORT``."""
    tasks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of concurrent tasks of an engine other than ``threads``; by default its workers."""


class Retain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retention policy of each store; ``true`` for the store's own policies."""

    source: dict[str, Any] | bool = False
    target: dict[str, Any] | bool = False
    evict: _Texts | None = None
    """Rules for versions of the source whose content stays. Of the others only the record stays, if
    the target holds them with every byte read back."""
    pin_evicted: bool = True
    """Pin evicted versions in the target, so that no policy there deletes the only copy; ``false``
    leaves it to the target's rules how long they stay."""


class Collect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stores that are collected at the end."""

    source: bool = False
    target: bool = False
    grace: str | None = None


class Scrub(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of each store's chunks that a run reads: another part each day, all in turn.

    Damaged chunks are repaired from the other store.
    """

    source: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    target: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Alert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that make a run fail."""

    not_replicated_after: str | None = None
    """Age from which a selected version that the target lacks counts as late."""


class Archive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selection of versions of the target that move to a colder storage class."""

    storage_class: str = msgspec.field(name="class")
    """The storage's own name: ``GLACIER``, ``DEEP_ARCHIVE``, ``STANDARD_IA``, ``COLDLINE``,
    ``Archive`` ..."""
    min_age: str | None = None
    """Only versions saved at least this long ago, such as ``30d``."""
    keep_hot: _Texts | None = None
    """Rules for versions that stay where they are, as heads of runs always do."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checked content of one file."""

    source: Place
    target: Place
    name: str = ""
    """For reports and metrics; the file's name by default."""
    select: Select = Select()
    copy: Copy = Copy()
    retain: Retain = Retain()
    gc: Collect = Collect()
    scrub: Scrub = Scrub()
    alert: Alert = Alert()
    archive: Archive | None = None


def read_job(path: str | os.PathLike[str]) -> Job:
    """Return the job in a file.

    Raises
    ------
    NotFoundError
        There is no such file.
    InvalidInputError
        The file is no TOML or too large, or has an unknown word or an invalid rule or time; the
        message names the place.
    """
    where = Path(path)
    try:
        with where.open("rb") as file:
            data = file.read(limits.JOB_BYTES_MAX + 1)
    except FileNotFoundError as error:
        msg = f"there is no job file {str(where)!r}"
        hint = "see docs/howto/archival-jobs.md for one to begin with"
        raise NotFoundError(msg, hint=hint) from error
    except OSError as error:
        msg = f"the job file {str(where)!r} cannot be read: {error.strerror}"
        raise InvalidInputError(msg) from error
    if len(data) > limits.JOB_BYTES_MAX:
        raise InvalidInputError(f"{where}: more than {limits.JOB_BYTES_MAX} bytes")
    try:
        tables = tomllib.loads(data.decode())
        _check_words(tables, Job)
        job = msgspec.convert(tables, Job)
        _check(job)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error.message}", hint=error.hint) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        # A ValueError is of the text, of TOML or of numbers.
        msg = f"{where}: {str(error)[:_SHOWN]}"
        raise InvalidInputError(msg, hint="see docs/howto/archival-jobs.md") from error
    return job if job.name else msgspec.structs.replace(job, name=where.stem)


# Characters of a parser's message that are repeated.
_SHOWN: Final = 200
_OWN_OPTIONS: Final = frozenset(inspect.signature(open_store).parameters)


def _check_words(table: Mapping[str, object], kind: type[msgspec.Struct], place: str = "") -> None:
    """Raise InvalidInputError for the first unknown word of a table, with its place."""
    known = {one.encode_name: one.type for one in msgspec.structs.fields(kind)}
    for word, value in table.items():
        if word not in known:
            msg = f"{place}{word[:_SHOWN]}: a job has no such word"
            raise InvalidInputError(msg, hint=did_you_mean(word, known))
        for inner in get_args(known[word]) or (known[word],):
            if isinstance(value, dict) and isclass(inner) and issubclass(inner, msgspec.Struct):
                _check_words(value, inner, f"{place}{word}.")


def _check(job: Job) -> None:
    """Raise InvalidInputError for invalid rules and times, with their place."""
    for name, place in (("source", job.source), ("target", job.target)):
        meant = {PLACE} if place.url.startswith(PREFIX) else set()
        with _named(f"{name}.options"):
            if own := sorted(_OWN_OPTIONS & place.options.keys() - meant):
                raise InvalidInputError(f"{own[0]!r} is not an option of the storage library")
    archive, retain = job.archive, job.retain
    checks: list[tuple[str, object, Callable[[Any], object]]] = [
        ("select.older_than", job.select.older_than, parse_duration),
        ("select.since", job.select.since, parse_duration),
        ("alert.not_replicated_after", job.alert.not_replicated_after, parse_duration),
        ("gc.grace", job.gc.grace, parse_duration),
        ("archive.min_age", archive and archive.min_age, parse_duration),
        ("archive.class", archive and archive.storage_class, check_class),
        ("select.keep", job.select.keep, _check_rules),
        ("retain.evict", retain.evict, _check_rules),
        ("archive.keep_hot", archive and archive.keep_hot, _check_rules),
        ("retain.source", retain.source, _check_policy),
        ("retain.target", retain.target, _check_policy),
    ]
    for name, value, check in checks:
        with _named(name):
            if value is not None:
                check(value)
    _check_numbers(job)


def _check_numbers(job: Job) -> None:
    with _named("copy.rate"):
        if parse_bytes(str(job.copy.rate)) > limits.RATE_BYTES_PER_S_MAX:
            msg = f"no link is faster than {limits.RATE_BYTES_PER_S_MAX} bytes a second"
            raise InvalidInputError(msg, hint="0, or no rate, for no limit")
    with _named("copy"):
        if check_spec(job.copy.engine) == THREADS and job.copy.tasks is not None:
            msg = "tasks are for an engine other than threads"
            raise InvalidInputError(msg, hint="name one in [copy], or say workers for threads")
    for name, share in (("scrub.source", job.scrub.source), ("scrub.target", job.scrub.target)):
        with _named(name):
            if share:
                check_between("a share above 0", share, 1 / limits.SAMPLE_PARTS_MAX, 1)


def _check_rules(rules: _Texts) -> None:
    if not rules:
        msg = "no rule is in it"
        raise InvalidInputError(msg, hint="leave it out, or name some: 'last 5, tagged'")
    Policy.from_json({"full": rules}).check()


def _check_policy(policy: Mapping[str, Any] | bool) -> None:
    if isinstance(policy, Mapping):
        Policy.from_json(policy).check()


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Add the word of the file to an error."""
    try:
        yield
    except (InvalidInputError, PolicyError) as error:
        raise InvalidInputError(f"{place}: {error.message}", hint=error.hint) from error
