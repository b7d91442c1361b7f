"""The S3 endpoint that a suite runs against.

It comes from the environment, as every S3 client reads it: ``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``. Without one, a Ceph gateway of one node is
started on loopback where Ceph is installed (``tests/lab/systems/ceph.sh``).
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.disk import Workspace
from benchmarks.measure import say

__all__ = ["Bucket", "endpoint"]

_CEPH = Path(__file__).resolve().parent.parent / "tests/lab/systems/ceph.sh"
# Variables that S3 clients read from the environment, and their names in the lab's script.
_VARIABLES = {
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
# Folder of a gateway that was started here.
_LAB = "BENCH_S3_LAB"


@contextmanager
def endpoint(space: Workspace) -> Iterator[str | None]:
    """Yield a description of the endpoint that the environment names, or of one started here."""
    if "AWS_ENDPOINT_URL" in os.environ:
        yield os.environ.get("BENCH_S3_SERVER", "the endpoint in AWS_ENDPOINT_URL")
        return
    folder = Path(tempfile.mkdtemp(prefix="ceph-", dir=space.root))
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
        os.environ[_LAB] = environment["LAB"]
        yield "Ceph RADOS gateway, one node on loopback (bluestore), same machine"
    finally:
        for name in (*_VARIABLES, _LAB):
            os.environ.pop(name, None)
        _down(environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _down(environment: Mapping[str, str]) -> None:
    subprocess.run([_CEPH, "down"], env=environment, check=False, capture_output=True)


class Bucket:
    """A new bucket, seen by a client of its own."""

    def __init__(self) -> None:
        import boto3

        self.client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        self.name = f"bench-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=self.name)
        self._count = 0

    def fresh(self) -> str:
        """Return ``bucket/prefix`` with a new prefix."""
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
        """Delete everything under ``bucket/prefix``.

        A Ceph that was started here frees the space at once; otherwise its gateway
        would only in two hours.
        """
        keys = [{"Key": key} for key, _ in self.objects(place)]
        for begin in range(0, len(keys), 1000):
            batch = {"Objects": keys[begin : begin + 1000]}
            self.client.delete_objects(Bucket=self.name, Delete=batch)
        if keys and (lab := os.environ.get(_LAB)):
            command = [str(_CEPH), "collect"]
            there = {**os.environ, "LAB": lab}
            subprocess.run(command, env=there, check=True, capture_output=True)

    def remove(self) -> None:
        """Delete the bucket and its contents."""
        self.clear(self.name)
        self.client.delete_bucket(Bucket=self.name)
