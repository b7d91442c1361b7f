"""GlusterFS with 4+2 erasure coding, mounted twice through FUSE."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labkit.mount_suite import MountSuite
from labkit.systems import Gluster, LabPool
from labkit.two_clients import Clients, TwoClientTests, clients_of_mounts


@pytest.fixture(scope="module")
def mounted(lab_pool: LabPool) -> Gluster:
    """Return the running file system."""
    return lab_pool.get(Gluster, LAYOUT="disperse")


@pytest.fixture(scope="module")
def clients(mounted: Gluster) -> Iterator[Clients]:
    """Open a folder through both mounts."""
    with clients_of_mounts(mounted) as both:
        yield both


class TestTwoMounts(TwoClientTests):
    """What two GlusterFS clients see of each other."""


class TestConformance(MountSuite):
    """The backend's contract, kept here too."""
