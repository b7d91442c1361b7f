"""Programs of the benchmarks that are written in C: compiled when first used, into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.measure import say

__all__ = ["MISSING", "compiled"]

MISSING: Final = "no C compiler (cc, gcc or clang, or $CC)"
_HERE: Final = Path(__file__).resolve().parent


def compiled(source: str, *flags: str) -> Path | None:
    """Return the program of a source file in this folder; None if nothing here compiles C.

    It lies in ``ckptstore-benchmarks`` of the user's cache folder (``XDG_CACHE_HOME``), named by
    the digest of source and flags.

    Raises
    ------
    RuntimeError
        The compiler refuses the source; with the first lines that it printed.
    """
    text = (_HERE / source).read_bytes()
    name = hashlib.sha256(text + " ".join(flags).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = folder / "ckptstore-benchmarks" / f"{Path(source).stem}-{name}"
    if program.exists():
        return program
    named = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((found for one in named if one and (found := shutil.which(one))), None)
    if compiler is None:
        say(f"{MISSING}: {source} is not compiled")
        return None
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as made:
        output = Path(made) / program.name
        command = [compiler, "-O2", "-pthread", *flags, "-o", str(output), str(_HERE / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            msg = f"{compiler} does not compile {source}: {done.stderr[:500]}"
            raise RuntimeError(msg)
        output.replace(program)
    return program
