"""Machine and versions of a measurement."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ckptstore.backends.posix_settings import find_fs_type

__all__ = ["header"]

_PACKAGES = (
    "ckptstore",
    "torch",
    "numpy",
    "safetensors",
    "torchsnapshot",
    "zstandard",
    "blake3",
    "fsspec",
    "s3fs",
    "boto3",
    "torch_checkpointing",
    "zipnn",
    "s3torchconnector",
    "obstore",
    "awscrt",
    "moonclip",
)
_PROGRAMS = {"restic": ("restic", "version"), "borg": ("borg", "--version")}
_REPO = Path(__file__).resolve().parent.parent


def header(folder: Path) -> dict[str, Any]:
    """Return the facts that a reader needs to judge or repeat a measurement.

    Parameters
    ----------
    folder
        Folder of the benchmark; its file system and disk are named.
    """
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": _file_system(folder),
        "disk": _disk(folder),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES}
        | {name: _program(command) for name, command in _PROGRAMS.items()},
        "load_average_before": list(os.getloadavg()),
    }


def _commit() -> str:
    """Return the commit of the tree, with a mark if the sources differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "ckptstore", "backends")
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_REPO, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _program(command: tuple[str, ...]) -> str:
    """Return a program's version: the second word that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    words = done.stdout.split()
    return words[1] if len(words) > 1 else "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    return find_fs_type(str(folder))


def _disk(folder: Path) -> str:
    """Return the block device below a folder: kind, model if known, and its I/O scheduler."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return "none"
    device = device.resolve()
    queue = device / "queue" if (device / "queue").exists() else device.parent / "queue"
    facts = [device.name]
    for name, label in (("rotational", "rotational"), ("scheduler", "scheduler")):
        file = queue / name
        if file.exists():
            facts.append(f"{label} {file.read_text().strip()}")
    size = device / "size"
    if size.exists():
        facts.append(f"{int(size.read_text()) * 512 / 2**30:.0f} GiB")
    return ", ".join(facts)
