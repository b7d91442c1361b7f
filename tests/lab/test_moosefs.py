"""MooseFS, mounted twice through FUSE."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from labkit.mount_suite import MountSuite
from labkit.systems import LabPool, MooseFs
from labkit.two_clients import Clients, TwoClientTests, clients_of_mounts


@pytest.fixture(scope="module")
def mounted(lab_pool: LabPool) -> MooseFs:
    """Return the running file system."""
    return lab_pool.get(MooseFs)


@pytest.fixture(scope="module")
def clients(mounted: MooseFs) -> Iterator[Clients]:
    """Open a folder through both mounts."""
    with clients_of_mounts(mounted) as both:
        yield both


class TestTwoMounts(TwoClientTests):
    """What two MooseFS clients see of each other."""


class TestConformance(MountSuite):
    """The backend's contract, kept here too."""
