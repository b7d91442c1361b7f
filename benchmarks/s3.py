"""Saves and loads of one state on an S3 endpoint, against plain files by s3fs, boto3 and DCP.

The endpoint comes from the environment, as every S3 client reads it: ``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``. Without one, a Ceph gateway of one node is
started on loopback where Ceph is installed (``tests/lab/systems/ceph.sh``). The bucket is new.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptstore
from benchmarks import peers
from benchmarks.disk import Workspace
from benchmarks.host import header
from benchmarks.measure import FAILURES, Case, Measured, Result, run_cases, say
from benchmarks.peers import empty_like, flat_for_safetensors, rest_as_json, touch
from benchmarks.states import State, StateSpec, make_state, same, state_bytes

__all__ = ["run"]

_RUN = "bench"
_CEPH = Path(__file__).resolve().parent.parent / "tests/lab/systems/ceph.sh"
_THREADS = 2
# What S3 clients read from the environment, and what the laboratory's script calls it.
_VARIABLES = {
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to keep a state under a prefix of a bucket."""

    name: str
    save: Callable[[State, str], None]
    """Gets the state and ``bucket/prefix``."""
    load: Callable[[str], object] | None = None
    load_into: Callable[[str, State], object] | None = None
    note: str = ""


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
        },
    )
    ways = _ways(bucket, space)
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
    ports = {"RGW_PORT": str(_free_port()), "MON_PORT": str(_free_port())}
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


# --- the ways ---------------------------------------------------------------------------------


def _ways(bucket: _Bucket, space: Workspace) -> list[_Way]:
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    client = bucket.client
    scratch = space.fresh() / "state.pt"

    def key_of(place: str, name: str) -> str:
        return f"{place.split('/', 1)[1]}/{name}"

    def fs_torch_save(state: State, place: str) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        fs.pipe_file(f"{place}/state.pt", buffer.getvalue())

    def fs_torch_load(place: str) -> object:
        return torch.load(io.BytesIO(fs.cat_file(f"{place}/state.pt")), weights_only=True)

    def fs_safetensors_save(state: State, place: str) -> None:
        data = safetensors.torch.save(flat_for_safetensors(state), {"rest": rest_as_json(state)})
        fs.pipe_file(f"{place}/state.safetensors", data)

    def fs_safetensors_load(place: str) -> object:
        return safetensors.torch.load(fs.cat_file(f"{place}/state.safetensors"))

    def boto_file_save(state: State, place: str) -> None:
        torch.save(state, scratch)
        client.upload_file(str(scratch), bucket.name, key_of(place, "state.pt"))

    def boto_file_load(place: str) -> object:
        client.download_file(bucket.name, key_of(place, "state.pt"), str(scratch))
        return torch.load(scratch, weights_only=True)

    def boto_object_save(state: State, place: str) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        client.upload_fileobj(buffer, bucket.name, key_of(place, "state.pt"))

    def boto_object_load(place: str) -> object:
        buffer = io.BytesIO()
        client.download_fileobj(bucket.name, key_of(place, "state.pt"), buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    return [
        _Way(name="s3fs, torch.save", save=fs_torch_save, load=fs_torch_load),
        _Way(name="s3fs, safetensors", save=fs_safetensors_save, load=fs_safetensors_load),
        _Way(
            name="boto3 file, torch.save",
            save=boto_file_save,
            load=boto_file_load,
            note="by way of a local file, not fsynced",
        ),
        _Way(name="boto3 fileobj, torch.save", save=boto_object_save, load=boto_object_load),
        _Way(name="DCP FsspecWriter", save=_dcp_save, load_into=_dcp_load_into),
        _store_way("auto"),
        _store_way("raw"),
    ]


def _dcp_save(state: State, place: str) -> None:
    writer = FsspecWriter(f"s3://{place}", thread_count=_THREADS)
    dcp_save(state, storage_writer=writer, no_dist=True)


def _dcp_load_into(place: str, state: State) -> object:
    dcp_load(state, storage_reader=FsspecReader(f"s3://{place}"), no_dist=True)
    return state


def _store_way(codec: str) -> _Way:
    def save(state: State, place: str) -> None:
        with ckptstore.open(f"s3://{place}", codec=codec) as store:
            store.run(_RUN).save(state, step=1)

    def load(place: str) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True) as store:
            return store.load(f"{_RUN}@latest")

    def load_into(place: str, state: State) -> object:
        with ckptstore.open(f"s3://{place}", read_only=True) as store:
            return store.load(f"{_RUN}@latest", into=state)

    return _Way(
        name=f"ckptstore {codec}", save=save, load=load, load_into=load_into, note="verified"
    )


# --- tables -----------------------------------------------------------------------------------


def _saves(
    state: State, ways: list[_Way], bucket: _Bucket, space: Workspace, rounds: int
) -> list[Measured]:
    return run_cases(
        "s3 save", [_save_case(way, state, bucket) for way in ways], space, rounds=rounds
    )


def _save_case(way: _Way, state: State, bucket: _Bucket) -> Case:
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
    state: State, ways: list[_Way], bucket: _Bucket, space: Workspace, rounds: int
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


def _into(
    load: Callable[[str, State], object], place: str, target: State
) -> Callable[[Path], object]:
    return lambda _: load(place, target)


def _load_case(name: str, load: Callable[[Path], object], state: State, way: _Way) -> Case:
    checked: list[bool] = []

    def after(_: Path, loaded: Any) -> Mapping[str, float]:  # noqa: ANN401 - whatever was loaded
        if not checked:
            checked.append(True)
            if not same(state, loaded):
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
