"""docs/benchmarks.md: tables and plots made from the JSON results, between markers.

What stands outside of the markers is written by hand and stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, Result
from benchmarks.plots import draw_plots
from benchmarks.results import read_result

__all__ = ["ratio", "sections", "write_page"]

_Row = Sequence[str]


def write_page(page: Path, results: Path) -> None:
    """Rewrite what lies between the markers of the page; draw the plots beside it.

    Raises
    ------
    ValueError
        A section has no markers in the page.
    """
    text = page.read_text()
    images = page.parent / "images"
    for name, make in sections().items():
        result = read_result(results, name)
        if result is None:
            continue
        plots = draw_plots(result, images)
        links = [f"![{label}](images/{path.name})" for label, path in plots.items()]
        text = _replaced(text, name, "\n\n".join([facts(result), *make(result), *links]))
    page.write_text(text)


def sections() -> dict[str, Callable[[Result], list[str]]]:
    """Return, by suite, what makes the blocks of its section."""
    return {
        "local": _local,
        "s3": _s3,
        "codecs": _codecs,
        "failures": _failures,
        "catalog": _catalog,
        "scale": _scale,
        "async": _async,
    }


def _replaced(text: str, name: str, body: str) -> str:
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if begin not in text or end not in text:
        msg = f"the page has no markers {begin} and {end}"
        raise ValueError(msg)
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n\n{body}\n\n{end}{rest.split(end, 1)[1]}"


# --- pieces -----------------------------------------------------------------------------------


def facts(result: Result) -> str:
    """Return the paragraph that says what was measured, where, when and with what."""
    head = result.header
    packages = ", ".join(f"{name} {version}" for name, version in head["packages"].items())
    before, after = head["load_average_before"][0], head["load_average_after"][0]
    parameters = ", ".join(f"{_words(name)} {value}" for name, value in result.parameters.items())
    return (
        f"*{head['date']}, commit {head['commit']}; {head['cores']} cores of {head['cpu']}, "
        f"{head['memory_gib']} GiB, Linux {head['kernel']}; {head['file_system']} on "
        f"{head['disk']}; Python {head['python']}, {packages}; load average {before:.1f} before "
        f"and {after:.1f} after. Parameters: {parameters}. The whole suite took "
        f"{head['seconds_in_all']:.0f} s.*"
    )


def ratio(one: Measured, base: Measured | None) -> float | None:
    """Return how many times as fast `one` is as `base`: the median over the rounds."""
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


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(one: Measured) -> tuple[str, str]:
    """Return median, and least to greatest, in a unit that suits."""
    scale, unit = (1000.0, "ms") if one.median < 0.1 else (1.0, "s")
    low, high = min(one.seconds) * scale, max(one.seconds) * scale
    digits = 1 if unit == "ms" else 2
    return f"{one.median * scale:.{digits}f} {unit}", f"{low:.{digits}f}-{high:.{digits}f}"


def _times(one: Measured, base: Measured | None) -> str:
    found = ratio(one, base)
    return "" if found is None else f"{found:.2f}x"


def _speed(one: Measured) -> str:
    return f"{one.logical_bytes / one.median / 1e9:.2f}"


def _timed(
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
        ratios = [_times(one, by_name.get(base)) for base in bases.values()]
        more = [make(one) for make in extra.values()]
        lines.append([one.name, *_seconds(one), _speed(one), *ratios, *more, one.note])
    return table(columns, lines)


def _share(one: Measured) -> str:
    return f"{one.numbers['stored_bytes'] / one.logical_bytes:.3f}"


def _titled(title: str, *blocks: str) -> str:
    return "\n\n".join([f"### {title}", *blocks])


# --- sections ---------------------------------------------------------------------------------


def _local(result: Result) -> list[str]:
    blocks = []
    saves = result.tables["save"]
    blocks.append(
        _titled("Save", _timed(saves, {"vs torch.save": "torch.save"}, {"stored/raw": _share}))
    )
    for name in ("load, warm cache", "load, cold cache"):
        bases = {"vs torch.load": "torch.load, new", "vs DCP": "DCP, into"}
        blocks.append(_titled(f"Whole {name}", _timed(result.tables[name], bases, {})))
    blocks.append(_titled("One row of a large tensor, cold cache", _one_row(result)))
    blocks.append(_titled("Peak extra memory of a save", _peaks(result)))
    blocks.append(_titled("`ckptstore ls`", _ls(result.facts["ls"])))
    return blocks


def _one_row(result: Result) -> str:
    lines = []
    for one in result.tables["one row"]:
        if one.seconds:
            read = f"{one.numbers['read_bytes'] / 1e6:.2f} MB"
            lines.append([one.name, *_seconds(one), read, ""])
        else:
            lines.append([one.name, "", "", "", one.error])
    return table(["", "median", "min-max", "read from the disk", "note"], lines)


def _peaks(result: Result) -> str:
    lines = []
    for one in result.tables["peak memory of a save"]:
        extra = f"{one.numbers['extra_bytes'] / 2**20:.0f} MiB" if one.numbers else ""
        lines.append([one.name, extra, one.error])
    return table(["", "extra memory", "note"], lines)


def _ls(facts_of_ls: Mapping[str, Any]) -> str:
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


def _s3(result: Result) -> list[str]:
    saves = _timed(
        result.tables["save"],
        {"vs s3fs": "s3fs, torch.save", "vs boto3": "boto3 fileobj, torch.save"},
        {"stored/raw": _share},
    )
    loads = _timed(
        result.tables["load"],
        {"vs s3fs": "s3fs, torch.save, new", "vs boto3": "boto3 fileobj, torch.save, new"},
        {},
    )
    return [_titled("Save to S3", saves), _titled("Whole load from S3", loads)]


def _codecs(result: Result) -> list[str]:
    blocks = []
    plain = {"chunk size", "digests"}
    for name, rows in result.tables.items():
        if name in plain:
            continue
        title = name[:1].upper() + name[1:]
        blocks.append(_titled(title, _codec_table(rows, "codec"), _planes(result, name)))
    blocks.append(_titled("Size of chunks", _codec_table(result.tables["chunk size"], "chunk")))
    digests = [[one.name, _speed(one)] for one in result.tables["digests"]]
    blocks.append(_titled("Digests, one thread", table(["", "GB/s"], digests)))
    shares = [
        [kind, f"{real:.3f}", f"{made:.3f}"]
        for kind, (real, made) in result.facts["fidelity"].items()
    ]
    blocks.append(
        _titled(
            "Are the made values like trained ones?",
            "Stored share of raw bytes, ckptstore's codec:",
            table(["", "trained", "made"], shares),
        )
    )
    return blocks


def _codec_table(rows: Sequence[Measured], label: str) -> str:
    lines = []
    for one in rows:
        decode = one.numbers.get("decode_s")
        back = f"{one.logical_bytes / decode / 1e9:.2f}" if decode else ""
        lines.append([one.name, _share(one), _speed(one), back])
    return table([label, "stored/raw", "encode GB/s", "decode GB/s"], lines)


def _planes(result: Result, kind: str) -> str:
    shares = ", ".join(f"{share:.3f}" for share in result.facts[f"planes of {kind}"])
    return f"Share of its raw bytes that each plane takes, most significant first: {shares}."


def _failures(result: Result) -> list[str]:
    lines = [
        [
            row["fault"],
            row["tool"],
            ("**" + row["observed"] + "**") if row["silent"] else row["observed"],
        ]
        for row in result.facts["rows"]
    ]
    return [_outcomes(lines)]


def _outcomes(lines: Sequence[_Row]) -> str:
    head = ["| fault | tool | observed |", "|---|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def _catalog(result: Result) -> list[str]:
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
        [one.name, *(_seconds(one) if one.seconds else ("", "")), one.error]
        for one in result.tables["many versions"]
    ]
    count = result.parameters["versions"]
    return [
        _titled(
            "Durable commits into one store",
            table(["", "commits/s", "min-max", "note"], commits),
        ),
        _titled(
            f"A log of {count:,} versions",
            f"Log {result.facts['log_bytes'] / 1e6:.1f} MB, catalog snapshots "
            f"{result.facts['snapshot_bytes'] / 1e6:.1f} MB; the newest snapshot lies "
            f"{result.parameters['tail']} commits back. Each figure includes opening the store.",
            table(["", "median", "min-max", "note"], many),
            "`ckptstore ls` so far behind a snapshot: " + _ls(result.facts["ls"]),
            *_after_a_snapshot(result.facts),
        ),
        *_later_life(result),
        _titled(
            f"{result.parameters['tiny_tensors']:,} tensors of 64 bytes",
            _tiny(result.tables["tiny tensors"]),
        ),
    ]


def _after_a_snapshot(facts_of_ls: Mapping[str, Any]) -> list[str]:
    if "cold ls" not in facts_of_ls:
        return []  # a result of before these were measured
    return [
        "`ckptstore ls` right after a snapshot: " + _ls(facts_of_ls["ls after a snapshot"]),
        _cold(facts_of_ls["cold ls"]),
    ]


def _later_life(result: Result) -> list[str]:
    if "fork" not in result.tables:
        return []  # a result of before these were measured
    chunks = result.parameters["chunks_of_the_fork"]
    return [
        _titled(
            f"Fork of a version of {chunks * 4 * 2**20 / 1e12:.2f} TB",
            f"Its manifest names {chunks:,} chunks of 4 MiB; none of its packs exists, so a fork "
            "that read any would fail. Local disk, with fsync.",
            _forks(result.tables["fork"]),
        ),
        _titled(
            "Collections of stores with a history",
            "In memory, so that the seconds are those of the collection itself. Each finds "
            "versions that were deleted since the last one, and deletes what they held. History "
            "costs no request: only opening the catalog, and some 3 us for each version in it.",
            _collections(result.tables["collections"]),
        ),
    ]


def _cold(requests: Mapping[str, Mapping[str, int]]) -> str:
    """Return what a first listing asks of the storage."""
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
                *_seconds(one),
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
                *_seconds(one),
                f"{numbers['requests']:,.0f}",
                f"{numbers['listed']:,.0f}",
                f"{numbers['swept']:,.0f}",
                f"{numbers['open_s'] * 1000:.0f} ms",
            ]
        )
    columns = ["", "median", "min-max", "requests", "objects listed", "deleted", "opening it"]
    return table(columns, lines)


def _scale(result: Result) -> list[str]:
    trainings = result.parameters["trainings"]
    return [
        _titled(
            "Commits at the same moment",
            "Each process saves to a run of its own, and all try to commit at once: the worst that "
            "a log can meet.",
            _waits(
                result.tables["at once"], "writers", lambda numbers: f"{numbers['writers']:,.0f}"
            ),
        ),
        _titled(
            f"{trainings} trainings that save into one store",
            "Each saves at random moments, so often on average.",
            _waits(
                result.tables["spread"],
                "interval_s",
                lambda numbers: f"{numbers['interval_s']:.0f} s",
            ),
        ),
        _titled(
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


def _per_second(one: Measured) -> str:
    if not one.seconds:
        return ""
    count = one.numbers["commits"]
    return f"{count / max(one.seconds):.0f}-{count / min(one.seconds):.0f}"


def _tiny(rows: Sequence[Measured]) -> str:
    lines = []
    for one in rows:
        if not one.seconds:
            lines.append([one.name, "", "", "", one.error])
            continue
        extra = one.numbers.get("bytes_per_tensor")
        shown = "" if extra is None else f"{extra:.0f}"
        lines.append([one.name, *_seconds(one), shown, ""])
    return table(["", "median", "min-max", "bytes beyond the data, per tensor", "note"], lines)


def _async(result: Result) -> list[str]:
    lines = [
        [row["fault"], row["tool"], f"**{row['observed']}**" if row["silent"] else row["observed"]]
        for row in result.facts["rows"]
    ]
    return [
        _titled("How long the call takes", _stalls(result.tables["stall"])),
        _titled("Training while a save is written", _beside(result.tables["training"])),
        _titled("What goes wrong behind it", _outcomes(lines)),
    ]


def _stalls(rows: Sequence[Measured]) -> str:
    """Return the stalls as multiples of a copy's, and of DCP's: less is better."""
    by_name = {one.name: one for one in rows}
    lines = []
    for one in rows:
        if not one.seconds:
            lines.append([one.name, "", "", "", "", "", one.error])
            continue
        durable = one.numbers.get("durable_s")
        lines.append(
            [
                one.name,
                *_seconds(one),
                _multiple(one, by_name["copy, two threads"]),
                _multiple(one, by_name["DCP async_save"]),
                "" if durable is None else f"{durable:.2f} s",
                one.note,
            ]
        )
    return table(["", "median", "min-max", "of a copy", "of DCP", "durable after", "note"], lines)


def _multiple(one: Measured, base: Measured) -> str:
    found = ratio(one, base)
    return "" if found is None else f"{1 / found:.2f}"


def _beside(rows: Sequence[Measured]) -> str:
    alone = rows[0]
    lines = []
    for one in rows:
        numbers = one.numbers
        steps = f"{1 / one.median:.2f}"
        if not numbers:
            lines.append([one.name, steps, "1.00", "", "", ""])
            continue
        share = ratio(one, alone) or 0.0
        lost = numbers["stall_s"] + numbers["behind_s"] * (1 - share)
        lines.append(
            [
                one.name,
                steps,
                f"{share:.2f}",
                f"{numbers['stall_s']:.2f} s",
                f"{numbers['behind_s']:.2f} s",
                f"{lost:.2f} s",
            ]
        )
    columns = ["", "steps/s", "of undisturbed", "stall", "in the background", "training lost"]
    return table(columns, lines)
