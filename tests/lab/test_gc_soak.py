"""Collections beside savers and forks in processes, killed at calls, on S3 and CephFS of Ceph."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from buckets import S3Bucket
from labkit.campaign import rounds
from labkit.systems import Ceph
from programs import run_program

KILLS = 40
KILLS_LONG = 400
NEEDED = ["saved", "collected", "kills", "objects swept"]
"""What a campaign must have seen to have shown anything: a slow machine goes on until it has."""


def campaign(**plan: Any) -> dict[str, Any]:  # noqa: ANN401 - as faultkit.gc_driver.Plan takes them
    """Return what a campaign of tests/faults found."""
    whole = {"kills": rounds(KILLS, KILLS_LONG), "seed": 3, "needed": NEEDED, **plan}
    printed = run_program("faultkit.gc_driver", given=json.dumps(whole), timeout_s=1500)
    found: dict[str, Any] = json.loads(printed)
    print(found)  # noqa: T201 - the figures of the campaign
    return found


@pytest.mark.timeout(1500)
def test_collections_on_s3(ceph: Ceph) -> None:
    """6 savers, a forker, 2 collectors without grace: nothing is lost, nothing stays."""
    with S3Bucket(ceph.options()["endpoint_url"]) as bucket:
        found = campaign(urls=[bucket.url], options=bucket.options())

    check(found)


@pytest.mark.timeout(1500)
def test_collections_on_two_mounts(ceph: Ceph) -> None:
    """The same, half of the processes through each of two mounts of one CephFS."""
    name = f"gc-{uuid.uuid4().hex[:8]}"
    found = campaign(urls=[str(mount / name) for mount in ceph.mounts])

    check(found)


def check(found: dict[str, Any]) -> None:
    """Hold that every promise was kept, and that there was something to promise."""
    assert found["problems"] == []
    assert all(found["figures"].get(what) for what in NEEDED), found["figures"]
    assert found["versions"] > 0
