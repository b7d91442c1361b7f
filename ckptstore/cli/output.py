"""Output of a command: one JSON document, or text and tables for people. Never both.

stdout holds the result and nothing else; notes, progress and errors go to stderr. rich is
imported only when a table or a bar is drawn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ckptstore.backends.transfers import Ledger, operation
from ckptstore.cli.text import bytes_text, count_text, counted, printable
from ckptstore.errors import CkptStoreError
from ckptstore.events import Progress, ProgressCallback, silent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID
    from rich.text import Text

SCHEMA = 1
"""Version of the JSON documents; rises only when the meaning of a field changes."""

_GAP = 2
"""Blanks between two columns."""
_WIDTH_UNBOUNDED = 10_000
"""Width of a table that goes to a file or pipe, in characters: no cell is ever cut there."""


class Pipe(Exception):
    """The reader of stdout has closed the pipe; not an error."""


class Unwritable(Exception):
    """stdout cannot be written to, for example because the disk is full."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    cell: Callable[[Any], str | Text] = str
    """Of an item of :meth:`Screen.listing`, what stands in this column."""
    _: KW_ONLY
    right: bool = False
    """Numbers: aligned to the right."""
    wrap: bool = True
    """False: never cut or wrapped, however narrow the terminal."""
    drop: int = 0
    """Where the terminal is too narrow, columns are left out in this order, from 1; 0: never."""
    shown: bool = True
    """False: left out of :meth:`Screen.listing`."""


