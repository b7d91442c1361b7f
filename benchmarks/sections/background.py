"""Sections of saves in the background, and of failures."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import (
    multiple,
    outcomes,
    ratio,
    seconds,
    share,
    table,
    timed,
    titled,
)

__all__ = ["async_saves", "failures", "from_gpu"]

_LOADED = {
    "x torch.load": "torch.load, new",
    "x safetensors": "safetensors, new (its tensors alone)",
}


def async_saves(result: Result) -> list[str]:
    """Return the tables of saves in the background."""
    lines = [
        [row["fault"], row["tool"], f"**{row['observed']}**" if row["silent"] else row["observed"]]
        for row in result.facts["rows"]
    ]
    return [
        titled("Duration of the call", _stalls(result.tables["stall"])),
        titled("Training while a save is written", _beside(result.tables["training"])),
        titled("Faults behind the call", outcomes(lines)),
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
                *seconds(one),
                multiple(one, by_name["copy, two threads"]),
                multiple(one, by_name["DCP async_save"]),
                "" if durable is None else f"{durable:.2f} s",
                one.note,
            ]
        )
    return table(["", "median", "min-max", "of a copy", "of DCP", "durable after", "note"], lines)


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


def failures(result: Result) -> list[str]:
    """Return the table of provoked failures."""
    lines = [
        [
            row["fault"],
            row["tool"],
            ("**" + row["observed"] + "**") if row["silent"] else row["observed"],
        ]
        for row in result.facts["rows"]
    ]
    return [outcomes(lines)]


def from_gpu(result: Result) -> list[str]:
    """Return the tables of saves from a GPU, and of loads to it."""
    tables = result.tables
    return [
        titled("Save", timed(tables["save"], {"x torch.save": "torch.save"}, {"stored": share})),
        titled("Duration of a call in the background", _device_stalls(tables["stall"])),
        titled("Load, files in the page cache", timed(tables["load"], _LOADED, {})),
    ]


def _device_stalls(rows: Sequence[Measured]) -> str:
    copy = rows[0]
    lines = [
        [
            one.name,
            *seconds(one),
            multiple(one, copy),
            *(
                f"{one.numbers[name]:.2f} s" if name in one.numbers else ""
                for name in ("staged_s", "durable_s")
            ),
        ]
        for one in rows
        if one.seconds
    ]
    return table(["", "median", "min-max", "of a copy", "staged after", "durable after"], lines)
