"""Sections of the catalog, its later life, and many writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import listing_time, seconds, table, titled

__all__ = ["catalog", "scale"]


def catalog(result: Result) -> list[str]:
    """Return the tables of commits, of a long log, and of its later life."""
    commits = [
        [
            one.name,
            f"{one.numbers['commits'] / one.median:.0f}" if one.seconds else "",
            _per_second(one),
            one.error,
        ]
        for one in result.tables["commits"]
    ]
    many = [
        [one.name, *(seconds(one) if one.seconds else ("", "")), one.error]
        for one in result.tables["many versions"]
    ]
    count = result.parameters["versions"]
    return [
        titled(
            "Durable commits into one store", table(["", "commits/s", "min-max", "note"], commits)
        ),
        titled(
            f"A log of {count:,} versions",
            f"Log {result.facts['log_bytes'] / 1e6:.1f} MB, catalog snapshots "
            f"{result.facts['snapshot_bytes'] / 1e6:.1f} MB; the newest snapshot lies "
            f"{result.parameters['tail']} commits back. Each figure includes opening the store.",
            table(["", "median", "min-max", "note"], many),
            "`ckptstore ls` so far behind a snapshot: " + listing_time(result.facts["ls"]),
            *_after_a_snapshot(result.facts),
        ),
        *_later_life(result),
        titled(
            f"{result.parameters['tiny_tensors']:,} tensors of 64 bytes",
            _tiny(result.tables["tiny tensors"]),
        ),
    ]


def _after_a_snapshot(facts_of_ls: Mapping[str, Any]) -> list[str]:
    if "cold ls" not in facts_of_ls:
        return []  # a result from before these were measured
    return [
        "`ckptstore ls` right after a snapshot: "
        + listing_time(facts_of_ls["ls after a snapshot"]),
        _cold(facts_of_ls["cold ls"]),
    ]


def _later_life(result: Result) -> list[str]:
    if "fork" not in result.tables:
        return []  # a result from before these were measured
    chunks = result.parameters["chunks_of_the_fork"]
    return [
        titled(
            f"Fork of a version of {chunks * 4 * 2**20 / 1e12:.2f} TB",
            f"Its manifest names {chunks:,} chunks of 4 MiB; none of its packs exists, so a fork "
            "that read any would fail. Local disk, with fsync.",
            _forks(result.tables["fork"]),
        ),
        titled(
            "Collections of stores with a history",
            "In memory, so that the seconds are those of the collection itself. Each finds "
            "versions that were deleted since the last one, and deletes what they held. History "
            "costs no request: only opening the catalog, and some 3 us for each version in it.",
            _collections(result.tables["collections"]),
        ),
    ]


def _cold(requests: Mapping[str, Mapping[str, int]]) -> str:
    """Return the text on the requests of a first listing."""
    words = {"get": "GET", "list": "LIST", "stat": "HEAD"}
    said = {
        state: f"{sum(calls.values())} ("
        + ", ".join(f"{count} {words.get(name, name)}" for name, count in calls.items())
        + ")"
        for state, calls in requests.items()
    }
    return (
        f"Requests of an `ls` that knows nothing yet: {said['after a snapshot']} right after a "
        f"snapshot, {said['worst']} so far behind one."
    )


def _forks(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        numbers = one.numbers
        lines.append(
            [
                one.name,
                *seconds(one),
                f"{numbers['backend_s'] * 1000:.0f} ms",
                f"{numbers['requests']:.0f}",
                f"{numbers['read_bytes'] / 1e6:.1f} MB",
                f"{numbers['written_bytes'] / 1e6:.1f} MB",
            ]
        )
    columns = ["", "median", "min-max", "of it in the backend", "requests", "read", "written"]
    return table(columns, lines)


def _collections(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        numbers = one.numbers
        lines.append(
            [
                one.name,
                *seconds(one),
                f"{numbers['requests']:,.0f}",
                f"{numbers['listed']:,.0f}",
                f"{numbers['swept']:,.0f}",
                f"{numbers['open_s'] * 1000:.0f} ms",
            ]
        )
    columns = ["", "median", "min-max", "requests", "objects listed", "deleted", "opening it"]
    return table(columns, lines)


def _tiny(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        if not one.seconds:
            lines.append([one.name, "", "", "", one.error])
            continue
        extra = one.numbers.get("bytes_per_tensor")
        shown = "" if extra is None else f"{extra:.0f}"
        lines.append([one.name, *seconds(one), shown, ""])
    return table(["", "median", "min-max", "bytes beyond the data, per tensor", "note"], lines)


def _per_second(one: Measured) -> str:
    if not one.seconds:
        return ""
    count = one.numbers["commits"]
    return f"{count / max(one.seconds):.0f}-{count / min(one.seconds):.0f}"


def scale(result: Result) -> list[str]:
    """Return the tables of many writers and of versions of many ranks."""
    trainings = result.parameters["trainings"]
    return [
        titled(
            "Commits at the same moment",
            "Each process saves to a run of its own, and all try to commit at once: the worst that "
            "a log can meet.",
            _waits(
                result.tables["at once"], "writers", lambda numbers: f"{numbers['writers']:,.0f}"
            ),
        ),
        titled(
            f"{trainings} trainings that save into one store",
            "Each saves at random moments, so often on average.",
            _waits(
                result.tables["spread"],
                "interval_s",
                lambda numbers: f"{numbers['interval_s']:.0f} s",
            ),
        ),
        titled(
            "One version of many ranks",
            "10 GB a rank, 600 tensors that are cut over all ranks; one version, one commit. Each "
            "rank writes its packs of 64 MiB and tells one of them what it wrote; that one makes "
            "the manifest and commits: real code, without the packs. To share with the version "
            "before, each rank reads that one's manifest.",
            _versions(result.tables["one version"]),
        ),
    ]


def _waits(
    rows: Sequence[Measured], label: str, shown: Callable[[Mapping[str, float]], str]
) -> str:
    lines = []
    for one in rows:
        numbers = one.numbers
        rate = numbers["commits"] / numbers["all_s"]
        lines.append(
            [
                one.name,
                shown(numbers),
                f"{numbers['all_s']:.1f} s",
                f"{rate:.1f}",
                *(f"{numbers[name]:.2f} s" for name in ("median_s", "p99_s", "max_s")),
                *(f"{numbers.get(f'{name} a commit', 0):.1f}" for name in ("LIST", "GET", "PUT")),
                f"{numbers['gave_up']:.0f}",
            ]
        )
    waits = ["all done after", "commits/s", "median wait", "99 %", "longest"]
    columns = ["storage", label.replace("_s", ""), *waits, "LIST", "GET", "PUT", "gave up"]
    return table(columns, lines) + "\n\nLIST, GET and PUT: requests for each commit."


def _versions(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        numbers = one.numbers
        lines.append(
            [
                one.name,
                f"{one.logical_bytes / 1e12:.2f} TB",
                f"{numbers['pieces']:,.0f}",
                f"{numbers['requests']:,.0f}",
                f"{numbers['part_bytes'] / 1e6:.2f} MB",
                f"{numbers['manifest_bytes'] / 1e6:.1f} MB",
                f"{one.median:.2f} s",
                f"{numbers['peak_bytes'] / 1e6:.0f} MB",
                f"{numbers['share_s']:.2f} s",
                f"{numbers['share_bytes'] / 1e6:.0f} MB",
            ]
        )
    columns = ["", "state", "pieces", "requests", "a rank tells", "manifest"]
    columns += ["committed in", "memory for it", "to share, a rank: time", "memory"]
    return table(columns, lines)
