"""``ckptstore diff``: compare two versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ckptstore.cli.documents import metrics_document, name_document
from ckptstore.cli.elsewhere import FromReplica, give
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.progress import progress_bars
from ckptstore.cli.session import find_version, opened
from ckptstore.cli.store_options import CommonOptions, SourceOptions
from ckptstore.cli.text import bytes_text, count_text, metric_text, version_text

if TYPE_CHECKING:
    from ckptstore.maintenance.reports.diff import DiffReport, Status, TensorChange
    from ckptstore.states.compare import TensorError

_ROWS: Final = 20
"""Tensors in the text unless ``--limit`` says otherwise."""
_ORDER: Final = ("changed", "added", "removed", "moved", "same")


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
            "first": name_document(report.first),
            "second": name_document(report.second),
            "equal": report.equal,
            "counts": {status: len(report.of(status)) for status in _ORDER},
            "tensors": [self._change(c) for c in report.changes if c.status != "same"],
            "values": report.values,
        }

    def _change(self, change: TensorChange) -> dict[str, Any]:
        error = self.errors.get(change.path)
        return {
            "path": change.path,
            "status": change.status,
            "before": change.before,
            "after": change.after,
            "same_bytes": change.same_bytes,
            "error": None if error is None else metrics_document(asdict(error)),
        }

    def draw(self, screen: Screen) -> None:
        """Draw the counts, the tensors that differ, and the values that differ."""
        report = self.report
        names = [version_text(one) for one in (report.first, report.second)]
        screen.heading(" -> ".join(names))

        def size(status: Status) -> str:
            return bytes_text(sum(map(_nbytes, report.of(status))))

        screen.listing(
            _ORDER,
            Column("TENSORS"),
            Column("COUNT", lambda status: count_text(len(report.of(status))), right=True),
            Column("SIZE", size, right=True),
        )
        listed = [c for status in _ORDER[:-1] for c in report.of(status)]
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
        shown = listed[: self.limit or None]
        screen.listing(
            shown,
            Column("STATUS", lambda change: change.status),
            Column("TENSOR", lambda change: change.path),
            Column("WAS", _was),
            Column("SIZE", lambda change: bytes_text(_nbytes(change)), right=True, wrap=False),
            Column("SAME", _same, right=True, wrap=False, drop=1),
            *(
                [
                    Column("RELATIVE L2", self._relative_l2, right=True, wrap=False),
                    Column("MAX ABS", self._max_abs, right=True, wrap=False),
                ]
                if self.with_values
                else []
            ),
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
    return (
        f"{100 * change.same_bytes / nbytes:.0f}%" if nbytes and change.status == "changed" else "-"
    )


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


def _rest(screen: Screen, more: int) -> None:
    if more > 0:
        screen.line(f"and {count_text(more)} more; --limit 0 lists all")
