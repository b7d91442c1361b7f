"""Sections of saves and loads on a disk and on S3."""

from __future__ import annotations

from benchmarks.measure import Result
from benchmarks.sections.pieces import listing_time, seconds, share, table, timed, titled

__all__ = ["filesystems", "local", "s3"]


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


def s3(result: Result) -> list[str]:
    """Return the tables of saves to S3 and loads from it."""
    plain = {f"vs {name}": f"bytes by {name}" for name in ("s3fs", "boto3", "obstore")}
    puts, gets = (result.parameters.get(f"{kind}_at_once") for kind in ("puts", "gets"))
    said = [
        "Rows named bytes move the bytes of the state, ready in memory, and make no state of "
        f"them: {puts} objects of 64 MiB, or {gets} ranges of 16 MiB, at once, as ckptstore does. "
        "The columns compare with these."
    ]
    saves = timed(
        result.tables["save"], {**plain, "vs DCP": "DCP FsspecWriter"}, {"stored/raw": share}
    )
    loads = timed(result.tables["load"], {**plain, "vs DCP": "DCP FsspecWriter, into"}, {})
    about = said if puts else []
    return [titled("Save to S3", *about, saves), titled("Whole load from S3", loads)]


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
