"""The lab: collected only by ``make test-lab``, which sets ``CKPTSTORE_LAB=1``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENABLED = os.environ.get("CKPTSTORE_LAB") == "1"
collect_ignore_glob = [] if ENABLED else ["*"]

from buckets import S3Bucket  # noqa: E402
from chromium import Browser, browser  # noqa: E402 - after what is ignored
from labkit.peers import Peer, local_peer  # noqa: E402
from labkit.systems import SCRIPTS, Ceph, LabPool, Nfs, pool  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab_pool() -> Iterator[LabPool]:
    """Start systems on demand, one at a time; the last one is ended with the session.

    ``run.sh`` names the folder, and ends what is left there should pytest itself be killed.
    """
    folder = Path(os.environ["CKPTSTORE_LAB_FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    with pool(folder) as running:
        yield running


@pytest.fixture(scope="module")
def ceph(lab_pool: LabPool) -> Ceph:
    """Return the running cluster, whose gateway has the classes STANDARD and STANDARD_IA."""
    return lab_pool.get(Ceph)


@pytest.fixture
def bucket(ceph: Ceph) -> Iterator[S3Bucket]:
    """Make a bucket through boto3."""
    with S3Bucket(ceph.options()["endpoint_url"]) as made:
        yield made


@pytest.fixture(scope="module")
def nfs(lab_pool: LabPool) -> Nfs:
    """Return the running server of NFS 4.2 with its clients."""
    return lab_pool.get(Nfs, VERSION="4.2")


@pytest.fixture(scope="module")
def saver() -> Iterator[Peer]:
    """Return a process that saves, opens and checks in children: smbclient remembers logins."""
    with local_peer("saver.py") as peer:
        yield peer


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    """Install Debian's Chromium, and start it."""
    packages = f". {SCRIPTS}/packages.sh; install_packages chromium fonts-dejavu-core"
    subprocess.run(["bash", "-euc", packages], check=True)
    with browser(tmp_path / "profile") as running:
        yield running


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Return the folder for screenshots: ``CKPTSTORE_SCREENSHOTS``, or one of this test."""
    folder = Path(os.environ.get("CKPTSTORE_SCREENSHOTS") or tmp_path / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
