"""``ckptstore diff``: compare two versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.cli.documents import metrics_document
from ckptstore.cli.elsewhere import FromReplica, give
from ckptstore.cli.options import CommonOptions, SourceOptions
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.text import bytes_text, count_text, metric_text, version_text

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.diff import DiffReport, Side, TensorChange
    from ckptstore.states.compare import TensorError

__all__ = ["diff"]

_ROWS: Final = 20
"""Tensors in the text unless ``--limit`` says otherwise."""
_ORDER: Final = ("changed", "added", "removed", "moved", "same")


def diff(
    first: Annotated[str, typer.Argument(metavar="REF", help="The older version.")],
    second: Annotated[str, typer.Argument(metavar="REF2", help="The newer version.")],
    *,
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Read the changed tensors: print the relative L2 and the largest absolute "
            "difference of each.",
        ),
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", "-n", min=0, metavar="N", help="Number of tensors to list; 0 for all."
        ),
    ] = _ROWS,
    replica: FromReplica = None,
    source: SourceOptions,
    options: CommonOptions,
) -> None:
    """Compare two versions: tensors added, removed, moved or changed, and values that differ.

    Without --values only the two manifests are read.
    """
    output = options.output("diff")
    with opened(options) as opening:
        give(opening, replica, source)
        refs = [f"#{find_version(opening, ref).id}" for ref in (first, second)]
        report = opening.diff(*refs)
        errors: Mapping[str, TensorError | None] = {}
        if values:
            with progress_bars(output) as progress:
                errors = report.errors(progress=progress)
    view = _View(report=report, errors=errors, with_values=values, limit=limit)
    output.show(view.document() if options.json else {}, view.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Prints a report as text or JSON."""

    report: DiffReport
    errors: Mapping[str, TensorError | None]
    with_values: bool
    limit: int

    def document(self) -> dict[str, Any]:
        """Return the whole report without equal tensors."""
        report = self.report
        return {
            "first": {"id": report.first.id, "run": report.first.run, "step": report.first.step},
            "second": {
                "id": report.second.id,
                "run": report.second.run,
                "step": report.second.step,
            },
            "equal": report.equal,
            "counts": {status: len(report.of(status)) for status in _ORDER},
            "tensors": [self._change(c) for c in report.changes if c.status != "same"],
            "values": [asdict(value) for value in report.values],
        }

    def _change(self, change: TensorChange) -> dict[str, Any]:
        error = self.errors.get(change.path)
        return {
            "path": change.path,
            "status": change.status,
            "before": _side(change.before),
            "after": _side(change.after),
            "same_bytes": change.same_bytes,
            "error": None
            if error is None
            else {
                **metrics_document({"relative_l2": error.relative_l2, "max_abs": error.max_abs}),
                "elements": error.elements,
                "unequal": error.unequal,
                "nonfinite": error.nonfinite,
            },
        }

    def draw(self, screen: Screen) -> None:
        """Draw the counts, the tensors that differ, and the values that differ."""
        report = self.report
        names = [version_text(one) for one in (report.first, report.second)]
        screen.heading(" -> ".join(names))
        rows = []
        for status in _ORDER:
            changes = report.of(status)
            sides = [side for c in changes if (side := c.after or c.before) is not None]
            size = sum(side.nbytes for side in sides)
            rows.append((status, count_text(len(changes)), bytes_text(size)))
        columns = (
            Column(title="TENSORS"),
            Column(title="COUNT", right=True),
            Column(title="SIZE", right=True),
        )
        screen.table(columns, rows)
        listed = [c for status in _ORDER[:-1] for c in report.of(status)]
        if listed:
            screen.line()
            self._draw_tensors(screen, listed)
        if report.values:
            screen.line()
            cells = [(v.path, v.before or "-", v.after or "-") for v in report.values]
            shown = cells[: self.limit or None]
            screen.table((Column(title="VALUE"), Column(title="WAS"), Column(title="IS")), shown)
            _rest(screen, len(cells) - len(shown))

    def _draw_tensors(self, screen: Screen, listed: list[TensorChange]) -> None:
        columns = [
            Column(title="STATUS"),
            Column(title="TENSOR"),
            Column(title="WAS"),
            Column(title="SIZE", right=True, wrap=False),
            Column(title="SAME", right=True, wrap=False, drop=1),
        ]
        if self.with_values:
            columns += [
                Column(title="RELATIVE L2", right=True, wrap=False),
                Column(title="MAX ABS", right=True, wrap=False),
            ]
        shown = listed[: self.limit or None]
        screen.table(columns, [self._row(change) for change in shown])
        _rest(screen, len(listed) - len(shown))

    def _row(self, change: TensorChange) -> list[str]:
        side = change.after or change.before
        assert side is not None  # noqa: S101  # one of them always is
        share = f"{100 * change.same_bytes / side.nbytes:.0f}%" if side.nbytes else "-"
        row = [
            change.status,
            change.path,
            _was(change),
            bytes_text(side.nbytes),
            share if change.status == "changed" else "-",
        ]
        if self.with_values:
            error = self.errors.get(change.path)
            if error is None:
                return [*row, "-", "-"]
            more = f" (+{count_text(error.nonfinite)} not finite)" if error.nonfinite else ""
            row += [metric_text(error.relative_l2), metric_text(error.max_abs) + more]
        return row


def _was(change: TensorChange) -> str:
    """Return the old path of a moved leaf and the old kind of a changed one, as text."""
    if change.before is None or change.after is None:
        return "-"
    if change.status == "moved":
        return change.before.path
    kinds = [
        f"{side.dtype} {'x'.join(map(str, side.shape)) or 'scalar'}"
        for side in (change.before, change.after)
    ]
    return "-" if kinds[0] == kinds[1] else f"{kinds[0]}, now {kinds[1]}"


def _side(side: Side | None) -> dict[str, Any] | None:
    return None if side is None else asdict(side)


def _rest(screen: Screen, more: int) -> None:
    if more > 0:
        screen.line(f"and {count_text(more)} more; --limit 0 lists all")
