"""The section of saves and loads over many slow connections."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import seconds, table, titled

__all__ = ["width"]


def width(result: Result) -> list[str]:
    """Return the tables at 64 connections, by the number of connections, and under faults."""
    bound, plain = result.facts["bound"], result.facts["plain"]
    said = "; ".join(
        f"{what}: {bound[what] / 1e6:.0f} MB/s (a plain loop without a limit: "
        f"{max(plain[what].values()) / 1e6:.0f})"
        for what in ("save", "load")
    )
    blocks = [
        titled("Save over slow connections", f"The bound: {said}.", _rates(result, "save")),
        titled("Load over slow connections", _rates(result, "load")),
    ]
    if result.tables["width"]:
        blocks.append(titled("MB/s by the number of connections", _curve(result.tables["width"])))
    for name, title in (
        ("slow", "One request in a hundred is slow"),
        ("busy", "503 SlowDown above a rate"),
    ):
        blocks.append(titled(title, _faults(result.tables[name])))
    return blocks


def sharing(result: Result) -> list[str]:
    """Return a table for each pace of the connections."""
    blocks = []
    for pace, rows in result.tables.items():
        alone = rows[0]
        lines = [
            [
                one.name,
                *seconds(one),
                f"{one.median / alone.median:.1f}",
                f"{one.numbers['sent_states']:.2f}",
                f"{one.numbers['requests']:.0f}",
                f"{one.numbers['at_once']:.0f}",
            ]
            for one in rows
        ]
        columns = ["", "median", "min-max", "of one rank", "states sent", "requests", "at once"]
        blocks.append(titled(f"Connections: {pace}", table(columns, lines)))
    return blocks


def _rates(result: Result, what: str) -> str:
    lines = []
    for one in result.tables[what]:
        if one.error:
            lines.append([one.name, *[""] * 9, one.error])
            continue
        rate = one.logical_bytes / one.median
        share = f"{rate / result.facts['bound'][what]:.2f}"
        lines.append([_short(one), *seconds(one), f"{rate / 1e6:.0f}", share, *_costs(one)])
    columns = ["", "median", "min-max", "MB/s", "of the bound", "requests", "MB each", "at once"]
    return table([*columns, "processor s/GB", "extra memory", "note"], lines)


def _costs(one: Measured) -> Sequence[str]:
    numbers = one.numbers
    each = numbers["moved_bytes"] / max(1, numbers["data_requests"]) / 1e6
    return (
        f"{numbers['requests']:.0f}",
        f"{each:.1f}",
        f"{numbers['at_once']:.0f}",
        f"{numbers['processor_s'] / one.logical_bytes * 1e9:.2f}",
        f"{numbers['extra_bytes'] / 2**20:.0f} MiB",
        one.note,
    )


def _short(one: Measured) -> str:
    """Return the name of a row without what all rows of the table share."""
    name, _, action = one.name.partition(": ")
    return f"{name}, {action.removeprefix('load, ')}" if action != "save" else name


def _curve(rows: Sequence[Measured]) -> str:
    widths = sorted({int(one.numbers["width"]) for one in rows if "width" in one.numbers})
    names = list(dict.fromkeys(one.name for one in rows))
    lines = []
    for name in names:
        found = {int(one.numbers["width"]): one for one in rows if one.name == name}
        lines.append([name, *(_rate(found.get(width)) for width in widths)])
    return table(["", *map(str, widths)], lines)


def _rate(one: Measured | None) -> str:
    if one is None:
        return ""
    return "failed" if one.error else f"{one.logical_bytes / one.median / 1e6:.0f}"


def _faults(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        if one.error:
            lines.append([one.name, "failed", *[""] * 5, one.error])
            continue
        numbers = one.numbers
        before, requests = numbers.get("clean_requests", 0), numbers["requests"]
        more = f"{requests / before:.2f}x" if before else ""
        without = f"{numbers['clean_s']:.2f} s" if "clean_s" in numbers else ""
        counts = [f"{requests:.0f}", more, *(f"{numbers[name]:.0f}" for name in ("busy", "slow"))]
        lines.append([one.name, f"{one.median:.2f} s", without, *counts, one.note])
    columns = ["", "seconds", "without", "requests", "of those without", "refused", "slow"]
    return table([*columns, "note"], lines)
