"""The sections of saves and loads over many connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.byte_paths import UNLIMITED
from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import seconds, table, titled

__all__ = ["byte_paths", "sharing"]


def byte_paths(result: Result) -> list[str]:
    """Return the tables with a limit and without, by the number of connections, and with faults."""
    blocks = []
    for end, place in (("", "over 64 slow connections"), (UNLIMITED, "without a limit")):
        for what in ("save", "load"):
            name = what + end
            bound = f"The bound: {result.facts['bound'][name] / 1e6:.0f} MB/s."
            blocks.append(titled(f"{what.title()} {place}", bound, _rates(result, name)))
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
                f"{one.numbers['processor_s']:.1f}",
                f"{one.numbers['sent_states']:.2f}",
                f"{one.numbers['requests']:.0f}",
                f"{one.numbers['at_once']:.0f}",
            ]
            for one in rows
        ]
        columns = ["", "median", "min-max", "of one rank", "processor s of a rank"]
        columns += ["states sent", "requests", "at once"]
        blocks.append(titled(f"Connections: {pace}", table(columns, lines)))
    return blocks


def _rates(result: Result, what: str) -> str:
    lines = []
    for one in result.tables[what]:
        if one.error:
            lines.append([_short(one), *[""] * 11, one.error])
            continue
        rate = one.logical_bytes / one.median
        share = f"{rate / result.facts['bound'][what]:.2f}"
        lines.append([_short(one), *seconds(one), f"{rate / 1e6:.0f}", share, *_costs(one)])
    columns = ["", "median", "min-max", "MB/s", "of the bound", "client s/GB", "server s/GB"]
    more = ["under the lock", "requests", "MB each", "at once", "extra memory", "note"]
    return table([*columns, *more], lines)


def _costs(one: Measured) -> Sequence[str]:
    numbers = one.numbers
    each = numbers["moved_bytes"] / max(1, numbers["data_requests"]) / 1e6
    return (
        _spread(numbers, "processor_s", 1e9 / one.logical_bytes),
        _spread(numbers, "server_s", 1e9 / one.logical_bytes),
        _spread(numbers, "locked", 1),
        f"{numbers['requests']:.0f}",
        f"{each:.1f}",
        f"{numbers['at_once']:.0f}",
        f"{numbers['extra_bytes'] / 2**20:.0f} MiB",
        one.note,
    )


def _spread(numbers: Mapping[str, float], name: str, scale: float) -> str:
    """Return the median of a number with its least and greatest one; empty if it is unknown."""
    if name not in numbers:
        return ""
    found = [f"{numbers[key] * scale:.2f}" for key in (name, f"{name}_low", f"{name}_high")]
    return f"{found[0]} ({found[1]}-{found[2]})"


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
