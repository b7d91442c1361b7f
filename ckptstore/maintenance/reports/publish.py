"""Publication of a store for web servers: what a reader needs that cannot list, and a page.

A restricted copy is a store of its own, made by :mod:`ckptstore.maintenance.replicas.replicate`
without records of ancestors, so that nothing in it tells of versions that were not chosen. Both
objects written here are replaced each time; a reader that comes between the two steps of that finds
none, and looks for the newest commit itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from string import Template
from typing import Final

from ckptstore import limits
from ckptstore.backends.base import Backend
from ckptstore.catalog import snapshots
from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.metrics import best
from ckptstore.errors import ConflictError, ObjectExistsError, ObjectNotFoundError, PolicyError
from ckptstore.events import ProgressCallback
from ckptstore.format.keys import PAGE_KEY, PUBLISHED_KEY
from ckptstore.format.published import Published, encode_published
from ckptstore.keyring import record_numbers
from ckptstore.maintenance.replicas.replicate import ReplicateReport, replicate
from ckptstore.maintenance.replicas.replicate_version import ReplicateRequest
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import RunInfo, Version
from ckptstore.repo import Repo
from ckptstore.shown import HtmlTable, Shown, counted
from ckptstore.suggestions import listed

_LISTED = 3
_MARK: Final = b'<meta name="generator" content="ckptstore">'
_MARK_WITHIN: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PublishReport(Shown):
    """Result of a publication."""

    store: str
    """Location of the published store, without credentials."""
    commits: int
    """Number of its newest commit."""
    snapshot: int
    """Number of its newest catalog snapshot; 0 for none."""
    runs_count: int
    versions_count: int
    copy: ReplicateReport | None = None
    """Result of the copy, if there was one."""
    deleted: tuple[str, ...] = ()
    """Ids of versions that the copy still shows, and that its source has deleted."""


def publish(
    repo: Repo, copy: ReplicateReport | None = None, deleted: tuple[str, ...] = ()
) -> PublishReport:
    """Write the index and the page of a store; safe beside writers and collections.

    Raises
    ------
    ReadOnlyError, UnsafeBackendError, StorageError
        The store cannot be written to.
    PolicyError
        As :func:`check_page`.
    ConflictError
        Another process publishes it again and again.
    """
    repo.check_writable()
    check_page(repo.backend)
    repo.refresh()
    repo.log.leave_snapshot()
    catalog = repo.refresh()
    encrypted = repo.superblock.encryption is not None
    published = Published(
        commits=catalog.number,
        snapshot=snapshots.newest_number(repo.backend, catalog.number),
        key_record=max(record_numbers(repo.backend)) if encrypted else 0,
    )
    page = store_page(None if encrypted else catalog, now_ms=repo.environment.now_ms())
    _replace(repo.backend, PAGE_KEY, page.encode())
    _replace(repo.backend, PUBLISHED_KEY, encode_published(published))
    return PublishReport(
        store=repo.url,
        commits=published.commits,
        snapshot=published.snapshot,
        runs_count=len(catalog.runs()),
        versions_count=catalog.versions_count,
        copy=copy,
        deleted=deleted,
    )


def check_page(backend: Backend) -> None:
    """Return if a page may be written at a location: none is there, or one that publish wrote.

    Raises
    ------
    PolicyError
        Another page is there.
    StorageError
        The storage failed.
    """
    try:
        head = bytearray(min(backend.stat(PAGE_KEY).size_bytes, _MARK_WITHIN))
        if head:
            backend.read_into(PAGE_KEY, 0, [memoryview(head)])
    except ObjectNotFoundError:
        return
    if _MARK not in head:
        msg = f"{PAGE_KEY} at {backend.url} is not a page of ckptstore, and would be overwritten"
        raise PolicyError(msg, hint="publish to another location, or move that page away first")


def publish_copy(
    source: Repo,
    target: Repo,
    versions: Sequence[Version],
    *,
    restricted: bool,
    add: bool,
    progress: ProgressCallback,
) -> PublishReport:
    """Copy versions to another store, and publish that.

    Where the whole store is published, those that it has deleted since may stay.

    Parameters
    ----------
    restricted
        `versions` were named; those that the target has deleted come back.
    add
        The target may keep versions that are not among these.

    Raises
    ------
    PolicyError
        The target shows versions that are not among these; nothing was written.
    CkptStoreError
        As :func:`publish`, and as :func:`ckptstore.maintenance.replicas.replicate.replicate`.
    """
    check_page(target.backend)
    chosen = frozenset(version.id for version in versions)
    gone = () if restricted else (one.id for one in source.catalog.versions(deleted=True))
    deleted = frozenset(gone)
    besides = [one for one in target.refresh().versions() if one.id not in chosen]
    others = [one.label for one in besides if one.id not in deleted]
    if others and not add:
        msg = f"{target.url} shows versions besides: {listed(others, most=_LISTED)}"
        hint = "publish to an empty location, or keep them there with --add (add=True)"
        raise PolicyError(msg, hint=hint)
    again = chosen if restricted else frozenset[str]()
    request = ReplicateRequest(alone=True, again=again, progress=progress)
    kept = tuple(one.id for one in besides if one.id in deleted)
    return publish(target, replicate(source, target, versions, request), kept)


def _replace(backend: Backend, key: str, data: bytes) -> None:
    """Write an object, or replace it."""
    for _ in range(limits.COMMIT_SENDS_MAX):
        try:
            backend.put(key, data)
        except (ObjectExistsError, ObjectNotFoundError):  # the latter: just replaced by another
            backend.delete(key)
        else:
            return
    msg = f"other processes keep replacing {key} at {backend.url}"
    raise ConflictError(msg, hint="publish from one process at a time")


_PAGE: Final = Path(__file__).with_name("store_page.html")


def store_page(catalog: Catalog | None, *, now_ms: int) -> str:
    """Return the page of a store.

    Parameters
    ----------
    catalog
        None for an encrypted store, of which the page tells nothing.
    now_ms
        The time, in milliseconds since 1970.
    """
    fields = {"title": "An encrypted store", "ref": "RUN@latest", "tables": ""}
    fields["key"] = ', encryption_key="file:PATH"' if catalog is None else ""
    fields["time"] = _time(datetime.fromtimestamp(now_ms / 1000, UTC))
    if catalog is not None:
        runs = catalog.runs()
        newest = list(islice(catalog.versions(newest_first=True), limits.PAGE_VERSIONS_MAX))
        versions = counted(catalog.versions_count, "version")
        fields["title"] = f"{versions} in {counted(len(runs), 'run')}"
        if newest:
            fields["ref"] = escape(f"{newest[0].run}@latest")
        heads = _table("Run|Versions|Best|Tags", (_run(catalog, info) for info in runs))
        rows = _table("Version|Id|Saved (UTC)|Metrics|Size|Stored", map(_version, newest))
        fields["tables"] = f"<h2>Runs</h2>\n{heads}\n<h2>Versions</h2>\n{rows}"
        if len(newest) < catalog.versions_count:
            fields["tables"] += f"\n<p>The newest {len(newest)}; ckptstore ls lists all.</p>"
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(fields)


def _table(titles: str, rows: Iterable[Iterable[str]]) -> str:
    found = HtmlTable(columns=titles.split("|"), rows=[list(row) for row in rows])
    return found.html(most=len(found.rows))


def _run(catalog: Catalog, info: RunInfo) -> Iterator[str]:
    yield info.name
    yield str(info.versions_count)
    values = []
    for metric, direction in info.metrics.items():
        winner = best(catalog.metric_values(info.name, metric), direction)
        if winner is not None:
            version = catalog.version(winner)
            values.append(f"{metric} {version.metrics[metric]:.6g} @{version.step}")
    yield ", ".join(values)
    yield ", ".join(info.tags)


def _version(version: Version) -> Iterator[str]:
    total = sum_roles(version.roles.values())
    yield f"{version.run}@{version.step}"
    yield version.id[:8]
    yield _time(version.created_at)
    yield ", ".join(f"{name} {value:.6g}" for name, value in version.metrics.items())
    yield _size(total.logical) if version.level != "record" else "record only"
    yield _size(total.stored)


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _size(size: int) -> str:
    return f"{size / limits.MIB:,.2f} MiB"
