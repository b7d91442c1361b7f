"""How much memory of a process a piece of work takes at its peak, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import trim

__all__ = ["extra_bytes", "mark", "resident_bytes"]


def mark() -> int:
    """Give back what is free, begin a new high-water mark, and return what is resident now."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
    return resident_bytes("VmRSS")


def extra_bytes(before: int) -> int:
    """Return how far the high-water mark rose above what :func:`mark` returned."""
    return max(0, resident_bytes("VmHWM") - before)


def resident_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of a process's status, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    msg = f"no {field} in /proc/{process}/status"
    raise RuntimeError(msg)
