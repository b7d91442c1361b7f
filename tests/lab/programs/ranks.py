"""Runs ranks of torch.distributed as it is told (see labkit/peers.py for the protocol).

rank   {"rank", "world", "meeting", "job", "words"}
       runs ``rankkit.jobs.JOB(rank, *words)`` in a child; prints an event ``told`` for whatever it
       tells, and ends with what it returns. `meeting` is an address, ``tcp://HOST:PORT``.
kill   {"pid"}
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))
# Gloo takes the device of the host's name, which inside of a guest is no other guest's.
DEVICES = [name for _, name in socket.if_nameindex() if name.startswith("vec")]
os.environ.setdefault("GLOO_SOCKET_IFNAME", DEVICES[0] if DEVICES else "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402 - after the settings
import torch.distributed as dist  # noqa: E402
from rankkit import jobs  # noqa: E402
from rankkit.groups import Rank  # noqa: E402

EVENT_BYTES_MAX = 3500  # one write of less than a page stays whole when several children print


def say(number: int, event: str, **words: object) -> None:
    """Print one event."""
    line = json.dumps({"id": number, "event": event, **words})
    os.write(1, line.encode() + b"\n")


def be_rank(number: int, words: dict[str, Any]) -> None:
    """Run a job as one rank, and report how it ended."""
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo", init_method=words["meeting"], rank=words["rank"], world_size=words["world"],
            timeout=dt.timedelta(seconds=120),
        )  # fmt: skip
        me = Rank(
            rank=words["rank"],
            world=words["world"],
            tell=lambda value: say(number, "told", value=value),
        )
        result = getattr(jobs, words["job"])(me, *words["words"])
        dist.barrier()
        say(number, "done", result=result)
    except Exception as error:  # noqa: BLE001 - the one who asked decides
        message = f"{error!r}"[:EVENT_BYTES_MAX]
        say(number, "failed", kind=type(error).__name__, message=message)


def kill(child: int) -> None:
    """End a child, unless it ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def main() -> None:
    """Fork a child for each rank until the input ends; then end the children."""
    children: set[int] = set()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no one to wait for them
    for line in sys.stdin:
        words = json.loads(line)
        number = words.pop("id")
        if words["do"] == "kill":
            kill(words["pid"])
            say(number, "done", result=None)
            continue
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            be_rank(number, words)
            os._exit(0)
        children.add(child)
        say(number, "started", pid=child)
    for child in children:
        kill(child)
    os._exit(0)  # taking torch down takes seconds inside a guest


main()
