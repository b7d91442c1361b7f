"""``ckptstore du``: space used by run, version and role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ckptstore.cli.du_shared import holding_of
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions
from ckptstore.cli.text import bytes_text, count_text
from ckptstore.maintenance.reports.documents import objects_document, role_document
from ckptstore.maintenance.reports.usage import ObjectTotals, by_role, sum_roles
from ckptstore.model import RoleBytes, Version
from ckptstore.store import Store


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
        version = _version(opening, what)
        groups = _groups(opening, what, version)
        objects = opening.stats().objects if what is None else {}
        one_run = what is not None
        holding = None
        if shared:
            with output.progress() as progress:
                holding = holding_of(opening, version, groups, one_run=one_run, progress=progress)
        everything = [one for versions in groups.values() for one in versions]
        document = {
            "store": opening.url,
            **_bytes_document(everything),
            "runs": [_run_document(name, versions) for name, versions in groups.items()],
            "objects": objects_document(objects) or None,
            "sharing": None if holding is None else holding.document,
        }

        def draw(screen: Screen) -> None:
            if one_run:
                _draw_versions(screen, everything)
            else:
                _draw_runs(screen, groups, everything)
            screen.line()
            _draw_roles(screen, everything)
            if objects:
                screen.line()
                _draw_objects(screen, objects)

        output.show(document, draw if holding is None else holding.draw)
        for reason in () if holding is None else holding.skipped:
            output.note(f"left out: {reason}")


def _version(store: Store, what: str | None) -> Version | None:
    """Return the version that was named; None if a run or the whole store was."""
    if what is None or what in {info.name for info in store.runs()}:
        return None
    # A name alone is that of a run, even of one that is not there.
    return find_version(store, what)


def _groups(store: Store, what: str | None, version: Version | None) -> dict[str, list[Version]]:
    """Return versions by run, including runs without versions."""
    if version is not None:
        return {version.run: [version]}
    names = [info.name for info in store.runs() if what in {None, info.name}]
    groups: dict[str, list[Version]] = {name: [] for name in names}
    for usage in store.usage(what):
        groups[usage.version.run].append(usage.version)
    return groups


def _total(versions: Sequence[Version]) -> RoleBytes:
    return sum_roles(part for version in versions for part in version.roles.values())


def _bytes_document(versions: Sequence[Version]) -> dict[str, Any]:
    roles = {role: role_document(part) for role, part in sorted(by_role(versions).items())}
    return {**role_document(_total(versions)), "roles": roles}


def _run_document(name: str, versions: Sequence[Version]) -> dict[str, Any]:
    each = [{"id": one.id, "step": one.step, **_bytes_document([one])} for one in versions]
    return {"name": name, **_bytes_document(versions), "versions": each}


_BYTES = (
    Column("SIZE", right=True, wrap=False),
    Column("NEW", right=True, wrap=False, drop=2),
    Column("STORED", right=True, wrap=False),
    Column("STORED/SIZE", right=True, wrap=False, drop=1),
)


def _cells(part: RoleBytes) -> tuple[str, ...]:
    share = f"{100 * part.stored / part.logical:.1f}%" if part.logical else "-"
    return (bytes_text(part.logical), bytes_text(part.new), bytes_text(part.stored), share)


def _draw_runs(
    screen: Screen, groups: Mapping[str, Sequence[Version]], everything: Sequence[Version]
) -> None:
    rows = [
        (name, count_text(len(versions)), *_cells(_total(versions)))
        for name, versions in [*groups.items(), ("total", everything)]
    ]
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
