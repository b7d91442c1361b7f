"""Section of the server of versions."""

from __future__ import annotations

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import seconds, speed, table, times, titled

__all__ = ["serve"]


def serve(result: Result) -> list[str]:
    """Return a table for each number of clients."""
    columns = ["", "median", "min-max", "GB/s", "vs nginx", "vs load", "first byte"]
    columns += ["processor s/GB", "peak memory", "note"]
    alone = {one.name: one for one in result.tables["1 client"]}
    blocks = []
    for name, rows in result.tables.items():
        nginx = next((one for one in rows if one.name == "nginx"), None)
        lines = []
        for one in rows:
            if one.error:
                lines.append([one.name, *[""] * (len(columns) - 2), one.error])
                continue
            load = alone.get(one.name.replace("serve", "load"))
            own = "" if one is nginx or one is load else times(one, nginx)
            more = "" if one is nginx or one is load or load is None else times(one, load)
            lines.append([one.name, *seconds(one), speed(one), own, more, *_numbers(one), ""])
        blocks.append(titled(name[:1].upper() + name[1:], table(columns, lines)))
    return blocks


def _numbers(one: Measured) -> tuple[str, str, str]:
    """Return first byte, processor time and memory."""
    first, peak = one.numbers.get("first_byte_s"), one.numbers.get("peak_bytes")
    return (
        "" if first is None else f"{first * 1e3:.0f} ms",
        f"{one.numbers['processor_s'] / one.logical_bytes * 1e9:.2f}",
        "" if peak is None else f"{peak / 2**20:.0f} MiB",
    )
