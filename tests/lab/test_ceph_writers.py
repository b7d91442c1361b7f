"""Many writers on Ceph's S3, with daemons killed under them and answers lost on the way."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from labkit.peers import Peer
from labkit.saving import Place, assert_kept, collect, start_writers
from labkit.systems import Ceph

# What a writer may be told when the storage fails under it: that it failed, or that it is not
# known whether the commit is there.
HONEST = {"storage", "storage_transient", "storage_ambiguous"}


def test_eight_processes_save_at_once(bucket: S3Bucket, saver: Peer) -> None:
    """8 processes x 25 saves: 200 versions, none lost, commit numbers without gaps."""
    place = Place(url=bucket.url, options=bucket.options())
    promises = collect(start_writers(saver, place, range(8), saves=25))
    assert promises.failed == []
    assert len(promises.acked) == 200
    assert len({tuple(meant) for meant in promises.acked.values()}) == 200
    found = assert_kept(saver, place, promises.acked, save=False)
    assert found["versions"] == 200
    assert found["commits"] == 200
    stored = bucket.keys()
    commits = sorted(key for key in stored if key.startswith("commits/"))
    assert commits == [f"commits/000000/{number:012d}.json" for number in range(1, 201)]


@pytest.mark.parametrize("daemon", ["rgw", "osd"])
def test_killed_daemon(ceph: Ceph, bucket: S3Bucket, saver: Peer, daemon: str) -> None:
    """A daemon dies by kill -9 under four writers and comes back: no promise is broken.

    A save may fail, or may not know; what was acknowledged is there, and nothing is torn.
    """
    place = Place(url=bucket.url, options=bucket.options())
    calls = start_writers(saver, place, range(4), saves=20)
    for call in calls:
        while call.next()["event"] != "acked":
            continue
    ceph.tell("kill9", daemon)
    time.sleep(2)  # the outage itself
    ceph.tell("start", daemon)
    promises = collect(calls)
    assert set(promises.failed) <= HONEST
    assert len(promises.acked) >= 4
    assert_kept(saver, place, promises.acked)


def test_lost_answers(ceph: Ceph, bucket: S3Bucket, saver: Peer) -> None:
    """The answer to a conditional PUT is lost, time and again: exactly one version each."""
    port = urlsplit(ceph.options()["endpoint_url"]).port
    assert port
    with FaultProxy(port) as proxy:
        through = bucket.options(f"http://127.0.0.1:{proxy.port}")
        fault = Fault(kind=Kind.LOST, method="PUT", path="/commits/", times=0)
        proxy.set(fault)
        place = Place(url=bucket.url, options=through)
        promises = collect(start_writers(saver, place, [0], saves=5))
    assert promises.failed == []
    assert len(promises.acked) == 5
    assert fault.hits >= 5
    direct = Place(url=bucket.url, options=bucket.options())
    found = assert_kept(saver, direct, promises.acked)
    assert found["versions"] == found["commits"] == 5
