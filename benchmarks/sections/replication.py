"""The section of replication to S3."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.measure import Result
from benchmarks.sections.pieces import quickest_client, seconds, table, timed, titled

__all__ = ["replicate"]


def replicate(result: Result) -> list[str]:
    """Return the tables of rates, requests, memory, and costs of single requests."""
    blocks = []
    for name, title in (
        ("replicate", "Replicate to S3, not read back"),
        ("replicate, read back", "Replicate to S3 and read back"),
    ):
        rows = result.tables[name]
        best = quickest_client(rows)
        about = f"The client that was quickest at the median is {best}." if best else ""
        blocks.append(titled(title, about, timed(rows, {"vs quickest client": best}, {})))
    blocks.append(titled("Requests to the target", _requests(result.facts["requests"])))
    blocks.append(titled("Peak extra memory of a replication", _peaks(result)))
    blocks.append(titled("Cost of one request to the client", _costs(result)))
    blocks.append(titled("A collection of many terabytes, seen by its coordinator", _known(result)))
    return blocks


def _requests(found: Mapping[str, Mapping[str, int]]) -> str:
    operations = sorted({name for calls in found.values() for name in calls})
    lines = [
        [name, *(str(calls.get(one, 0)) for one in operations), str(sum(calls.values()))]
        for name, calls in found.items()
    ]
    return table(["", *operations, "in all"], lines)


def _peaks(result: Result) -> str:
    lines = []
    for one in result.tables["peak memory"]:
        if one.error:
            lines.append([one.name, "", "", one.error])
            continue
        extra, children = (one.numbers[name] / 2**20 for name in ("extra_bytes", "child_bytes"))
        lines.append([one.name, f"{extra:.0f} MiB", f"{children:.0f} MiB", ""])
    return table(["", "own process", "its children, in all", "note"], lines)


def _costs(result: Result) -> str:
    lines = [
        [one.name, *seconds(one), f"{one.numbers['cpu_s'] * 1000:.1f} ms"]
        for one in result.tables["one request"]
    ]
    return table(["", "median", "min-max", "processor time"], lines)


def _known(result: Result) -> str:
    lines = []
    for one in result.tables["coordinator"]:
        if one.error:
            lines.append([one.name, "", "", "", "", one.error])
            continue
        packs, extra = one.numbers["packs"], one.numbers["extra_bytes"]
        size = f"{one.logical_bytes / 1e12:.1f} TB"
        lines.append(
            [one.name, size, f"{packs:,.0f}", seconds(one)[0], f"{extra / 2**20:.0f} MiB", ""]
        )
    return table(["", "state", "packs", "dry run", "memory", "note"], lines)
