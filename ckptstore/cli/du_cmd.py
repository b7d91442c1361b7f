"""``ckptstore du``: where the bytes went, by run, version and role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptstore.cli.documents import role_document, total_bytes
from ckptstore.cli.options import AsJson, Key, Quiet, StorageOptions, StoreUrl
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.text import bytes_text, count_text
from ckptstore.model import RoleBytes, Version
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.cli.du_shared import Holding

__all__ = ["du"]


def du(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|REF", help="One run, version by version; or one version, role by role."
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Who holds what: alone, and with whom. Reads every manifest."
        ),
    ] = False,
    store: StoreUrl = None,
    option: StorageOptions = None,
    key: Key = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the bytes of runs, versions and roles, and of the store's objects.

    SIZE is what the tensors take in memory, NEW the part that the run's previous version did not
    have, STORED what the new part takes in the store. With --shared, HELD is what is needed to
    load it, and ALONE the part of that which nothing else needs: what deleting it would free.
    """
    output = Output("du", as_json=json, quiet=quiet)
    with opened(store, option, key=key) as opening:
        runs = {info.name: info for info in opening.runs()}
        version = None
        if what is not None and what not in runs:
            # A name alone is that of a run, even of one that is not there.
            version = find_version(opening, what)
        names = [] if version else [name for name in runs if what in {None, name}]
        groups: dict[str, list[Version]] = {name: [] for name in names}
        if version is not None:
            groups[version.run] = [version]
        else:
            for usage in opening.usage(what):
                groups[usage.version.run].append(usage.version)
        objects = _objects(opening) if what is None else None
        holding = _holding(opening, output, version) if shared else None
        everything = [version for versions in groups.values() for version in versions]
        document = {
            "store": opening.url,
            **role_document(_total(everything)),
            "roles": _roles_document(everything),
            "runs": [_run_document(name, versions) for name, versions in groups.items()],
            "objects": objects,
            "sharing": None if holding is None else holding.document(set(groups)),
        }

        def draw(screen: Screen) -> None:
            if holding is not None:
                holding.draw(screen, groups, one_run=what is not None)
                return
            if what is None:
                _draw_runs(screen, groups)
            else:
                _draw_versions(screen, everything)
            screen.line()
            _draw_roles(screen, everything)
            if objects is not None:
                screen.line()
                _draw_objects(screen, objects)

        output.show(document, draw)
        for reason in () if holding is None else holding.skipped:
            output.note(f"left out: {reason}")


def _holding(store: Store, output: Output, version: Version | None) -> Holding:
    from ckptstore.cli.du_shared import holding_of

    with progress_bars(output) as progress:
        return holding_of(store, version, progress)


def _objects(store: Store) -> dict[str, dict[str, int]]:
    """Return the store's objects by kind, as listed."""
    return {
        kind: {"count": totals.count, "bytes": totals.size_bytes}
        for kind, totals in store.stats().objects.items()
    }


def _total(versions: Sequence[Version]) -> RoleBytes:
    return total_bytes(part for version in versions for part in version.roles.values())


def _by_role(versions: Sequence[Version]) -> dict[str, RoleBytes]:
    parts: dict[str, list[RoleBytes]] = {}
    for version in versions:
        for role, part in version.roles.items():
            parts.setdefault(role, []).append(part)
    return {role: total_bytes(found) for role, found in sorted(parts.items())}


def _roles_document(versions: Sequence[Version]) -> dict[str, Any]:
    return {role: role_document(part) for role, part in _by_role(versions).items()}


def _run_document(name: str, versions: Sequence[Version]) -> dict[str, Any]:
    return {
        "name": name,
        **role_document(_total(versions)),
        "roles": _roles_document(versions),
        "versions": [
            {
                "id": version.id,
                "step": version.step,
                **role_document(_total([version])),
                "roles": _roles_document([version]),
            }
            for version in versions
        ],
    }


_BYTES = (
    Column(title="SIZE", right=True, wrap=False),
    Column(title="NEW", right=True, wrap=False),
    Column(title="STORED", right=True, wrap=False),
    Column(title="STORED/SIZE", right=True, wrap=False),
)


def _cells(part: RoleBytes) -> tuple[str, ...]:
    share = f"{100 * part.stored / part.logical:.1f}%" if part.logical else "-"
    return (bytes_text(part.logical), bytes_text(part.new), bytes_text(part.stored), share)


def _draw_runs(screen: Screen, groups: dict[str, list[Version]]) -> None:
    rows = [
        (name, count_text(len(versions)), *_cells(_total(versions)))
        for name, versions in groups.items()
    ]
    everything = [version for versions in groups.values() for version in versions]
    rows.append(("total", count_text(len(everything)), *_cells(_total(everything))))
    screen.table((Column(title="RUN"), Column(title="VERSIONS", right=True), *_BYTES), rows)


def _draw_versions(screen: Screen, versions: Sequence[Version]) -> None:
    rows = [
        (str(version.step), version.id[:8], *_cells(_total([version])))
        for version in reversed(versions)
    ]
    rows.append(("total", "", *_cells(_total(versions))))
    screen.table((Column(title="STEP", right=True), Column(title="ID"), *_BYTES), rows)


def _draw_roles(screen: Screen, versions: Sequence[Version]) -> None:
    rows = [(role, *_cells(part)) for role, part in _by_role(versions).items()]
    screen.table((Column(title="ROLE"), *_BYTES), rows)


def _draw_objects(screen: Screen, objects: dict[str, dict[str, int]]) -> None:
    rows = [
        (kind, count_text(totals["count"]), bytes_text(totals["bytes"]))
        for kind, totals in objects.items()
    ]
    count = sum(totals["count"] for totals in objects.values())
    size = sum(totals["bytes"] for totals in objects.values())
    rows.append(("total", count_text(count), bytes_text(size)))
    columns = (
        Column(title="OBJECTS"),
        Column(title="COUNT", right=True),
        Column(title="BYTES", right=True),
    )
    screen.table(columns, rows)
