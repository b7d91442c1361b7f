"""Fixtures that several folders of tests share: storage servers, and the proxy that breaks them."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests, and the processes that they start, import the modules of tests/kits by plain names.
_KITS = str(Path(__file__).parent / "kits")
sys.path.insert(0, _KITS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_KITS, os.environ.get("PYTHONPATH")]))
pytest.register_assert_rewrite(
    "catalogmodel", "deltakit", "faultkit", "gckit", "goldenkit", "labkit", "rankkit", "recipekit",
    "simclients", "store_machine", "ckptstore.testing.conformance",
)  # fmt: skip

# What is tried does not change from run to run, and a slow machine fails nothing. To search on:
# pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
settings.register_profile("quick", settings.get_profile("steady"), max_examples=20)
settings.load_profile("steady")

# JAX looks for no accelerator; its devices are those of the processor.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Ranks meet on loopback, whatever this machine's name resolves to.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import cirules  # noqa: E402 - after the path
import probes  # noqa: E402 - after the path
from buckets import AzureBucket, GcsBucket, S3Bucket  # noqa: E402 - after the path
from cputimes import CpuTimes  # noqa: E402
from faultproxy import FaultProxy  # noqa: E402
from local_servers import Server, start_azurite, start_gcs, start_moto, start_rclone  # noqa: E402
from second_run import SecondRun  # noqa: E402
from shortening import ENVIRONMENT, mark_grids  # noqa: E402
from threadwatch import begin  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from ckptstore import limits  # noqa: E402

_SHARING = {"tests/engine": "cluster", "tests/dcp": "ranks", "tests/loops": "ranks"}


class _Files(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Keeps the tests of a file on one worker, and those that share a cluster or a fork server."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return _SHARING.get(folder, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Distribute files."""
    return _Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the markers; begin with the files of slow tests, so that none is left for last."""
    default_s = config.getoption("timeout") or config.getini("timeout")
    cirules.give_time(items, float(default_s), cirules.slowness())
    mark_grids(items)
    files = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -files[item.path], item.path))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the short tier, and the one that keeps times."""
    group = parser.getgroup("ckptstore")
    group.addoption("--short", action="store_true", help="the short tier: no slow test")
    group.addoption("--second-run", action="store_true", help="run failed tests once more, alone")
    group.addoption("--cpu-times", metavar="FILE", help="write the CPU seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier, here and in the workers of xdist."""
    config.option.loadscopereorder = False  # the order of the collection, see above
    config.pluginmanager.register(CpuTimes(config.getoption("--cpu-times")))
    if config.getoption("--short"):
        os.environ[ENVIRONMENT] = "1"
        given = config.option.markexpr
        config.option.markexpr = f"({given}) and not slow" if given else "not slow"
        if config.getoption("--hypothesis-profile") is None:
            settings.load_profile("quick")
    workers = config.getoption("numprocesses") or 1
    slowness = cirules.slowness(workers)  # before they make the machine busy
    limits.CONNECT_TIMEOUT_S *= slowness  # type: ignore[misc]  # many backends here try only once
    if config.getoption("--second-run") and not hasattr(config, "workerinput"):
        short = ["--short"] if config.getoption("--short") else []
        config.pluginmanager.register(SecondRun(["-m", config.option.markexpr, *short]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Refuse tests that are skipped in CI."""
    return cirules.checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse files that are skipped in CI."""
    return cirules.checked((yield))


@pytest.fixture(autouse=True)
def _probed_once(request: pytest.FixtureRequest) -> None:
    """Probe this machine's disk once, but for tests marked ``probes``."""
    (probes.forget if request.node.get_closest_marker("probes") else probes.remember)()


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """Let no test be charged with threads that an earlier one left running."""
    begin()


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Let a test change the environment for itself alone."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def generators_stay() -> Iterator[None]:
    """Leave the global generators of Python, NumPy and torch as they were."""
    from ckptstore.integrations import randomness

    before = randomness.capture()
    yield
    randomness.restore(before)


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


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Microsoft's emulator of Azure Blob Storage, once a session."""
    server = start_azurite(tmp_path_factory.mktemp("azurite"))
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
def azure_bucket(azure_server: Server) -> Iterator[AzureBucket]:
    """Return a new container on azurite, with a client that is not the one under test."""
    with AzureBucket(azure_server.url) as bucket:
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


@pytest.fixture
def azure_proxy(azure_server: Server) -> Iterator[FaultProxy]:
    """Return a proxy in front of azurite that misbehaves when told to."""
    with FaultProxy(azure_server.port) as proxy:
        yield proxy
