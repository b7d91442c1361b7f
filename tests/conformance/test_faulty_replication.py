"""Replication to S3 behind a network that resets, loses, cuts and is slow: a repetition ends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from badnetwork import KINDS, OFTEN, SLOW, Hasty, hitting, named
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.errors import CkptStoreError
from ckptstore.jobs import read_job, run_job
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

STEPS = (1, 2, 3)
RUNS_MAX = 5


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((30_000,), float(step)), "b": torch.arange(40_000.0)}}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Store:
    """Return a store in memory with a history."""
    backend = MemoryBackend(f"faulty-replication/{request.node.nodeid}")
    store = Store(create_on(backend, chunk_bytes=1 << 16))
    run = store.run("gpt", metrics={"loss": "min"})
    for step in STEPS:
        run.save(_state(step), step=step, metrics={"loss": 1 / step}, tags=[f"t{step}"])
    return store


@pytest.fixture
def reaching(s3_bucket: S3Bucket, s3_proxy: FaultProxy) -> Iterator[Backend]:
    """Return a backend that reaches a bucket through the proxy."""
    options = s3_bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    backend = open_backend(s3_bucket.url, retry=False, client="direct", **options)
    yield RetryingBackend(backend, environment=Hasty())
    s3_proxy.set()
    backend.close()


def _assert_all_loads(store: Store) -> int:
    """Load all that a store shows; return how many versions."""
    versions = [version for version in store.versions() if version.level != "record"]
    for version in versions:
        loaded, meant = store.load(f"#{version.id}")["model"], _state(version.step)["model"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in meant.items())
    return len(versions)


def _opened(bucket: S3Bucket) -> Store:
    """Open the target past the proxy."""
    return Store(open_on(open_backend(bucket.url, **bucket.options())))


@contextlib.contextmanager
def _watched(bucket: S3Bucket) -> Iterator[None]:
    """Look at the target meanwhile, past the proxy: all that it shows at any moment loads."""
    done = threading.Event()
    failures: list[BaseException] = []
    looks: list[int] = []

    def look() -> None:
        try:
            with _opened(bucket) as store:
                while not done.is_set():
                    looks.append(_assert_all_loads(store))
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not failures, failures
    assert looks


@pytest.mark.short("cut-503")
@pytest.mark.parametrize("every", [3, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("fault", OFTEN, ids=named)
def test_every_few_requests(
    source: Store,
    reaching: Backend,
    s3_bucket: S3Bucket,
    s3_proxy: FaultProxy,
    fault: Fault,
    every: int,
) -> None:
    """A third of all requests, or a fifth, hit from first to last: retries overcome it all."""
    target = Store(create_on(reaching, environment=Hasty(), chunk_bytes=1 << 16))
    often = hitting(fault, every=every)
    s3_proxy.set(often)
    with _watched(s3_bucket):
        report = source.replicate(target)
    s3_proxy.set()
    assert often.hits > 3
    assert len(report.copied) == len(STEPS)
    assert report.noted
    assert _assert_all_loads(target) == len(STEPS)
    assert target.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [7, pytest.param(3, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.soak)]
)
def test_requests_that_take_two_seconds(
    source: Store, reaching: Backend, s3_bucket: S3Bucket, s3_proxy: FaultProxy, every: int
) -> None:
    """Latency is no fault: nothing is sent twice, and nothing fails."""
    target = Store(create_on(reaching, environment=Hasty(), chunk_bytes=1 << 16))
    late = hitting(SLOW, every=every)
    uploads = Fault(kind=SLOW.kind, method="PUT", path="/packs/", skip=1 << 60)
    s3_proxy.set(late)
    with _watched(s3_bucket):
        report = source.replicate(target)
    assert late.hits >= 3
    s3_proxy.set(uploads, late)
    again = source.replicate(target)
    s3_proxy.set()
    assert len(report.copied) == len(STEPS)
    assert (again.copied, uploads.seen) == ((), 0)
    assert _assert_all_loads(target) == len(STEPS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [*OFTEN, SLOW], ids=named)
def test_a_job_behind_a_bad_network(
    tmp_path: Path, s3_bucket: S3Bucket, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """A whole job, with its own retries and waits: every third request hit, it ends in a few runs.

    What it evicted from the source is whole in the target. Where a commit is hit each time that it
    is sent, a run ends with an error, and the next goes on.
    """
    create_on(open_backend(s3_bucket.url, **s3_bucket.options()), chunk_bytes=1 << 16)
    with ckptstore.open(tmp_path / "hot", create=True, chunk_bytes=1 << 16) as hot:
        run = hot.run("gpt", metrics={"loss": "min"})
        for step in STEPS:
            run.save(_state(step), step=step, metrics={"loss": 1 / step})
    file = tmp_path / "job.toml"
    file.write_text(
        f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{s3_bucket.url}"\n'
        f'options = {{ endpoint_url = "http://127.0.0.1:{s3_proxy.port}" }}\n'
        '[retain]\nevict = "last 1"\n[gc]\nsource = true\ngrace = "1s"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_bucket.chain().items():
            patch.setenv(name, value)
        s3_proxy.set(hitting(fault, every=3))
        for _ in range(RUNS_MAX):
            with contextlib.suppress(CkptStoreError):
                if run_job(read_job(file)).ok:
                    break
        else:
            pytest.fail(f"the job did not end in {RUNS_MAX} runs")
        s3_proxy.set()
    with ckptstore.open(tmp_path / "hot") as hot:
        assert [version.level for version in hot.versions()] == ["record", "record", "full"]
    with _opened(s3_bucket) as cold:
        assert _assert_all_loads(cold) == len(STEPS)


@pytest.mark.short("status_after-500")
@pytest.mark.parametrize("fault", KINDS, ids=named)
def test_a_repetition_finishes(
    source: Store, reaching: Backend, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """Whatever befalls requests in a row: what shows loads, the source is as it was, a run ends it.

    Single faults are overcome by retries; as many as here are often not.
    """
    target = Store(create_on(reaching, environment=Hasty(), chunk_bytes=1 << 16))
    before = {v.id: v.content for v in source.versions()}
    for skip in (0, 1, 3, 5, 8, 13, 21):
        s3_proxy.set(hitting(fault, skip=skip, times=9))
        try:
            source.replicate(target)
        except CkptStoreError:
            s3_proxy.set()
        s3_proxy.set()
        _assert_all_loads(target)
        assert {v.id: v.content for v in source.versions()} == before

    source.replicate(target)

    assert {v.id: v.content for v in target.versions()} == before
    assert target.runs()[0].head == source.runs()[0].head
    assert target.runs()[0].tags == source.runs()[0].tags
    assert target.verify().ok
    assert all(v.state == "replicated" for v in source.versions())
