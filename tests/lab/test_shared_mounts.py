"""Shared file systems, each mounted twice through FUSE: CephFS, GlusterFS, MooseFS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labkit.mount_suite import MountSuite
from labkit.systems import Ceph, Gluster, LabPool, MooseFs, TwoMounts
from labkit.two_clients import Clients, TwoClientTests, clients_of_mounts

SYSTEMS: dict[str, tuple[type[TwoMounts], dict[str, str]]] = {
    "cephfs": (Ceph, {}),
    "gluster, 4+2 erasure coding": (Gluster, {"LAYOUT": "disperse"}),
    "gluster, three copies": (Gluster, {"LAYOUT": "replica"}),
    "moosefs": (MooseFs, {}),
}


@pytest.fixture(scope="module", params=SYSTEMS)
def mounted(lab_pool: LabPool, request: pytest.FixtureRequest) -> TwoMounts:
    """Return the running file system."""
    kind, settings = SYSTEMS[request.param]
    return lab_pool.get(kind, **settings)


@pytest.fixture(scope="module")
def clients(mounted: TwoMounts) -> Iterator[Clients]:
    """Open a folder through both mounts."""
    with clients_of_mounts(mounted) as both:
        yield both


class TestTwoMounts(TwoClientTests):
    """What two clients see of each other."""


class TestConformance(MountSuite):
    """The backend's contract, kept here too."""
