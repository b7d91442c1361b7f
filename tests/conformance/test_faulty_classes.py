"""Archive and thaw on S3 behind a network that resets, loses, cuts and is slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from badnetwork import KINDS, OFTEN, SLOW, Hasty, hitting, named
from buckets import PREFIX, S3Bucket
from faultproxy import Fault, FaultProxy, Kind

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.errors import CkptStoreError, ColdObjectError
from ckptstore.repo import open_on

_VERSIONS = 6
_PLACES = (0, 1, 4, 9, 16)
_POLL_S = 0.01


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"w": torch.full((30_000,), float(step))},
        "optimizer": {"m": torch.full((40_000,), -float(step))},
    }


@pytest.fixture
def bucket(s3_bucket: S3Bucket) -> S3Bucket:
    """Return a bucket with a run whose versions have packs of their own."""
    with _past_the_proxy(s3_bucket, create=True) as store:
        run = store.run("gpt")
        for step in range(1, _VERSIONS + 1):
            run.save(_state(step), step=step)
    return s3_bucket


@pytest.fixture
def through(bucket: S3Bucket, s3_proxy: FaultProxy) -> Iterator[ckptstore.Store]:
    """Return the store as it is reached through the proxy."""
    options = bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    bare = open_backend(bucket.url, retry=False, **options)
    repo = open_on(RetryingBackend(bare, environment=Hasty()), environment=Hasty())
    with ckptstore.Store(repo) as store:
        yield store
        s3_proxy.set()


def _past_the_proxy(bucket: S3Bucket, *, create: bool = False) -> ckptstore.Store:
    return ckptstore.open(bucket.url, create=create, codec="raw", **bucket.options())


def _cold(bucket: S3Bucket) -> set[str]:
    listed = bucket._client.list_objects_v2(Bucket=bucket.name)["Contents"]
    return {one["Key"].removeprefix(PREFIX) for one in listed if one["StorageClass"] == "GLACIER"}


def _asked(bucket: S3Bucket) -> set[str]:
    """Return the packs whose restore somebody has asked for."""
    heads = {
        key: bucket._client.head_object(Bucket=bucket.name, Key=PREFIX + key)
        for key in _cold(bucket)
    }
    return {key for key, head in heads.items() if "Restore" in head}


def _assert_whole(bucket: S3Bucket) -> None:
    """Hold that nothing is lost: every version loads, or says that it is cold."""
    with _past_the_proxy(bucket) as store:
        assert store.verify().ok
        versions = store.versions()
        assert [version.step for version in versions] == list(range(1, _VERSIONS + 1))
        for version in versions:
            with contextlib.suppress(ColdObjectError):
                _assert_same(store.load(f"#{version.id}"), version.step)


def _assert_same(found: dict[str, dict[str, torch.Tensor]], step: int) -> None:
    for part, tensors in _state(step).items():
        for name, tensor in tensors.items():
            assert torch.equal(found[part][name], tensor)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [*OFTEN, SLOW], ids=named)
def test_every_few_requests(
    through: ckptstore.Store, bucket: S3Bucket, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """A third of all requests hit: one run of archive and of thaw is enough, and does no more."""
    often = hitting(fault, every=13 if fault is SLOW else 3)
    s3_proxy.set(often)
    report = through.archive(runs=["gpt"], storage_class="GLACIER")
    assert report.ok
    assert report.moved.count == len(_cold(bucket)) > 0
    with pytest.raises(ColdObjectError):
        through.load("gpt@1")

    thawed = through.thaw("gpt@1", roles=["weights"], wait=True, poll_s=_POLL_S)
    assert thawed.ready
    asked = _asked(bucket)
    assert len(asked) == thawed.packs.count < len(_cold(bucket))
    assert torch.equal(through.version("gpt@1")["model.w"][:], _state(1)["model"]["w"])
    for step in range(1, _VERSIONS):
        assert through.thaw(f"gpt@{step}", wait=True, poll_s=_POLL_S).ready
        _assert_same(through.load(f"gpt@{step}"), step)
    s3_proxy.set()
    assert often.hits >= 3
    _assert_whole(bucket)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", KINDS, ids=named)
@pytest.mark.slow
def test_a_repetition_finishes(
    through: ckptstore.Store, bucket: S3Bucket, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """Nine faults in a row, at many places: nothing is lost, and the next run does the rest.

    What an interrupted run moved or asked for is not moved or asked for again.
    """
    for skip in _PLACES:
        s3_proxy.set(hitting(fault, skip=skip, times=9))
        with contextlib.suppress(CkptStoreError):
            through.archive(runs=["gpt"], storage_class="GLACIER")
        s3_proxy.set()
        _assert_whole(bucket)
    already = _cold(bucket)
    done = through.archive(runs=["gpt"], storage_class="GLACIER")
    assert done.ok
    assert (done.there.count, done.moved.count) == (len(already), len(_cold(bucket) - already))
    with _past_the_proxy(bucket) as store, pytest.raises(ColdObjectError):
        store.load("gpt@1")

    for skip in _PLACES:
        s3_proxy.set(hitting(fault, skip=skip, times=9))
        with contextlib.suppress(CkptStoreError):
            through.thaw("gpt@1", wait=True, poll_s=_POLL_S)
        s3_proxy.set()
        _assert_whole(bucket)
    requests = Fault(kind=Kind.DELAY, method="POST", path="/packs/", times=0)
    asked = _asked(bucket)
    s3_proxy.set(requests)
    assert through.thaw("gpt@1", wait=True, poll_s=_POLL_S).ready
    assert requests.seen == len(_asked(bucket) - asked)
    _assert_same(through.load("gpt@1"), 1)
