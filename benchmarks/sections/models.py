"""Sections of named workloads, of the WEKA paper's models, and of memory."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import seconds, share, speed, table, timed, times, titled

__all__ = ["many", "memory", "weka", "workloads"]


def workloads(result: Result) -> list[str]:
    """Return a table against peers for each workload, and one of operations of stores only."""
    blocks = [
        titled(f"Workload `{name}`", _about(result, name), _against(result, name))
        for name in result.facts["workloads"]
    ]
    blocks.append(titled("The weights alone, into new memory", _weights(result)))
    blocks.append(titled("Operations of stores only", _store(result)))
    return blocks


def many(result: Result) -> list[str]:
    """Return the tables of each state: saves, loads, and lookups by name."""
    bases = {"x torch.save": "torch.save", "x safetensors": "safetensors"}
    blocks = []
    for title in result.facts["states"]:
        saves, loads, lookups = (
            result.tables[f"{title}: {what}"] for what in ("save", "load", "lookup")
        )
        each = [[one.name, f"{one.median / one.numbers['names'] * 1e6:.1f} µs"] for one in lookups]
        blocks += [
            titled(f"{title}: save", timed(saves, bases, {"stored": share})),
            titled(f"{title}: load", timed(loads, bases, {})),
            titled(f"{title}: lookup", table(["", "a name"], each)),
        ]
    return blocks


def weka(result: Result) -> list[str]:
    """Return the tables of the workloads, and those of the windows with a save every so often."""
    blocks = [
        titled(f"Model {name}", _about(result, name), _against(result, name))
        for name in result.facts["workloads"]
    ]
    blocks.append(titled("The models' weights alone, into new memory", _weights(result)))
    blocks.append(titled("The models in a store", _store(result)))
    blocks.append(titled("Saved every few seconds", _every(result)))
    return blocks


def _about(result: Result, name: str) -> str:
    facts = result.facts["workloads"][name]
    about = facts["about"][:1].upper() + facts["about"][1:]
    return (
        f"{about}: {facts['parameters'] / 1e6:.1f} M parameters, "
        f"{facts['state_bytes'] / 1e6:.0f} MB in {facts['tensors']:,} tensors."
    )


def _mib(one: Measured, name: str = "extra_bytes") -> str:
    return f"{one.numbers[name] / 2**20:.0f} MiB" if name in one.numbers else ""


def _against(result: Result, name: str) -> str:
    """Return saves and loads of one state by all tools, with ratios and memory."""
    saves = result.tables[f"{name}: save"]
    loads = {one.name: one for one in result.tables[f"{name}: load"]}
    base, load_base = saves[0], loads.get(saves[0].name)
    lines = []
    for save in saves:
        load = loads.get(save.name)
        if save.error or not save.seconds:
            lines.append([save.name, *[""] * 9, save.error])
            continue
        row = [save.name, *seconds(save), times(save, base), share(save), _mib(save)]
        if load is not None and load.seconds:
            row += [*seconds(load), times(load, load_base), _mib(load)]
        else:
            row += [""] * 4
        error = load.error if load is not None else ""
        lines.append([*row, "; ".join(filter(None, (save.note, error)))])
    columns = ["", "save", "min-max", "vs torch.save", "stored/raw", "its memory"]
    columns += ["load", "min-max", "vs torch.load", "its memory", "note"]
    return table(columns, lines)


def _weights(result: Result) -> str:
    lines = []
    for name in result.facts["workloads"]:
        rows = result.tables[f"{name}: weights"]
        lines += [
            [
                name if row is rows[0] else "",
                row.name,
                *seconds(row),
                times(row, rows[0]),
                _mib(row),
            ]
            for row in rows
            if row.seconds
        ]
    return table(["workload", "by", "median", "min-max", "vs torch.load", "memory"], lines)


def _store(result: Result) -> str:
    """Return, by workload, the saves after a step, an unchanged one, the stall, verify, collect."""
    lines = []
    for name in result.facts["workloads"]:
        rows = {one.name: one for one in result.tables[f"store: {name}"]}
        after, delta = rows["next save"], rows["next save, delta"]
        same, stall = rows["nothing changed"], rows["stall"]
        lines.append(
            [
                name,
                seconds(after)[0],
                share(after),
                seconds(delta)[0],
                share(delta),
                seconds(same)[0],
                f"{same.numbers['stored_bytes'] / 1e3:.0f} kB",
                seconds(stall)[0],
                f"{stall.median + stall.numbers['behind_s']:.2f} s",
                f"{seconds(rows['verify'])[0]} ({speed(rows['verify'])} GB/s)",
                seconds(rows["collect"])[0],
            ]
        )
    columns = ["workload", "next save", "stored/raw", "as delta", "stored/raw of it"]
    columns += ["nothing changed", "bytes of it", "stall of save_async", "durable after"]
    columns += ["verify", "collect"]
    return table(columns, lines)


def _every(result: Result) -> str:
    """Return the table of the remaining steps of a training that saves every few seconds."""
    lines = []
    for name, every_s in result.facts["every_s"].items():
        rows = result.tables[f"every: {name}"]
        alone = rows[0].median
        for row in rows:
            numbers = row.numbers
            stall = f"{numbers['stall_s'] * 1e3:.0f} ms" if "stall_s" in numbers else ""
            most = f"{numbers['stall_max_s'] * 1e3:.0f} ms" if "stall_max_s" in numbers else ""
            lines.append(
                [
                    f"{name}, every {every_s:g} s" if row is rows[0] else "",
                    row.name,
                    f"{numbers['steps']:.0f}",
                    f"{1 / row.median:.2f}",
                    f"{alone / row.median:.2f}",
                    f"{numbers.get('saves', 0):.0f}",
                    stall,
                    most,
                ]
            )
    columns = ["model", "saved by", "steps", "steps/s", "of undisturbed", "saves"]
    columns += ["stall", "longest stall"]
    return table(columns, lines)


def memory(result: Result) -> list[str]:
    """Return the peak extra memory by way and size."""
    ways = list(dict.fromkeys(one.name for one in result.tables["peak"]))
    sizes = sorted({one.logical_bytes for one in result.tables["peak"] if not one.error})
    lines = []
    for way in ways:
        rows = [one for one in result.tables["peak"] if one.name == way]
        lines.append(
            [way, *_peaks(rows, sizes), next((one.error for one in rows if one.error), "")]
        )
    columns = ["", *(f"{size / 2**30:.2g} GiB" for size in sizes), "note"]
    return [table(columns, lines)]


def _peaks(rows: Sequence[Measured], sizes: Sequence[int]) -> list[str]:
    found = {one.logical_bytes: one.numbers for one in rows if one.numbers}
    shown = []
    for size in sizes:
        if size not in found:
            shown.append("")
            continue
        numbers = found[size]
        child = numbers["child_bytes"]
        text = f"{numbers['extra_bytes'] / 2**20:,.0f} MiB"
        shown.append(f"{text} + {child / 2**20:,.0f} in the child" if child else text)
    return shown
