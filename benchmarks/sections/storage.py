"""Sections of saves and loads on a disk and on S3."""

from __future__ import annotations

from benchmarks.measure import Result
from benchmarks.sections.pieces import (
    listing_time,
    quickest_client,
    seconds,
    share,
    speed,
    table,
    timed,
    times,
    titled,
)

__all__ = ["encryption", "filesystems", "link", "local", "s3"]


def local(result: Result) -> list[str]:
    """Return the tables of saves and loads on a local disk."""
    blocks = []
    saves = result.tables["save"]
    blocks.append(
        titled("Save", timed(saves, {"vs torch.save": "torch.save"}, {"stored/raw": share}))
    )
    for name in ("load, warm cache", "load, cold cache"):
        bases = {"vs torch.load": "torch.load, new", "vs DCP": "DCP, into"}
        blocks.append(titled(f"Whole {name}", timed(result.tables[name], bases, {})))
    blocks.append(titled("One row of a large tensor, cold cache", _one_row(result)))
    blocks.append(titled("Peak extra memory of a save", _peaks(result)))
    blocks.append(titled("`ckptstore ls`", listing_time(result.facts["ls"])))
    return blocks


def _one_row(result: Result) -> str:
    lines = []
    for one in result.tables["one row"]:
        if one.seconds:
            read = f"{one.numbers['read_bytes'] / 1e6:.2f} MB"
            lines.append([one.name, *seconds(one), read, ""])
        else:
            lines.append([one.name, "", "", "", one.error])
    return table(["", "median", "min-max", "read from the disk", "note"], lines)


def _peaks(result: Result) -> str:
    lines = []
    for one in result.tables["peak memory of a save"]:
        extra = f"{one.numbers['extra_bytes'] / 2**20:.0f} MiB" if one.numbers else ""
        lines.append([one.name, extra, one.error])
    return table(["", "extra memory", "note"], lines)


def encryption(result: Result) -> list[str]:
    """Return the tables of saves and loads with and without encryption."""
    blocks = []
    for name, rows in result.tables.items():
        by_name = {one.name: one for one in rows}
        lines = []
        for one in rows:
            if one.error:
                lines.append([one.name, "", "", "", "", "", one.error])
                continue
            base = by_name[one.name.removesuffix(", encrypted")]
            more = "" if base is one else times(one, base)
            busy = f"{one.numbers['processor_s']:.2f} s"
            lines.append([one.name, *seconds(one), speed(one), more, busy, one.note])
        columns = ["", "median", "min-max", "GB/s", "vs without", "processor", "note"]
        blocks.append(titled(name[:1].upper() + name[1:], table(columns, lines)))
    return blocks


def s3(result: Result) -> list[str]:
    """Return the tables of saves to S3 and loads from it."""
    plain = {f"vs {name}": f"bytes by {name}" for name in ("s3fs", "boto3", "obstore")}
    puts, gets = (result.parameters.get(f"{kind}_at_once") for kind in ("puts", "gets"))
    said = [
        "Rows named bytes move the bytes of the state, ready in memory, and make no state of "
        f"them: {puts} objects of the size of our packs, or {gets} ranges of up to 16 MiB, at "
        "once, as ckptstore does. "
        "The columns compare with these."
    ]
    saves = timed(
        result.tables["save"], {**plain, "vs DCP": "DCP FsspecWriter"}, {"stored/raw": share}
    )
    loads = timed(result.tables["load"], {**plain, "vs DCP": "DCP FsspecWriter, into"}, {})
    about = said if puts else []
    return [titled("Save to S3", *about, saves), titled("Whole load from S3", loads)]


def link(result: Result) -> list[str]:
    """Return the tables of S3 behind a link of known speed."""
    rate = result.parameters["bits_per_s"]
    link_s = result.parameters["state_bytes"] * 8 / rate
    about = f"The bytes of the state alone take {link_s:.2f} s of the link."
    saves, loads = s3(result)
    blocks = [saves, loads]
    for name, title in (
        ("replicate", "Replicate, not read back"),
        ("replicate, read back", "Replicate and read back"),
    ):
        rows = result.tables[name]
        best = quickest_client(rows)
        said = f"The client that was quickest at the median is {best}." if best else ""
        against = timed(rows, {"vs quickest client": best}, {})
        blocks.append(titled(f"{title}, over a slow link", said, against))
    return [about, *(block.replace("S3\n", "S3 over a slow link\n", 1) for block in blocks)]


def filesystems(result: Result) -> list[str]:
    """Return the tables of saves and loads on each file system that was started."""
    blocks = []
    for name, rows in result.tables.items():
        system, _, what = name.partition(": ")
        size = f"A state of {rows[0].logical_bytes / 1e6:.0f} MB."
        against = {"vs torch.save" if what == "save" else "vs torch.load": "torch.save"}
        against["vs DCP"] = "DCP"
        extra = {"stored/raw": share} if what == "save" else {}
        title = f"{what[:1].upper()}{what[1:]} on {system}"
        blocks.append(titled(title, size, timed(rows, against, extra)))
    return blocks
