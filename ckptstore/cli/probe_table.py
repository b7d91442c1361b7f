"""Findings of a probe of a storage, drawn for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.probe import failed_check
from ckptstore.cli.output import Column, Screen
from ckptstore.cli.text import seconds_text

_ADVICE = {
    PutIfAbsent.ATOMIC: "safe for concurrent writers",
    PutIfAbsent.IGNORED: "single writer only: the storage takes no notice of the condition to "
    "create an object only if it is absent, so that concurrent writers would lose commits",
    PutIfAbsent.REFUSED: "single writer only: the storage refuses to create an object only if it "
    "is absent",
    PutIfAbsent.UNKNOWN: "single writer only: not everything that concurrent writers need held",
}


def advice(report: Mapping[str, Any]) -> str:
    """Return what a storage may be used for, by the report of a probe as JSON values."""
    if failed := failed_check(report):
        return f"no store can be kept here, not even for a single writer: {failed} failed"
    return _ADVICE[PutIfAbsent(report["put_if_absent"])]


def draw_findings(screen: Screen, report: Mapping[str, Any]) -> None:
    """Draw the checks, the latencies and the verdict of a probe.

    Parameters
    ----------
    report
        As :meth:`ckptstore.backends.probe.ProbeReport.to_dict` gives it; an empty one (a store
        that was made elsewhere) draws nothing but a remark.
    """
    from rich.text import Text

    if not report:
        screen.line("nothing is recorded about the storage")
        return
    rows = [
        (
            check["name"],
            Text("holds", "green") if check["passed"] else Text("FAILS", "bold red"),
            check["detail"],
        )
        for check in report["checks"]
    ]
    screen.table((Column("CHECK"), Column(""), Column("SEEN")), rows)
    screen.line()
    latencies = [(name, seconds_text(ms / 1000)) for name, ms in report["latencies_ms"].items()]
    screen.table((Column("OPERATION"), Column("LATENCY (MEDIAN)", right=True)), latencies)
    screen.line()
    verdict = PutIfAbsent(report["put_if_absent"])
    atomic = verdict is PutIfAbsent.ATOMIC
    screen.line(f"put-if-absent: {verdict.value}", "green" if atomic else "bold red")
    screen.line(f"{report['backend']}: {advice(report)}", "bold")
