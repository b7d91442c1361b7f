"""Loads of one state from S3 by eight processes of a host: what the server sends, and how long.

The server is the one in Python (``tests/kits/paced_s3.py``). Ranks are processes that
torch.distributed connects by gloo. All begin together, each with an open store; the time is that of
the slowest. Every rank compares what it loaded.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from paced_s3 import Pace
from rankkit.groups import Rank, run_ranks

import ckptstore
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say
from benchmarks.paced import Paced, paced_server
from benchmarks.states import StateSpec, flat_tensors, make_state, state_bytes
from ckptstore.hashing import blake3_digest

__all__ = ["run"]

_RANKS: Final = 8
_WAYS: Final = {
    "one rank alone": (1, "alone"),
    "each rank by itself": (_RANKS, "alone"),
    "group=WORLD": (_RANKS, "group"),
    "cache_folder": (_RANKS, "cache"),
    "from a local disk, each rank": (_RANKS, "disk"),
}
"""By name: the number of ranks, and how they share."""
_PACES: Final = {
    "no limit": Pace(),
    "10 MB/s and 20 ms each": Pace(bytes_per_s=10e6, latency_s=0.02),
}


def run(
    space: Workspace,
    *,
    bytes_min: int,
    rounds: int,
    training_steps: int = 120,
    ranks: int = _RANKS,
    paces: Sequence[str] = tuple(_PACES),
) -> Result:
    """Run everything; return one table for each pace of the connections.

    Parameters
    ----------
    paces
        Names out of the paces.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    head = header(space.root)
    state = make_state(StateSpec(bytes_min=bytes_min, training_steps=training_steps))
    total, digests = state_bytes(state), _digests(state)
    result = Result(
        benchmark="sharing",
        header=head,
        parameters={"state_bytes": total, "rounds": rounds, "ranks": ranks, "codec": "raw"},
    )
    memory = Path("/dev/shm")  # noqa: S108 - the cache makes a folder of its own there
    cache = memory / f"ckptstore-benchmark-{os.getpid()}"
    local = space.fresh() / "st"
    with paced_server(Pace(ready_bytes=2 * total + (64 << 20))) as server:
        for place, options in (("s3://bucket/st", _options(server)), (str(local), {})):
            with ckptstore.open(place, create=True, codec="raw", **options) as store:
                store.run("r").save(state, step=1)
                stored = sum(role.stored for role in store.resolve("r@1").roles.values())
                store.run("tiny").save({"w": torch.arange(1 << 16)}, step=1)
        del state
        for pace in paces:
            server.pace(_PACES[pace])
            rows = {name: Measured(name=name, logical_bytes=total) for name in _WAYS}
            for number in range(rounds):
                for name, (count, way) in _WAYS.items():
                    shutil.rmtree(cache, ignore_errors=True)
                    args = (server.port, way, str(local if way == "disk" else cache), digests)
                    found = run_ranks(_job, min(count, ranks), *args, timeout_s=900)
                    rows[name].seconds.append(max(one[0] for one in found))
                    rows[name].numbers = _numbers(found, stored)
                say(f"sharing, {pace}: round {number + 1} of {rounds}")
            result.tables[pace] = list(rows.values())
    shutil.rmtree(cache, ignore_errors=True)
    return result


def _options(server: Paced) -> dict[str, Any]:
    return {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "a", "secret": "b"}


def _digests(state: object) -> dict[str, bytes]:
    """Return the digest of each tensor of a state."""
    return {
        path: blake3_digest(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for path, one in flat_tensors(state)
    }


def _numbers(found: Sequence[tuple[float, float, dict[str, Any]]], stored: int) -> dict[str, float]:
    counts = found[0][2]
    return {
        "sent_bytes": counts["sent"],
        "sent_states": counts["sent"] / stored,
        "requests": sum(counts["requests"].values()),
        "at_once": counts["at_once"],
        "fastest_s": min(one[0] for one in found),
        "median_s": statistics.median(one[0] for one in found),
        "processor_s": max(one[1] for one in found),
    }


# --- in the ranks -------------------------------------------------------------------------------


def _job(
    me: Rank, port: int, way: str, folder: str, digests: dict[str, bytes]
) -> tuple[float, float, dict[str, Any]]:
    """Load the state; return seconds, processor seconds, and on the first rank server counts."""
    server = Paced(port)
    place, options = "s3://bucket/st", _options(server)
    if way == "disk":
        place, options = folder, {}
    if way == "cache":
        options["cache_folder"] = folder
    group = dist.group.WORLD if way == "group" else None
    with ckptstore.open(place, read_only=True, **options) as store:
        store.load("tiny@1", group=group)  # imports, connections, pools
        dist.barrier()
        if me.rank == 0:
            server.begin()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        state = store.load("r@1", group=group)
        seconds, processor_s = time.perf_counter() - began, time.process_time() - used
        dist.barrier()
        counts = server.counts() if me.rank == 0 else {}
    if _digests(state) != digests:
        msg = "what was loaded is not what was saved"
        raise AssertionError(msg)
    return seconds, processor_s, counts
