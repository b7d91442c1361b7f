"""Saves and loads of one state on an S3 endpoint, against what ``s3_ways`` lists.

The endpoint comes from the environment, as every S3 client reads it: ``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``. Without one, a Ceph gateway of one node is
started on loopback where Ceph is installed (``tests/lab/systems/ceph.sh``). The bucket is new.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import FAILURES, Case, Measured, Result, run_cases, say
from benchmarks.peers import empty_like, touch
from benchmarks.s3_ways import GETS, PUTS, Way, count_bytes, make_ways
from benchmarks.states import State, StateSpec, make_state, same, state_bytes

__all__ = ["run"]

_CEPH = Path(__file__).resolve().parent.parent / "tests/lab/systems/ceph.sh"
# What S3 clients read from the environment, and what the laboratory's script calls it.
_VARIABLES = {
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


def run(
    space: Workspace, *, bytes_min: int, rounds: int, training_steps: int = 120
) -> Result | None:
    """Run everything; return the tables ``save`` and ``load``, or None without an endpoint."""
    peers.quiet()
    with _endpoint(space) as server:
        if server is None:
            say("s3: no AWS_ENDPOINT_URL, and no Ceph here: left out")
            return None
        bucket = _Bucket()
        try:
            return _measure(space, bucket, server, bytes_min, rounds, training_steps)
        finally:
            bucket.remove()


def _measure(
    space: Workspace,
    bucket: _Bucket,
    server: str,
    bytes_min: int,
    rounds: int,
    training_steps: int,
) -> Result:
    spec = StateSpec(bytes_min=bytes_min, training_steps=training_steps)
    head = header(space.root)
    state = make_state(spec)
    result = Result(
        benchmark="s3",
        header=head,
        parameters={
            "state_bytes": state_bytes(state),
            "seed": spec.seed,
            "training_steps": spec.training_steps,
            "rounds": rounds,
            "server": server,
            "puts_at_once": PUTS,
            "gets_at_once": GETS,
        },
    )
    ways = make_ways(bucket.client, state, space.fresh() / "state.pt")
    result.tables["save"] = _saves(state, ways, bucket, space, rounds)
    result.tables["load"] = _loads(state, ways, bucket, space, rounds)
    return result


# --- the endpoint -----------------------------------------------------------------------------


@contextmanager
def _endpoint(space: Workspace) -> Iterator[str | None]:
    """Yield a description of the endpoint that the environment names, or of one started here."""
    if "AWS_ENDPOINT_URL" in os.environ:
        yield os.environ.get("BENCH_S3_SERVER", "the endpoint in AWS_ENDPOINT_URL")
        return
    folder = Path(tempfile.mkdtemp(prefix="ceph-", dir=space.root))
    # Objects that were deleted take their room for two more hours: the gateway's own collection.
    ports = {"OSD_GB": "48", "RGW_PORT": str(_free_port()), "MON_PORT": str(_free_port())}
    environment = {**os.environ, **ports, "LAB": str(folder / "lab")}
    try:
        subprocess.run([_CEPH, "up", "rgw"], env=environment, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"s3: Ceph does not start: {error}")
        _down(environment)
        yield None
        return
    try:
        printed = subprocess.run(
            [_CEPH, "env"], env=environment, check=True, capture_output=True, text=True
        )
        facts = dict(line.split("=", 1) for line in printed.stdout.split())
        os.environ.update({name: facts[fact] for name, fact in _VARIABLES.items()})
        yield "Ceph RADOS gateway, one node on loopback (bluestore), same machine"
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        _down(environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _down(environment: Mapping[str, str]) -> None:
    subprocess.run([_CEPH, "down"], env=environment, check=False, capture_output=True)


class _Bucket:
    """A new bucket, seen by a client of its own."""

    def __init__(self) -> None:
        import boto3

        self.client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        self.name = f"bench-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=self.name)
        self._count = 0

    def fresh(self) -> str:
        """Return ``bucket/prefix`` with a prefix that was not used before."""
        self._count += 1
        return f"{self.name}/{self._count:04d}"

    def objects(self, place: str) -> list[tuple[str, int]]:
        """Return key and bytes of everything under ``bucket/prefix``."""
        prefix = place.split("/", 1)[1] if "/" in place else ""
        pages = self.client.get_paginator("list_objects_v2")
        found = []
        for page in pages.paginate(Bucket=self.name, Prefix=prefix):
            found += [(item["Key"], item["Size"]) for item in page.get("Contents", ())]
        return found

    def clear(self, place: str) -> None:
        """Delete everything under ``bucket/prefix``."""
        keys = [{"Key": key} for key, _ in self.objects(place)]
        for begin in range(0, len(keys), 1000):
            batch = {"Objects": keys[begin : begin + 1000]}
            self.client.delete_objects(Bucket=self.name, Delete=batch)

    def remove(self) -> None:
        """Delete the bucket and what is in it."""
        self.clear(self.name)
        self.client.delete_bucket(Bucket=self.name)


# --- tables -----------------------------------------------------------------------------------


def _saves(
    state: State, ways: list[Way], bucket: _Bucket, space: Workspace, rounds: int
) -> list[Measured]:
    return run_cases(
        "s3 save", [_save_case(way, state, bucket) for way in ways], space, rounds=rounds
    )


def _save_case(way: Way, state: State, bucket: _Bucket) -> Case:
    places: list[str] = []

    def prepare(_: Path) -> None:
        places[:] = [bucket.fresh()]
        if way.name.startswith("ckptstore"):  # as in a training loop, the store is there already
            ckptstore.open(f"s3://{places[0]}", create=True).close()

    def after(_: Path, __: object) -> Mapping[str, float]:
        found = bucket.objects(places[0])
        bucket.clear(places[0])
        return {"stored_bytes": sum(size for _, size in found), "objects": len(found)}

    return Case(
        name=way.name,
        prepare=prepare,
        run=lambda _: way.save(state, places[0]),
        after=after,
        logical_bytes=state_bytes(state),
        note="" if way.name.startswith("ckptstore") else way.note,
    )


def _loads(
    state: State, ways: list[Way], bucket: _Bucket, space: Workspace, rounds: int
) -> list[Measured]:
    target = empty_like(state)
    cases: list[Case] = []
    for way in ways:
        place = bucket.fresh()
        if way.name.startswith("ckptstore"):
            ckptstore.open(f"s3://{place}", create=True).close()
        try:
            way.save(state, place)
        except FAILURES as error:
            say(f"{way.name} does not save: {error}")
            continue
        if way.plain and way.load is not None:
            cases.append(_load_case(way.name, _taken(way.load, place), state, way))
            continue
        if way.load is not None:
            cases.append(_load_case(f"{way.name}, new", _touched(way.load, place), state, way))
        if way.load_into is not None:
            load = _into(way.load_into, place, target)
            cases.append(_load_case(f"{way.name}, into", load, state, way))
    return run_cases("s3 load", cases, space, rounds=rounds)


def _touched(load: Callable[[str], object], place: str) -> Callable[[Path], object]:
    def timed(_: Path) -> object:
        loaded = load(place)
        touch(loaded)
        return loaded

    return timed


def _taken(load: Callable[[str], object], place: str) -> Callable[[Path], object]:
    return lambda _: load(place)


def _into(
    load: Callable[[str, State], object], place: str, target: State
) -> Callable[[Path], object]:
    return lambda _: load(place, target)


def _load_case(name: str, load: Callable[[Path], object], state: State, way: Way) -> Case:
    checked: list[bool] = []

    def after(_: Path, loaded: Any) -> Mapping[str, float]:  # noqa: ANN401 - whatever was loaded
        if not checked:
            checked.append(True)
            right = count_bytes(loaded) == state_bytes(state) if way.plain else same(state, loaded)
            if not right:
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
        return {}

    return Case(
        name=name,
        run=load,
        after=after,
        writes=False,
        logical_bytes=state_bytes(state),
        note=way.note,
    )
