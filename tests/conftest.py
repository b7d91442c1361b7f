"""Fixtures that several folders of tests share: storage servers, and the proxy that breaks them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# tests/servers holds modules of the tests' own; tests import them by their plain names.
sys.path.insert(0, str(Path(__file__).parent / "servers"))
pytest.register_assert_rewrite(
    "ckptstore.testing.conform_create",
    "ckptstore.testing.conform_listing",
    "ckptstore.testing.conform_objects",
)

# What is tried does not change from run to run, and a slow machine fails nothing. To search on:
# pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
settings.load_profile("steady")

# Ranks meet on loopback, whatever this machine's name resolves to.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import cirules  # noqa: E402 - after the path
from buckets import GcsBucket, S3Bucket  # noqa: E402 - after the path
from faultproxy import FaultProxy  # noqa: E402
from local_servers import Server, start_gcs, start_moto, start_rclone  # noqa: E402
from threadwatch import begin  # noqa: E402


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the long kinds of tests their time; by markers, which other hooks may set."""
    cirules.give_time(items, float(config.getini("timeout")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Refuse tests that are skipped in CI."""
    return cirules.checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse files that are skipped in CI."""
    return cirules.checked((yield))


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """Let no test be charged with threads that an earlier one left running."""
    begin()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt, this process and its children.

    Whatever a shell starts in the background, without control of jobs, ignores it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start S3 that honours conditions; 0.6 s to start, once a session."""
    server = start_moto(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start S3 that silently ignores conditions."""
    server = start_rclone(tmp_path_factory.mktemp("rclone"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start GCS that honours ``ifGenerationMatch=0`` on multipart uploads."""
    server = start_gcs(tmp_path_factory.mktemp("gcs"))
    yield server
    server.stop()


@pytest.fixture
def s3_bucket(moto_server: Server) -> Iterator[S3Bucket]:
    """Return a new bucket on moto, with a client that is not the one under test."""
    with S3Bucket(moto_server.url) as bucket:
        yield bucket


@pytest.fixture
def careless_bucket(rclone_server: Server) -> Iterator[S3Bucket]:
    """Return a new bucket on the server that ignores conditions."""
    with S3Bucket(rclone_server.url) as bucket:
        yield bucket


@pytest.fixture
def gcs_bucket(gcs_server: Server) -> Iterator[GcsBucket]:
    """Return a new bucket on fake-gcs-server, with a client that is not the one under test."""
    with GcsBucket(gcs_server.url) as bucket:
        yield bucket


@pytest.fixture
def s3_proxy(moto_server: Server) -> Iterator[FaultProxy]:
    """Return a proxy in front of moto that misbehaves when told to."""
    with FaultProxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture
def gcs_proxy(gcs_server: Server) -> Iterator[FaultProxy]:
    """Return a proxy in front of fake-gcs-server that misbehaves when told to."""
    with FaultProxy(gcs_server.port) as proxy:
        yield proxy
