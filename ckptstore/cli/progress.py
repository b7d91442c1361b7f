"""Progress bars on stderr for the commands that take long; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptstore.cli.output import Output, terminal
from ckptstore.cli.text import bytes_text, count_text, printable
from ckptstore.events import Progress, ProgressCallback, silent

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


@contextmanager
def progress_bars(output: Output) -> Iterator[ProgressCallback]:
    """Give a callback that draws one bar per stage while the block runs.

    It draws nothing with ``--quiet`` and where stderr is not a terminal, so that logs stay
    readable. The bars are wiped at the end: what stays is the command's result.
    """
    if output.quiet or not sys.stderr.isatty():
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
        self._bars.update(task, completed=step.done, total=step.total or None, amount=_amount(step))


def _amount(step: Progress) -> str:
    if step.unit == "bytes":
        done, total = bytes_text(step.done), bytes_text(step.total)
    else:
        done, total = count_text(step.done), f"{count_text(step.total)} {step.unit}"
    text = f"{done} of {total}" if step.total else done
    return f"{text}  {printable(step.detail)}" if step.detail else text
