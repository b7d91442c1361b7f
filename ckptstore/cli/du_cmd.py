"""``ckptstore du``: space used by run, version and role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptstore.cli.documents import role_document
from ckptstore.cli.options import CommonOptions
from ckptstore.cli.output import Column, Output, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.text import bytes_text, count_text
from ckptstore.maintenance.reports.usage import by_role, sum_roles
from ckptstore.model import RoleBytes, Version
from ckptstore.store import Store

if TYPE_CHECKING:
    from ckptstore.cli.du_shared import Holding


def du(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|REF", help="A run, shown by version; or a version, shown by role."
        ),
    ] = None,
    *,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Show data that each run or version holds alone, and data that it shares. "
            "Reads every manifest.",
        ),
    ] = False,
    options: CommonOptions,
) -> None:
    """Show the space used by runs, versions and roles, and by the store's objects.

    SIZE is the size of the tensors in memory, NEW the part that the run's previous version did not
    have, STORED the space of that part in the store. With --shared, HELD is the data needed to load
    it, and ALONE the part that nothing else needs: deleting the version or run frees ALONE.
    """
    output = options.output("du")
    with opened(options) as opening:
        version = _version(opening, what)
        groups = _groups(opening, what, version)
        objects = _objects(opening) if what is None else None
        holding = _holding(opening, output, version) if shared else None
        view = _View(groups=groups, one_run=what is not None, objects=objects, holding=holding)
        output.show(view.document(opening.url), view.draw)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Prints the space of runs and their versions."""

    groups: dict[str, list[Version]]
    one_run: bool
    """One run, or one version of it."""
    objects: dict[str, dict[str, int]] | None
    holding: Holding | None

    @property
    def everything(self) -> list[Version]:
        """All versions, run after run."""
        return [version for versions in self.groups.values() for version in versions]

    def document(self, url: str) -> dict[str, Any]:
        """Return everything as one document."""
        everything = self.everything
        return {
            "store": url,
            **role_document(_total(everything)),
            "roles": _roles_document(everything),
            "runs": [_run_document(name, versions) for name, versions in self.groups.items()],
            "objects": self.objects,
            "sharing": None if self.holding is None else self.holding.document(set(self.groups)),
        }

    def draw(self, screen: Screen) -> None:
        """Draw the holders with ``--shared``; else runs or versions, roles and objects."""
        if self.holding is not None:
            self.holding.draw(screen, self.groups, one_run=self.one_run)
            return
        everything = self.everything
        if self.one_run:
            _draw_versions(screen, everything)
        else:
            _draw_runs(screen, self.groups)
        screen.line()
        _draw_roles(screen, everything)
        if self.objects is not None:
            screen.line()
            _draw_objects(screen, self.objects)


def _holding(store: Store, output: Output, version: Version | None) -> Holding:
    from ckptstore.cli.du_shared import holding_of

    with progress_bars(output) as progress:
        return holding_of(store, version, progress)


def _objects(store: Store) -> dict[str, dict[str, int]]:
    """Return the store's listed objects by kind."""
    return {
        kind: {"count": totals.count, "bytes": totals.size_bytes}
        for kind, totals in store.stats().objects.items()
    }


def _total(versions: Sequence[Version]) -> RoleBytes:
    return sum_roles(part for version in versions for part in version.roles.values())


def _roles_document(versions: Sequence[Version]) -> dict[str, Any]:
    return {role: role_document(part) for role, part in sorted(by_role(versions).items())}


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
    Column(title="NEW", right=True, wrap=False, drop=2),
    Column(title="STORED", right=True, wrap=False),
    Column(title="STORED/SIZE", right=True, wrap=False, drop=1),
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
    rows = [(role, *_cells(part)) for role, part in sorted(by_role(versions).items())]
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
