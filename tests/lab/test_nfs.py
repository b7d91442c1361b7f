"""NFS 4.2 and 3: a Linux server and two Linux clients, each with a kernel of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit.peers import guest_peer
from labkit.systems import LabPool, Nfs
from labkit.two_clients import Clients, TwoClientTests


@pytest.fixture(scope="module", params=["4.2", "3"])
def nfs(lab_pool: LabPool, request: pytest.FixtureRequest) -> Nfs:
    """Return the running server with its clients."""
    return lab_pool.get(Nfs, VERSION=request.param)


@pytest.fixture(scope="module")
def clients(nfs: Nfs) -> Iterator[Clients]:
    """Open a folder of the export on both hosts."""
    program = "backend_peer.py"
    with guest_peer(nfs, "c1", program) as one, guest_peer(nfs, "c2", program) as two:
        for peer in (one, two):
            found = peer.ask("open", url=f"{nfs.mount}/pair", options={})
            assert found == {"name": "nfs"}, "the mount table tells what this is"
        yield one, two


class TestTwoHosts(TwoClientTests):
    """What two NFS clients on different hosts see of each other."""
