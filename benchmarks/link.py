"""S3 behind a link of known speed: the bytes sent by a client count, not the work of its server.

The suites ``s3`` and ``replicate`` have client and gateway on the same processors. Here the gateway
is reached over a link of one gigabit a second each way, as a trainer's share of a network is: the
loopback interface of a network namespace of its own, where the kernel's token bucket (``tc``, HTB)
limits the traffic to and from the gateway's port, and nothing else. Needs root, and
Ceph. No latency is added: the kernel at hand has no netem.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.endpoint import Bucket, endpoint
from benchmarks.host import header
from benchmarks.measure import Case, Measured, Result, run_cases, say
from benchmarks.replicate import client_case, make_source, packs_of, store_case
from benchmarks.results import read_result, write_result
from benchmarks.s3 import load_cases, save_cases
from benchmarks.s3_ways import GETS, PUTS, Plain, Way, make_ways, plain_ways
from benchmarks.states import StateSpec, make_state, state_bytes

__all__ = ["limited", "measure", "run"]

_REPO: Final = Path(__file__).resolve().parent.parent
_NAME: Final = "benchmarks.link"
_BITS_PER_S: Final = 10**9
# The S3 ways to measure; the others differ in processor time, which the suite s3 shows.
_WAYS: Final = (
    "bytes by s3fs",
    "bytes by boto3",
    "bytes by obstore",
    "bytes by obstore, unsigned",
    "s3fs, torch.save",
    "DCP FsspecWriter",
    "ckptstore auto",
    "ckptstore raw",
)


def run(
    space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120
) -> Result | None:
    """Run everything in a network namespace; return the tables ``save``, ``load``, ``replicate``.

    None without root, the tools, or Ceph.
    """
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() or missing:
        say(f"link: needs root and {', '.join(missing) or 'nothing else'}: left out")
        return None
    folder = space.fresh()
    plan = {"bytes_min": bytes_min, "rounds": rounds, "training_steps": training_steps}
    command = [
        "unshare",
        "--net",
        "--fork",
        "--kill-child",
        sys.executable,
        "-m",
        "benchmarks.link",
    ]
    there = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [*command, str(folder), json.dumps(plan)], cwd=_REPO, env=there, check=False
    )
    if done.returncode:
        say(f"link: ended with status {done.returncode}")
    return read_result(folder, "link")


def limited(port: int, *, bits_per_s: int) -> None:
    """Limit the traffic to and from a port of this namespace's loopback interface.

    Parameters
    ----------
    bits_per_s
        Bandwidth of each direction.

    Raises
    ------
    subprocess.CalledProcessError
        The kernel has no HTB, or this process lacks the right.
    """
    _tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1")
    _tc("class", "add", "dev", "lo", "parent", "1:", "classid", "1:1", "htb", "rate", "100gbit")
    for number, way in ((2, "dport"), (3, "sport")):
        rate = ("htb", "rate", f"{bits_per_s}bit", "burst", "256k", "cburst", "256k")
        _tc("class", "add", "dev", "lo", "parent", "1:", "classid", f"1:{number}", *rate)
        match = ("u32", "match", "ip", way, str(port), "0xffff", "flowid", f"1:{number}")
        _tc("filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", *match)


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True, capture_output=True)


# --- inside the namespace ---------------------------------------------------------------------


def _child(folder: Path, plan: Mapping[str, int]) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    peers.quiet()
    space = Workspace(folder)
    with endpoint(space) as server:
        if server is None:
            say("link: no Ceph here: left out")
            return
        port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
        assert port is not None  # noqa: S101  # the endpoint was started here
        limited(port, bits_per_s=_BITS_PER_S)
        bucket = Bucket()
        try:
            write_result(folder, measure(space, bucket, server, plan))
        finally:
            bucket.remove()


def measure(space: Workspace, bucket: Bucket, server: str, plan: Mapping[str, int]) -> Result:
    """Measure against the endpoint of the environment, behind any link."""
    spec = StateSpec(bytes_min=plan["bytes_min"], training_steps=plan["training_steps"])
    rounds = plan["rounds"]
    head = header(space.root)
    state = make_state(spec)
    result = Result(
        benchmark="link",
        header=head,
        parameters={
            "state_bytes": state_bytes(state),
            "seed": spec.seed,
            "rounds": rounds,
            "server": server,
            "bits_per_s": _BITS_PER_S,
            "puts_at_once": PUTS,
            "gets_at_once": GETS,
        },
    )
    made = make_ways(bucket.client, state, space.fresh() / "state.pt")
    ways = [way for way in made if way.name in _WAYS]
    saves = save_cases(ways, state, bucket)
    result.tables["save"] = run_cases("link save", saves, space, rounds=rounds)
    loading = [way for way in ways if not way.name.startswith("DCP")]  # two minutes: see ``s3``
    loads = load_cases(loading, state, bucket)
    result.tables["load"] = run_cases("link load", loads, space, rounds=rounds)
    for check, table in ((False, "replicate"), (True, "replicate, read back")):
        result.tables[table] = _replicated(space, bucket, spec, rounds, check=check)
    return result


def _replicated(
    space: Workspace, bucket: Bucket, spec: StateSpec, rounds: int, *, check: bool
) -> list[Measured]:
    source = space.fresh() / "store"
    make_source(source, spec)
    plain = Plain(packs_of(source))
    ways: Sequence[Way] = plain_ways(bucket.client, plain)
    cases: list[Case] = [client_case(way, bucket, plain, check=check) for way in ways]
    cases.append(store_case("threads", None, source, bucket, plain, check=check))
    return run_cases("link replicate", cases, space, rounds=rounds)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), json.loads(sys.argv[2]))
