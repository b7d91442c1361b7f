"""CephFS, mounted twice by ceph-fuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labkit.mount_suite import MountSuite
from labkit.systems import Ceph, LabPool
from labkit.two_clients import Clients, TwoClientTests, clients_of_mounts


@pytest.fixture(scope="module")
def mounted(lab_pool: LabPool) -> Ceph:
    """Return the running cluster."""
    return lab_pool.get(Ceph)


@pytest.fixture(scope="module")
def clients(mounted: Ceph) -> Iterator[Clients]:
    """Open a folder through both mounts."""
    with clients_of_mounts(mounted) as both:
        yield both


class TestTwoMounts(TwoClientTests):
    """What two ceph-fuse clients see of each other."""


class TestConformance(MountSuite):
    """The backend's contract, kept here too."""