class Screen:
    """stdout for people; made for one command. Colours only on a terminal and without NO_COLOR."""

    def __init__(self) -> None:
        self.console = terminal(sys.stdout)
        self.left_out: list[str] = []
        """Titles of columns that there was no room for."""

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line; escape characters that do not print."""
        self.console.print(
            printable(text), style=style or None, soft_wrap=True, markup=False, highlight=False
        )

    def lines(self, texts: Iterable[str]) -> None:
        """Print lines."""
        for text in texts:
            self.line(text)

    def heading(self, text: str) -> None:
        """Print the title of a section."""
        self.line(text, "bold")

    def fields(self, pairs: Mapping[str, str]) -> None:
        """Print names and values, one pair per line, with aligned values."""
        width = max(map(len, pairs), default=0)
        for name, value in pairs.items():
            self.line(f"{name:<{width}}  {value}")

    def listing(self, items: Iterable[object], *columns: Column) -> None:
        """Print one row an item, under bold titles."""
        shown = [column for column in columns if column.shown]
        self.table(shown, [[column.cell(item) for column in shown] for item in items])

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        """Print rows under bold titles; escape cells of plain text."""
        from rich.table import Table
        from rich.text import Text

        cells = [[Text(printable(x)) if isinstance(x, str) else x for x in row] for row in rows]
        kept = _fitting(columns, cells, self.console.width)
        grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for column in (columns[place] for place in kept):
            grid.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wrap,
                overflow="fold",
            )
        for row in cells:
            grid.add_row(*(row[place] for place in kept))
        self.left_out += [x.title for place, x in enumerate(columns) if place not in kept]
        if self.console.is_terminal:
            self.console.print(grid)
            return
        with self.console.capture() as drawn:
            self.console.print(grid)
        for line in drawn.get().splitlines():  # without the padding of the last column
            self.console.file.write(line.rstrip() + "\n")


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Return the indices of the columns that fit into `width` characters."""
    widths = [
        max([len(column.title), *(row[place].cell_len for row in rows)])
        for place, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    for place in sorted((p for p in kept if columns[p].drop), key=lambda p: columns[p].drop):
        if sum(widths[p] + _GAP for p in kept) - _GAP <= width:
            break
        kept.remove(place)
    return kept


class Output:
    """Prints the result of one command.

    Parameters
    ----------
    command
        Its name, which the document carries.
    as_json
        Print a document instead of text.
    quiet
        Leave out notes and progress.
    """

    def __init__(self, command: str, *, as_json: bool, quiet: bool) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet
        self.transfers: Ledger | None = None
        """What the command moved, for the document of one that takes long."""

    def show(self, document: Mapping[str, Any], render: Callable[[Screen], None]) -> None:
        """Print the result: `document` with ``--json``, else what `render` draws.

        A note says which columns a narrow terminal has no room for.

        Raises
        ------
        Pipe
            The reader has gone away.
        Unwritable
            stdout cannot be written to.
        """
        try:
            if self.as_json:
                moved = {} if self.transfers is None else self.transfers.document()
                write_document({"schema": SCHEMA, "command": self.command, **document, **moved})
                return
            screen = Screen()
            render(screen)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise Pipe from error
        except CkptStoreError:
            raise
        except OSError as error:
            raise Unwritable(error.strerror or str(error)) from error
        if screen.left_out:
            named = ", ".join(dict.fromkeys(screen.left_out))
            self.note(f"no room for {named}: use a wider terminal, or a pipe")

    def tell(self, document: Mapping[str, Any], *lines: str, brief: str | None = None) -> None:
        """Print the result of what a command did: `document`, or lines.

        Parameters
        ----------
        brief
            The only line with ``--quiet``; None prints none then.

        Raises
        ------
        Pipe
            The reader has gone away.
        """
        quiet = () if brief is None else (brief,)
        self.show(document, lambda screen: screen.lines(quiet if self.quiet else lines))

    @contextmanager
    def progress(self) -> Iterator[ProgressCallback]:
        """Give a callback that draws one bar per stage while the block runs; count what moves.

        It draws nothing with ``--quiet`` and where stderr is not a terminal, so that logs stay
        readable. The bars are wiped at the end: what stays is the command's result.
        """
        with operation(self.command) as moved, _bars(quiet=self.quiet) as progress:
            self.transfers = self.transfers or moved
            yield progress

    def note_rest(self, shown: int, total: int, noun: str, *, lists: str = "lists") -> None:
        """Print a remark below a text that shows only some of `total` items, or has none."""
        if not total and not self.as_json:
            self.note(f"no {noun}s yet")
        elif shown < total and not self.as_json:
            text = f"{count_text(shown)} of {counted(total, noun)}"
            self.note(f"{text}; --limit 0 {lists} all")

    def note(self, text: str) -> None:
        """Print a remark to stderr, unless quiet."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)


def terminal(file: IO[str]) -> Console:
    """Return a console on `file`; as wide as needed if it is not a terminal."""
    from rich.console import Console

    return Console(
        file=file,
        width=None if file.isatty() else _WIDTH_UNBOUNDED,
        soft_wrap=False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def write_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document and a line end to stdout."""
    sys.stdout.write(encode_document(document) + "\n")
    sys.stdout.flush()


def encode_document(document: Mapping[str, Any]) -> str:
    """Return a document as indented JSON.

    Paths may hold lone surrogates, which UTF-8 has not: then everything beyond ASCII is escaped.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(document), indent=2)


@contextmanager
def _bars(*, quiet: bool) -> Iterator[ProgressCallback]:
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeRemainingColumn(),
        console=terminal(sys.stderr),
        transient=True,
    )
    with bars:
        yield _Stages(bars)


class _Stages:
    """One bar per stage; called from worker threads, one call at a time."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, step: Progress) -> None:
        """Move the bar of the step's stage."""
        task = self._tasks.get(step.stage)
        if task is None:
            task = self._tasks[step.stage] = self._bars.add_task(step.stage, amount="")
        self._bars.update(task, completed=step.done, total=step.total or None)
        speed = self._bars.tasks[task].speed if step.unit == "bytes" else None
        rate = f", {bytes_text(speed)}/s" if speed else ""
        self._bars.update(task, amount=_amount(step, rate))


def _amount(step: Progress, rate: str) -> str:
    if step.unit == "bytes":
        done, total = bytes_text(step.done), bytes_text(step.total)
    else:
        done, total = count_text(step.done), f"{count_text(step.total)} {step.unit}"
    text = (f"{done} of {total}" if step.total else done) + rate
    return f"{text}  {printable(step.detail)}" if step.detail else text
