"""``ckptstore diff``: compare two versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ckptstore.cli.output import Column, Screen
from ckptstore.cli.session import find_version, give_replica, opened
from ckptstore.cli.store_options import CommonOptions, FromReplica, SourceOptions
from ckptstore.cli.text import bytes_text, count_text, metric_text, version_text
from ckptstore.maintenance.reports.documents import STATUSES, diff_document

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.diff import DiffReport, Status, TensorChange
    from ckptstore.states.compare import TensorError

_ROWS: Final = 20
"""Tensors in the text unless ``--limit`` says otherwise."""


def diff(
    first: Annotated[str, typer.Argument(metavar="REF")],
    second: Annotated[str, typer.Argument(metavar="REF2")],
    *,
    values: bool = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, metavar="N")] = _ROWS,
    replica: FromReplica = None,
    source: SourceOptions,
    options: CommonOptions,
) -> None:
    """Compare two versions: tensors added, removed, moved or changed, and values that differ.

    Without --values only the two manifests are read.

    Parameters
    ----------
    first
        The older version.
    second
        The newer version.
    values
        Read the changed tensors: print the relative L2 and the largest absolute difference of each.
    limit
        Number of tensors to list; 0 for all.

    Examples
    --------
    ckptstore diff gpt@1000 gpt@1200
    ckptstore diff gpt@latest lora@latest --values
    """
    output = options.output("diff")
    with opened(options) as opening:
        give_replica(opening, replica, source)
        report = opening.diff(*[f"#{find_version(opening, ref).id}" for ref in (first, second)])
        errors: Mapping[str, TensorError | None] = {}
        if values:
            with output.progress() as progress:
                errors = report.errors(progress=progress)
    view = _View(report=report, errors=errors, with_values=values, limit=limit)
    output.show(diff_document(report, errors) if options.json else {}, view.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Prints a report as text."""

    report: DiffReport
    errors: Mapping[str, TensorError | None]
    with_values: bool
    limit: int

    def draw(self, screen: Screen) -> None:
        """Draw the counts, the tensors that differ, and the values that differ."""
        report = self.report
        screen.heading(" -> ".join(map(version_text, (report.first, report.second))))

        def size(status: Status) -> str:
            return bytes_text(sum(map(_nbytes, report.of(status))))

        screen.listing(
            STATUSES,
            Column("TENSORS"),
            Column("COUNT", lambda status: count_text(len(report.of(status))), right=True),
            Column("SIZE", size, right=True),
        )
        listed = [c for status in STATUSES[:-1] for c in report.of(status)]
        if listed:
            screen.line()
            self._draw_tensors(screen, listed)
        if report.values:
            screen.line()
            shown = report.values[: self.limit or None]
            screen.listing(
                shown,
                Column("VALUE", lambda value: value.path),
                Column("WAS", lambda value: value.before or "-"),
                Column("IS", lambda value: value.after or "-"),
            )
            _rest(screen, len(report.values) - len(shown))

    def _draw_tensors(self, screen: Screen, listed: list[TensorChange]) -> None:
        shown, values = listed[: self.limit or None], self.with_values
        screen.listing(
            shown,
            Column("STATUS", lambda change: change.status),
            Column("TENSOR", lambda change: change.path),
            Column("WAS", _was),
            Column("SIZE", lambda change: bytes_text(_nbytes(change)), right=True, wrap=False),
            Column("SAME", _same, right=True, wrap=False, drop=1),
            Column("RELATIVE L2", self._relative_l2, right=True, wrap=False, shown=values),
            Column("MAX ABS", self._max_abs, right=True, wrap=False, shown=values),
        )
        _rest(screen, len(listed) - len(shown))

    def _relative_l2(self, change: TensorChange) -> str:
        error = self.errors.get(change.path)
        return "-" if error is None else metric_text(error.relative_l2)

    def _max_abs(self, change: TensorChange) -> str:
        error = self.errors.get(change.path)
        if error is None:
            return "-"
        more = f" (+{count_text(error.nonfinite)} not finite)" if error.nonfinite else ""
        return metric_text(error.max_abs) + more


def _nbytes(change: TensorChange) -> int:
    side = change.after or change.before
    assert side is not None  # noqa: S101  # one of them always is
    return side.nbytes


def _same(change: TensorChange) -> str:
    nbytes = _nbytes(change)
    has_share = nbytes and change.status == "changed"
    return f"{100 * change.same_bytes / nbytes:.0f}%" if has_share else "-"


def _was(change: TensorChange) -> str:
    """Return the old path of a moved leaf and the old kind of a changed one, as text."""
    if change.before is None or change.after is None:
        return "-"
    if change.status == "moved":
        return change.before.path
    sides = (change.before, change.after)
    kinds = [f"{side.dtype} {'x'.join(map(str, side.shape)) or 'scalar'}" for side in sides]
    return "-" if kinds[0] == kinds[1] else f"{kinds[0]}, now {kinds[1]}"


def _rest(screen: Screen, more: int) -> None:
    if more > 0:
        screen.line(f"and {count_text(more)} more; --limit 0 lists all")
