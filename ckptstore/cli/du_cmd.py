"""``ckptstore du`` and ``ckptstore stats``: space used by run, version and role; key figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.backends.transfers import Transfers
from ckptstore.catalog.catalog import Catalog
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, count_text, counted, receipt_text
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.reports import documents
from ckptstore.maintenance.reports.usage import ObjectTotals, StoreStats, by_role, sum_roles
from ckptstore.model import RoleBytes, Version
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.sharing import HeldBytes, Share, SharedUsage


_Groups = Mapping[str, Sequence[Version]]


def du(
    what: Annotated[str | None, typer.Argument(metavar="RUN|REF")] = None,
    *,
    shared: bool = False,
    options: CommonOptions,
) -> None:
    """Show the space used by runs, versions and roles, and by the store's objects.

    SIZE is the size of the tensors in memory, NEW the part that the run's previous version did not
    have, STORED the space of that part in the store. With --shared, HELD is the data needed to load
    it, and ALONE the part that nothing else needs: deleting the version or run frees ALONE.

    Parameters
    ----------
    what
        A run, shown by version; or a version, shown by role.
    shared
        Show data that each run or version holds alone, and data that it shares. Reads every
        manifest.

    Examples
    --------
    ckptstore du
    ckptstore du gpt --shared
    """
    output = options.output("du")
    with opened(options) as opening:
        groups = _groups(opening, what)
        objects = opening.stats().objects if what is None else {}
        one_run = what is not None
        usage: SharedUsage | None = None
        if shared:
            with output.progress() as progress:
                usage = opening.sharing(progress=progress)
        everything = [one for versions in groups.values() for one in versions]
        document = {
            "store": opening.url,
            **documents.bytes_document(everything),
            "runs": [_run_document(name, versions) for name, versions in groups.items()],
            "objects": documents.objects_document(objects) or None,
            "sharing": None if usage is None else _sharing_document(usage, groups),
        }

        def draw(screen: Screen) -> None:
            """Print the sizes of parts, versions or runs."""
            if usage is not None:
                _draw_sharing(screen, usage, groups, one_run=one_run)
                return
            if one_run:
                _draw_versions(screen, everything)
            else:
                _draw_runs(screen, groups, everything)
            screen.line()
            _draw_roles(screen, everything)
            if objects:
                screen.line()
                _draw_objects(screen, objects)

        output.show(document, draw)
        for reason in usage.skipped if usage else ():
            output.note(f"left out: {reason}")


def _groups(store: Store, what: str | None) -> dict[str, list[Version]]:
    """Return versions by run: the named one, or those of a run or of all, empty ones included."""
    names = [info.name for info in store.runs()]
    if what is not None and what not in names:
        version = find_version(store, what)
        return {version.run: [version]}
    groups: dict[str, list[Version]] = {name: [] for name in names if what in {None, name}}
    for version in store.versions(what):
        groups[version.run].append(version)
    return groups


def _total(versions: Sequence[Version]) -> RoleBytes:
    return sum_roles(part for version in versions for part in version.roles.values())


def _run_document(name: str, versions: Sequence[Version]) -> dict[str, Any]:
    count = documents.bytes_document
    each = [{"id": one.id, "step": one.step, **count([one])} for one in versions]
    return {"name": name, **count(versions), "versions": each}


_BYTES = (
    Column("SIZE", right=True, wrap=False),
    Column("NEW", right=True, wrap=False, drop=2),
    Column("STORED", right=True, wrap=False),
    Column("STORED/SIZE", right=True, wrap=False, drop=1),
)


def _cells(part: RoleBytes) -> tuple[str, ...]:
    share = f"{100 * part.stored / part.logical:.1f}%" if part.logical else "-"
    return (bytes_text(part.logical), bytes_text(part.new), bytes_text(part.stored), share)


def _draw_runs(screen: Screen, groups: _Groups, everything: Sequence[Version]) -> None:
    lines = [*groups.items(), ("total", everything)]
    rows = [(name, count_text(len(part)), *_cells(_total(part))) for name, part in lines]
    screen.table((Column("RUN"), Column("VERSIONS", right=True), *_BYTES), rows)


def _draw_versions(screen: Screen, versions: Sequence[Version]) -> None:
    rows = [(str(one.step), one.id[:8], *_cells(_total([one]))) for one in reversed(versions)]
    rows.append(("total", "", *_cells(_total(versions))))
    screen.table((Column("STEP", right=True), Column("ID"), *_BYTES), rows)


def _draw_roles(screen: Screen, versions: Sequence[Version]) -> None:
    rows = [(role, *_cells(part)) for role, part in sorted(by_role(versions).items())]
    screen.table((Column("ROLE"), *_BYTES), rows)


def _draw_objects(screen: Screen, objects: Mapping[str, ObjectTotals]) -> None:
    count = sum(totals.count for totals in objects.values())
    size = sum(totals.size_bytes for totals in objects.values())
    screen.listing(
        [*objects.items(), ("total", ObjectTotals(count=count, size_bytes=size))],
        Column("OBJECTS", lambda item: item[0]),
        Column("COUNT", lambda item: count_text(item[1].count), right=True),
        Column("BYTES", lambda item: bytes_text(item[1].size_bytes), right=True),
    )


# --- with --shared: what is held alone, and what is shared --------------------------------------

_HELD = (
    Column("HELD", right=True, wrap=False),
    Column("ALONE", right=True, wrap=False),
    Column("SHARED", right=True, wrap=False),
)


def _draw_shares(screen: Screen, shares: Sequence[Share]) -> None:
    """Draw the data that several runs need together, if there is any."""
    if shares:
        screen.line()
        screen.listing(
            shares,
            Column("SHARED BY", lambda share: " ".join(share.runs)),
            Column("BYTES", lambda share: bytes_text(share.size_bytes), right=True),
        )


def _of(usage: SharedUsage, groups: _Groups) -> list[Share]:
    return [share for share in usage.shares if set(share.runs) & set(groups)]


def _sharing_document(usage: SharedUsage, groups: _Groups) -> dict[str, Any]:
    versions = [one.id for each in groups.values() for one in each if one.id in usage.versions]
    return {
        "stored_bytes": usage.stored_bytes,
        "chunks_count": usage.chunks_count,
        "runs": {name: _held(part) for name, part in usage.runs.items() if name in groups},
        "versions": {x: _held(usage.versions[x]) for x in versions} if len(groups) == 1 else None,
        "shares": [{"runs": one.runs, "bytes": one.size_bytes} for one in _of(usage, groups)],
        "skipped": usage.skipped,
    }


def _draw_sharing(screen: Screen, usage: SharedUsage, groups: _Groups, *, one_run: bool) -> None:
    """Draw what each run or version holds, then what several runs need."""
    if one_run:
        rows = [
            (str(version.step), version.id[:8], *_held_cells(part))
            for versions in groups.values()
            for version in reversed(versions)
            if (part := usage.versions.get(version.id))
        ]
        screen.table((Column("STEP", right=True), Column("ID"), *_HELD), rows)
    else:
        runs = [(name, *_held_cells(part)) for name, part in usage.runs.items()]
        screen.table((Column("RUN"), *_HELD), runs)
        chunks = counted(usage.chunks_count, "chunk")
        screen.line(f"in all {bytes_text(usage.stored_bytes)} in {chunks}")
    _draw_shares(screen, _of(usage, groups))


def _held(part: HeldBytes) -> dict[str, int]:
    return {"held_bytes": part.held, "exclusive_bytes": part.exclusive, "shared_bytes": part.shared}


def _held_cells(part: HeldBytes) -> tuple[str, str, str]:
    return (bytes_text(part.held), bytes_text(part.exclusive), bytes_text(part.shared))


def stats(
    *,
    prometheus: bool = False,
    transfers: bool = False,
    run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    options: CommonOptions,
) -> None:
    """Show key figures of a store: versions, distinct chunks, sharing, objects and space.

    Reads the manifest of every version and lists every object; with --prometheus or --transfers it
    reads only the catalog.

    Parameters
    ----------
    prometheus
        Print metrics of runs and their last saves for Prometheus.
    transfers
        Show what the last saves wrote: bytes, throughput, requests at once and retries.
    run
        With --transfers: only this run.

    Examples
    --------
    ckptstore stats
    ckptstore stats --transfers --run gpt
    """
    output = options.output("stats")
    if (prometheus and transfers) or (run is not None and not transfers):
        msg = "only one of --prometheus and --transfers; --run needs --transfers"
        raise InvalidInputError(msg, hint="ckptstore stats --transfers --run gpt")
    with opened(options) as opening:
        if prometheus:
            _show_exposition(opening, output)
            return
        if transfers:
            _show_transfers(opening, output, run)
            return
        with output.progress() as progress:
            shared = opening.sharing(progress=progress)
        totals = opening.stats()
        document = {"store": opening.url, **_stats_document(opening.repo.catalog, totals, shared)}
    output.show(document, lambda screen: _draw_stats(screen, totals, shared, document))
    for reason in shared.skipped:
        output.note(f"left out of what is live: {reason}")


def _show_exposition(store: Store, output: Output) -> None:
    from ckptstore.maintenance.reports.prometheus_text import exposition

    text = exposition(store.repo.refresh())
    document = {"store": store.url, "prometheus": text}
    output.show(document, lambda screen: screen.lines(text.splitlines()))


def _show_transfers(store: Store, output: Output, run: str | None) -> None:
    """Print what the last saves wrote, as their receipts say."""
    saves = store.versions(run)[-_SAVES_MAX:]
    rows = [{**documents.name_document(x), **Transfers.of(x.receipt).document()} for x in saves]
    version = Column("VERSION", lambda row: f"{row['run']}@{row['step']}")
    columns = [
        Column(title, partial(_transfer_cell, name), right=True) for title, name in _COLUMNS.items()
    ]
    document = {"store": store.url, "saves": rows}
    output.show(document, lambda screen: screen.listing(rows, version, *columns))


def _transfer_cell(name: str, row: Mapping[str, Any]) -> str:
    """Return a figure in the unit of its name; a dash for saves whose receipt has none."""
    return receipt_text(name, row[name]) if row["requests_count"] else "-"


_SAVES_MAX: Final = 20
"""Saves that --transfers shows."""
_COLUMNS: Final = {
    "WROTE": "requests_bytes",
    "TIME": "requests_s",
    "SPEED": "bytes_per_s",
    "REQUESTS": "requests_count",
    "THIN": "thin_count",
    "AT ONCE": "at_once_count",
    "LIMIT": "limit_count",
    "RETRIES": "retries_count",
    "REFUSED": "refused_count",
}
"""Columns of --transfers."""


def _stats_document(catalog: Catalog, totals: StoreStats, shared: SharedUsage) -> dict[str, Any]:
    packs = totals.objects.get("packs")
    return {
        "runs_count": totals.runs_count,
        "versions_count": totals.versions_count,
        "deleted_count": sum(1 for _ in catalog.versions(deleted=True)),
        "commits_count": totals.commits_count,
        **documents.role_document(totals.total),
        "chunks_count": shared.chunks_count,
        "live_bytes": shared.stored_bytes,
        "live_raw_bytes": shared.raw_bytes,
        "dead_bytes": None if packs is None else max(0, packs.size_bytes - shared.stored_bytes),
        "condemned_count": len(catalog.condemned),
        "size_bytes": totals.size_bytes if totals.objects else None,
        "roles": {
            role: {**documents.role_document(part), "live_bytes": shared.roles.get(role, 0)}
            for role, part in totals.roles.items()
        },
        "shares": [{"runs": share.runs, "bytes": share.size_bytes} for share in shared.shares],
        "skipped": shared.skipped,
        "objects": documents.objects_document(totals.objects),
    }


def _draw_stats(
    screen: Screen, totals: StoreStats, shared: SharedUsage, document: Mapping[str, Any]
) -> None:
    live, dead_bytes, size = shared.stored_bytes, document["dead_bytes"], "not listed here"
    dead = size if dead_bytes is None else f"{bytes_text(dead_bytes)} in packs"
    deleted = document["deleted_count"]
    ratio = f"{totals.total.logical / live:.2f} bytes of state for each byte" if live else "-"
    versions = count_text(totals.versions_count)
    chunks = counted(shared.chunks_count, "chunk")
    screen.fields(
        {
            "runs": count_text(totals.runs_count),
            "versions": f"{versions} ({count_text(deleted)} deleted)" if deleted else versions,
            "commits": count_text(totals.commits_count),
            "state": f"{bytes_text(totals.total.logical)} if every version were loaded",
            "distinct": f"{bytes_text(shared.raw_bytes)} in {chunks}",
            "live": f"{bytes_text(live)} stored: {ratio}",
            "dead": f"{dead}, {counted(document['condemned_count'], 'object')} condemned",
            "objects": bytes_text(totals.size_bytes) if totals.objects else size,
        }
    )
    screen.line()
    screen.listing(
        sorted(totals.roles.items()),
        Column("ROLE", lambda item: item[0]),
        Column("STATE", lambda item: bytes_text(item[1].logical), right=True),
        Column("LIVE", lambda item: bytes_text(shared.roles.get(item[0], 0)), right=True),
    )
    _draw_shares(screen, shared.shares)
