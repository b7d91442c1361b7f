"""NFS 4.2 and 3: a Linux server and two Linux clients, each with a kernel of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit.peers import PROGRAMS, guest_peer
from labkit.systems import LabPool, Nfs
from labkit.two_clients import Clients, TwoClientTests

ROOT = Path(__file__).parent.parent.parent
SUITE_TESTS_MIN = 30  # so that a suite which collects nothing does not pass


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


class TestConformance:
    """The backend's contract on a real NFS mount."""

    backend_name = "nfs"

    def test_suite_passes_on_a_client(self, nfs: Nfs) -> None:
        """The whole conformance suite passes inside a client, and none of it is skipped."""
        said = nfs.tell(
            "exec",
            "c1",
            *(sys.executable, "-m", "pytest", str(PROGRAMS / "nfs_conformance.py")),
            *("--noconftest", "-q", "--tb=short", "-p", "no:cacheprovider"),
            *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
            *("-o", "python_files=nfs_conformance.py", "--basetemp=/dev/shm/pytest"),
        )
        summary = re.search(r"^(\d+) passed in [\d.]+s", said, re.MULTILINE)
        assert summary, said
        assert int(summary[1]) >= SUITE_TESTS_MIN, said
