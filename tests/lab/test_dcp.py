"""Sharded saves on real storage: two NFS hosts, CephFS by two mounts, Ceph's S3."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from buckets import S3Bucket
from labkit.campaign import moment, rounds
from labkit.peers import Call, Peer, PeerError, guest_peer
from labkit.systems import Ceph, Nfs

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from rankkit import jobs
from rankkit.campaign import Figures, campaign
from rankkit.groups import run_ranks

import ckptstore

KILLS = rounds(short=3, long=50)
HOSTS_KILLS = rounds(short=2, long=50)
MODELS = ("fsdp", "hsdp", "tensor_parallel")
WORLD = 4
FIRST_HOST = "10.78.0.11"

Hosts = tuple[Peer, Peer]


def save_and_load(url: jobs.Url, options: dict[str, Any]) -> None:
    """Save by four ranks, load by two and by three, compare bit by bit."""
    own = url if isinstance(url, str) else url[0]
    ckptstore.open(own, create=True, chunk_bytes=65536, **options).close()
    ids = run_ranks(jobs.save, WORLD, url, options, "lab", [1, 2], MODELS, timeout_s=300)
    assert all(found == ids[0] for found in ids)
    for world in (2, 3):
        problems = run_ranks(jobs.load, world, url, options, "lab@2", 2, MODELS, timeout_s=300)
        assert problems == [[]] * world
    with ckptstore.open(own, read_only=True, **options) as store:
        assert store.verify().ok
        assert len(store.log()) == 2


# --- Ceph -----------------------------------------------------------------------------------------
def test_ranks_on_s3(bucket: S3Bucket) -> None:
    """Four ranks save to a bucket, two and three load."""
    save_and_load(bucket.url, bucket.options())


def test_killed_ranks_on_s3(bucket: S3Bucket) -> None:
    """A rank is killed at drawn calls: every version in the bucket is whole."""
    figures = campaign(bucket.url, bucket.options(), rounds=KILLS, seed=3)

    print(figures)  # noqa: T201 - for docs/reference/campaigns.md
    assert figures.acknowledged > 0


def test_ranks_on_two_mounts_of_cephfs(ceph: Ceph) -> None:
    """Two ranks by each mount, whose caches know nothing of each other."""
    save_and_load([str(mount / "ranks") for mount in ceph.mounts], {})


def test_killed_ranks_on_two_mounts_of_cephfs(ceph: Ceph) -> None:
    """A rank is killed at drawn calls: every version is whole, by the first mount."""
    places: jobs.Url = [str(mount / "killed") for mount in ceph.mounts]
    figures = campaign(places, rounds=KILLS, seed=4)

    print(figures)  # noqa: T201 - for docs/reference/campaigns.md
    assert figures.acknowledged > 0


# --- NFS ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hosts(nfs: Nfs) -> Iterator[Hosts]:
    """Return a process on each host that runs ranks in children of its own."""
    with guest_peer(nfs, "c1", "ranks.py") as one, guest_peer(nfs, "c2", "ranks.py") as two:
        yield one, two


def start_ranks(hosts: Hosts, world: int, port: int, job: str, *words: object) -> list[Call]:
    """Let ranks begin, the first half of them on the first host."""
    return [
        hosts[rank * len(hosts) // world].send(
            "rank", rank=rank, world=world, meeting=f"tcp://{FIRST_HOST}:{port}", job=job,
            words=list(words),
        )
        for rank in range(world)
    ]  # fmt: skip


def results(calls: Sequence[Call]) -> list[Any]:
    """Return what each rank returns."""
    return [call.result(300) for call in calls]


def test_ranks_on_two_hosts(nfs: Nfs, hosts: Hosts) -> None:
    """Two ranks on each of two NFS clients save; two and three load what four saved."""
    url = f"{nfs.mount}/ranks"
    kept = start_ranks(hosts, 1, 29600, "create", url)
    results(kept)
    ids = results(start_ranks(hosts, WORLD, 29601, "save", url, {}, "lab", [1, 2], []))
    assert all(found == ids[0] for found in ids)
    for world in (2, 3):
        calls = start_ranks(hosts, world, 29601 + world, "load", url, {}, "lab@2", 2, [])
        assert results(calls) == [[]] * world


def test_killed_ranks_on_two_hosts(nfs: Nfs, hosts: Hosts) -> None:
    """A rank of either host is killed while all save: what the other host sees is whole."""
    url = f"{nfs.mount}/killed"
    results(start_ranks(hosts, 1, 29620, "create", url))
    first, seen = 1, set[int]()
    for turn in range(HOSTS_KILLS):
        calls = start_ranks(hosts, WORLD, 29630 + turn, "save_for_ever", url, first)
        pids = [call.next(300)["pid"] for call in calls]
        for call in calls:
            call.next(300)  # its first save begins
        while turn % 2 and calls[0].next(300)["value"][0] != "saved":
            continue  # in every second round a save is acknowledged before the kill
        time.sleep(moment(turn, 0.0, 3.0))  # the moment itself is what is varied
        victim = (turn * 3) % WORLD
        hosts[victim * 2 // WORLD].ask("kill", pid=pids[victim])
        for rank, call in enumerate(calls):
            if rank != victim:
                with pytest.raises(PeerError):
                    call.result(300)
            told = [event["value"] for event in call.heard() if event["event"] == "told"]
            seen |= {step for what, step in told if what == "saved"}
        last = start_ranks(hosts, 1, 29700 + turn, "check_killed", url, sorted(seen))
        first = results(last)[0] + 1
    print(Figures(kills=HOSTS_KILLS, versions=first - 1, acknowledged=len(seen)))  # noqa: T201
    assert first > 1
