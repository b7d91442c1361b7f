"""Replication to S3 behind a network that resets, loses and cuts: a repetition finishes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SystemEnvironment
from ckptstore.errors import CkptStoreError
from ckptstore.repo import create_on

STEPS = (1, 2, 3)
KINDS = [
    Fault(kind=Kind.RESET),
    Fault(kind=Kind.LOST),
    Fault(kind=Kind.CUT),
    Fault(kind=Kind.STATUS),
    Fault(kind=Kind.STATUS, status=500, code="InternalError"),
    Fault(kind=Kind.STATUS, status=403, code="AccessDenied"),
    Fault(kind=Kind.STATUS_AFTER),
    Fault(kind=Kind.STATUS_AFTER, status=500, code="InternalError"),
]


class _Hasty(SystemEnvironment):
    """Waits no time."""

    def sleep(self, seconds: float) -> None:
        """Return at once."""


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((30_000,), float(step)), "b": torch.arange(40_000.0)}}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> ckptstore.Store:
    """Return a store in memory with a history."""
    backend = MemoryBackend(f"faulty-replication/{request.node.nodeid}")
    store = ckptstore.Store(create_on(backend, chunk_bytes=1 << 16))
    run = store.run("gpt", metrics={"loss": "min"})
    for step in STEPS:
        run.save(_state(step), step=step, metrics={"loss": 1 / step}, tags=[f"t{step}"])
    return store


@pytest.fixture
def reaching(s3_bucket: S3Bucket, s3_proxy: FaultProxy) -> Iterator[Backend]:
    """Return a backend that reaches a bucket through the proxy."""
    options = s3_bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    backend = open_backend(s3_bucket.url, retry=False, client="direct", **options)
    yield RetryingBackend(backend, environment=_Hasty())
    s3_proxy.set()
    backend.close()


@pytest.mark.parametrize("fault", KINDS, ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_a_repetition_finishes(
    source: ckptstore.Store, reaching: Backend, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """Whatever befalls requests in a row: what shows loads, the source is as it was, a run ends it.

    Single faults are overcome by retries; as many as here are often not.
    """
    target = ckptstore.Store(create_on(reaching, environment=_Hasty(), chunk_bytes=1 << 16))
    before = {v.id: v.content for v in source.versions()}
    for skip in (0, 1, 3, 5, 8, 13, 21):
        s3_proxy.set(
            Fault(kind=fault.kind, skip=skip, times=9, status=fault.status, code=fault.code)
        )
        try:
            source.replicate(target)
        except CkptStoreError:
            s3_proxy.set()
        s3_proxy.set()
        for version in target.versions():
            if version.level != "record":
                loaded = target.load(f"#{version.id}")["model"]
                meant = _state(version.step)["model"]
                assert all(torch.equal(loaded[name], tensor) for name, tensor in meant.items())
        assert {v.id: v.content for v in source.versions()} == before

    source.replicate(target)

    assert {v.id: v.content for v in target.versions()} == before
    assert target.runs()[0].head == source.runs()[0].head
    assert target.runs()[0].tags == source.runs()[0].tags
    assert target.verify().ok
    assert all(v.state == "replicated" for v in source.versions())
