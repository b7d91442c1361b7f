"""Cost of a collection of a store of many terabytes for the process that coordinates it.

Log and manifests are real, on the local disk; the packs exist only in the listing, so that
neither their bytes nor a listing by the storage is in the figures: a dry run then takes the time of
one thread for its listing, and the memory for all its tables. Each in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.disk import Workspace
from benchmarks.lifecycle import commit_manifests, terabyte
from benchmarks.measure import Measured, say
from benchmarks.resident import extra_bytes, mark
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.format import manifest as manifests
from ckptstore.format.keys import PACKS_PREFIX, pack_key
from ckptstore.format.pack import CHUNK_HEADER_BYTES, INDEX_ROW_BYTES
from ckptstore.repo import open_on
from ckptstore.store import Store, open_store

__all__ = ["coordination"]

_REPO = Path(__file__).resolve().parent.parent
_PER_PACK = 16
"""Chunks of 4 MiB in a pack of 64 MiB."""
_NAMES = "packs.txt"
_TIMEOUT_S = 600


def coordination(space: Workspace, *, versions: tuple[int, ...], chunks: int) -> list[Measured]:
    """Return a row for each number of live versions, of `chunks` chunks of 4 MiB each."""
    rows = []
    for count in versions:
        folder = space.fresh()
        row = Measured(name=f"{count * chunks:,} chunks in {count} versions")
        row.logical_bytes = (count * chunks) << 22
        command = [sys.executable, "-m", "benchmarks.coordinator", str(folder)]
        done = subprocess.run(
            [*command, str(count), str(chunks)],
            cwd=_REPO,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            row.error = said[-1] if said else f"status {done.returncode}"
        else:
            row.numbers = json.loads(done.stdout.splitlines()[-1])
            row.seconds.append(row.numbers.pop("seconds"))
        space.discard(folder)
        rows.append(row)
        say(f"coordinator: {row.name}")
    return rows


class _MadeUp(WrapperBackend):
    """Lists packs that do not exist, in order, from a file of their ids."""

    def __init__(self, inner: Backend, names: Path) -> None:
        super().__init__(inner)
        self._names = names

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield an object for each id; other objects than packs come from the backend."""
        if not prefix.startswith(PACKS_PREFIX):
            yield from self.inner.list(prefix, after=after)
            return
        size = _PER_PACK * ((3 << 20) + CHUNK_HEADER_BYTES + INDEX_ROW_BYTES)
        with self._names.open() as lines:
            for line in lines:
                key = pack_key(line.rstrip())
                if key.startswith(prefix) and key > after:
                    yield ObjectInfo(key=key, size_bytes=size, modified_at=1.0)


def _fill(folder: Path, versions: int, chunks: int) -> int:
    """Make the store; return the number of packs that it names."""
    names: list[str] = []
    with open_store(folder / "store", create=True) as store:
        for number in range(versions):
            version = f"{number + 1:032x}"
            made = terabyte(version, chunks, per_pack=_PER_PACK, seed=number)
            names += made.pieces.packs
            commit_manifests(store, "big", {version: manifests.encode(made)})
    (folder / _NAMES).write_text("".join(f"{name}\n" for name in sorted(names)))
    return len(names)


def _child(folder: Path, versions: int, chunks: int) -> None:
    packs = _fill(folder, versions, chunks)
    backend = _MadeUp(open_backend(str(folder / "store")), folder / _NAMES)
    with Store(open_on(backend)) as store:
        store.repo.refresh()
        before = mark()
        began = time.perf_counter()
        report = store.gc(dry_run=True)
        seconds = time.perf_counter() - began
        extra = extra_bytes(before)
    if report.live["packs"].count != packs:
        msg = f"{report.live} is not {packs} packs"
        raise AssertionError(msg)
    print(json.dumps({"seconds": seconds, "extra_bytes": extra, "packs": packs}))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
