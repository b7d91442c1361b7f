"""Peak memory of a piece of work in a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import trim

__all__ = ["extra_bytes", "mark", "resident_bytes"]


def mark() -> int:
    """Free unused memory, begin a new high-water mark, and return the resident memory in bytes."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident memory
    return resident_bytes("VmRSS")


def extra_bytes(before: int) -> int:
    """Return the rise of the high-water mark above the result of :func:`mark`, in bytes."""
    return max(0, resident_bytes("VmHWM") - before)


def resident_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of a process's status, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    msg = f"no {field} in /proc/{process}/status"
    raise RuntimeError(msg)
