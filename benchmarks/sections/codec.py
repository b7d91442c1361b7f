"""Section of the codec."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Measured, Result
from benchmarks.sections.pieces import share, speed, table, titled

__all__ = ["codecs", "cores"]


def codecs(result: Result) -> list[str]:
    """Return a table for each kind of values, of chunk sizes, digests and made values."""
    blocks = []
    plain = {"chunk size", "digests"}
    for name, rows in result.tables.items():
        if name in plain:
            continue
        title = name[:1].upper() + name[1:]
        blocks.append(titled(title, _codec_table(rows, "codec"), _planes(result, name)))
    blocks.append(titled("Size of chunks", _codec_table(result.tables["chunk size"], "chunk")))
    digests = [[one.name, speed(one)] for one in result.tables["digests"]]
    blocks.append(titled("Digests, one thread", table(["", "GB/s"], digests)))
    shares = [
        [kind, f"{real:.3f}", f"{made:.3f}"]
        for kind, (real, made) in result.facts["fidelity"].items()
    ]
    blocks.append(
        titled(
            "Are the made values like trained ones?",
            "Stored share of raw bytes, ckptstore's codec:",
            table(["", "trained", "made"], shares),
        )
    )
    return blocks


def cores(result: Result) -> list[str]:
    """Return a table for each type of elements."""
    columns = ["one worker", "processor s/GB", "under the lock, ms/GB", "share", "threads"]
    return [
        titled(name, table(columns, [_locked(one) for one in rows]))
        for name, rows in result.tables.items()
    ]


def _locked(one: Measured) -> list[str]:
    """Return a row: what a gigabyte costs, and the threads that the lock leaves work to."""
    size, spent, locked = one.logical_bytes / 1e9, min(one.seconds), one.numbers["locked_s"]
    most = f"{spent / locked:.0f}" if locked else ""
    share = f"{locked / spent:.3f}"
    return [one.name, f"{spent / size:.2f}", f"{1e3 * locked / size:.0f}", share, most]


def _codec_table(rows: Sequence[Measured], label: str) -> str:
    lines = []
    for one in rows:
        decode = one.numbers.get("decode_s")
        back = f"{one.logical_bytes / decode / 1e9:.2f}" if decode else ""
        lines.append([one.name, share(one), speed(one), back])
    return table([label, "stored/raw", "encode GB/s", "decode GB/s"], lines)


def _planes(result: Result, kind: str) -> str:
    shares = ", ".join(f"{share:.3f}" for share in result.facts[f"planes of {kind}"])
    return f"Share of its raw bytes that each plane takes, most significant first: {shares}."
