"""Building blocks of sections: facts, tables, timings, ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measure import Measured, Result

__all__ = [
    "facts",
    "listing_time",
    "multiple",
    "outcomes",
    "quickest_client",
    "ratio",
    "seconds",
    "share",
    "speed",
    "table",
    "timed",
    "times",
    "titled",
    "words",
]

_Row = Sequence[str]


def facts(result: Result) -> str:
    """Return the paragraph on the measurement: state, machine, date and versions."""
    head = result.header
    packages = ", ".join(f"{name} {version}" for name, version in head["packages"].items())
    before, after = head["load_average_before"][0], head["load_average_after"][0]
    parameters = ", ".join(f"{words(name)} {value}" for name, value in result.parameters.items())
    return (
        f"*{head['date']}, commit {head['commit']}; {head['cores']} cores of {head['cpu']}, "
        f"{head['memory_gib']} GiB, Linux {head['kernel']}; {head['file_system']} on "
        f"{head['disk']}; Python {head['python']}, {packages}; load average {before:.1f} before "
        f"and {after:.1f} after. Parameters: {parameters}. The whole suite took "
        f"{head['seconds_in_all']:.0f} s.*"
    )


def ratio(one: Measured, base: Measured | None) -> float | None:
    """Return the speed of `one` as a multiple of `base`'s: the median over the rounds."""
    if base is None or not one.seconds or not base.seconds:
        return None
    pairs = zip(base.seconds, one.seconds, strict=False)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def table(columns: _Row, rows: Sequence[_Row]) -> str:
    """Return a table in Markdown; figures are aligned to the right, first column and notes not."""
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append(
        "|" + "".join("---|" if name in {columns[0], "note"} else "---:|" for name in columns)
    )
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def words(name: str) -> str:
    """Return a name of a parameter as words."""
    return name.replace("_", " ")


def seconds(one: Measured) -> tuple[str, str]:
    """Return median, and least to greatest, in a unit that suits."""
    scale, unit = (1000.0, "ms") if one.median < 0.1 else (1.0, "s")
    low, high = min(one.seconds) * scale, max(one.seconds) * scale
    digits = 1 if unit == "ms" else 2
    return f"{one.median * scale:.{digits}f} {unit}", f"{low:.{digits}f}-{high:.{digits}f}"


def times(one: Measured, base: Measured | None) -> str:
    """Return the speed as a multiple of the base's, for a table; empty without one."""
    found = ratio(one, base)
    return "" if found is None else f"{found:.2f}x"


def multiple(one: Measured, base: Measured) -> str:
    """Return the duration as a multiple of the base's: less is better."""
    found = ratio(one, base)
    return "" if found is None else f"{1 / found:.2f}"


def speed(one: Measured) -> str:
    """Return the GB of state a second, at the median."""
    return f"{one.logical_bytes / one.median / 1e9:.2f}"


def timed(
    rows: Sequence[Measured],
    bases: Mapping[str, str],
    extra: Mapping[str, Callable[[Measured], str]],
) -> str:
    """Return a table of timings with the speed, ratios against `bases`, and further columns."""
    by_name = {one.name: one for one in rows}
    columns = ["", "median", "min-max", "GB/s", *bases, *extra, "note"]
    lines = []
    for one in rows:
        if one.error or not one.seconds:
            lines.append([one.name, *[""] * (3 + len(bases) + len(extra)), one.error])
            continue
        ratios = [times(one, by_name.get(base)) for base in bases.values()]
        more = [make(one) for make in extra.values()]
        lines.append([one.name, *seconds(one), speed(one), *ratios, *more, one.note])
    return table(columns, lines)


def share(one: Measured) -> str:
    """Return the bytes stored as a share of the state's."""
    return f"{one.numbers['stored_bytes'] / one.logical_bytes:.3f}"


def titled(title: str, *blocks: str) -> str:
    """Return blocks below a heading."""
    return "\n\n".join([f"### {title}", *blocks])


def outcomes(lines: Sequence[_Row]) -> str:
    """Return the table of observations after each fault."""
    head = ["| fault | tool | observed |", "|---|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def listing_time(facts_of_ls: Mapping[str, Any]) -> str:
    """Return the text on the duration of ``ckptstore ls``, and its imports."""
    if "error" in facts_of_ls:
        return f"Did not run: {facts_of_ls['error']}"
    seconds = facts_of_ls["seconds"]
    imported = [name for name, is_there in facts_of_ls["imported"].items() if is_there]
    absent = [name for name, is_there in facts_of_ls["imported"].items() if not is_there]
    return (
        f"Median {facts_of_ls['median']:.3f} s ({min(seconds):.3f}-{max(seconds):.3f} s) from the "
        f"start of the process to its end. Imports {', '.join(imported) or 'none'} of the heavy "
        f"modules; not {', '.join(absent) or 'any'}."
    )


def quickest_client(rows: Sequence[Measured]) -> str:
    """Return the name of the client that was quickest at the median; empty without one."""
    clients = [one for one in rows if one.seconds and not one.name.startswith("replicate")]
    return min(clients, key=lambda one: one.median).name if clients else ""
