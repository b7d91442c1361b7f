"""Tiers whose cold store is S3 behind a network that is slow, faulty, or gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from badnetwork import KINDS, OFTEN, Hasty, hitting, named
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind

import ckptstore
from ckptstore import limits
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.errors import NotReplicatedError, VersionNotFoundError
from ckptstore.repo import create_on
from ckptstore.store import Store

_PATIENCE_S = 240.0
_ATTEMPTS_MAX = 20


def _state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((30_000,), float(step)), "b": torch.arange(40_000.0)}}


@pytest.fixture
def hot(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """Return a local store whose replica ``cold`` is a bucket behind the proxy."""
    monkeypatch.setattr(limits, "WRITE_BACK_PAUSE_S", 0.01)
    monkeypatch.setattr(limits, "WRITE_BACK_PAUSE_MAX_S", 0.05)
    options = s3_bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    bare = open_backend(s3_bucket.url, retry=False, client="direct", **options)
    backend = RetryingBackend(bare, environment=Hasty())
    cold = Store(create_on(backend, environment=Hasty(), chunk_bytes=1 << 16))
    store = ckptstore.open(
        tmp_path / "hot", create=True, chunk_bytes=1 << 16, replicas={"cold": cold}
    )
    url, store_id = s3_bucket.url, cold.info.store_id
    store.repo.log.append_any(lambda now: name_replica(now, name="cold", url=url, store=store_id))
    yield store
    s3_proxy.set()
    store.close()
    cold.close()


def _assert_loads(store: Store, step: int) -> None:
    found, wanted = store.load(f"gpt@{step}")["model"], _state(step)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def _wait(store: Store, step: int) -> None:
    """Wait until a version is in the replica, however many attempts that takes."""
    for _ in range(_ATTEMPTS_MAX):
        with contextlib.suppress(NotReplicatedError):
            assert store.wait_replicated(f"gpt@{step}", _PATIENCE_S).state == "replicated"
            return
    pytest.fail(f"{_ATTEMPTS_MAX} attempts failed")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_saves_do_not_wait_for_a_replica_that_is_slow(hot: Store, s3_proxy: FaultProxy) -> None:
    """With 2 s before each request, saves are durable while the first upload is under way."""
    events: list[tuple[str, int]] = []
    hot.observe(lambda event: events.append((event.kind, event.step)))
    s3_proxy.set(Fault(kind=Kind.DELAY, seconds=2.0, times=0))
    run = hot.run("gpt", write_back="cold")
    for step in range(5):
        run.save(_state(step), step=step)
    assert [kind for kind, _ in events] == ["durable"] * 5  # a replication takes five requests
    s3_proxy.set()
    for step in range(5):
        hot.wait_replicated(f"gpt@{step}", _PATIENCE_S)
    hot.evict(replica="cold", keep="last 1")
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    s3_proxy.set(Fault(kind=Kind.DELAY, seconds=2.0, times=4))
    for step in range(5):
        _assert_loads(hot, step)


@pytest.mark.short("lost-503")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", OFTEN, ids=named)
def test_a_faulty_network_is_overcome(hot: Store, s3_proxy: FaultProxy, fault: Fault) -> None:
    """A third of the requests hit: write-back and loads come through."""
    run = hot.run("gpt", write_back="cold")
    often = hitting(fault, every=3)
    s3_proxy.set(often)
    for step in range(3):
        run.save(_state(step), step=step)
    for step in range(3):
        _wait(hot, step)
    hot.evict(replica="cold", keep="last 1")
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    s3_proxy.set(Fault(kind=Kind.CUT, every=3, times=0))
    for step in range(3):
        _assert_loads(hot, step)
    assert often.hits > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", KINDS, ids=named)
def test_whatever_befalls_it_write_back_goes_on(
    hot: Store, s3_bucket: S3Bucket, s3_proxy: FaultProxy, fault: Fault
) -> None:
    """As many faults in a row as retries do not overcome: what shows loads, and all comes.

    A save never fails by it. Nobody has to do a thing but wait once more.
    """
    run = hot.run("gpt", write_back="cold")
    places = (0, 1, 3, 5, 8, 13, 21)
    for step, skip in enumerate(places):
        s3_proxy.set(hitting(fault, skip=skip, times=9))
        version = run.save(_state(step), step=step)
        with contextlib.suppress(NotReplicatedError):
            hot.wait_replicated(version, _PATIENCE_S)
        with ckptstore.open(s3_bucket.url, read_only=True, **s3_bucket.options()) as cold:
            for shown in cold.versions():
                _assert_loads(cold, shown.step)
    s3_proxy.set()
    for step in range(len(places)):
        _wait(hot, step)
    assert all(version.state == "replicated" for version in hot.versions())
    with ckptstore.open(s3_bucket.url, read_only=True, **s3_bucket.options()) as cold:
        assert cold.verify().ok
        assert {v.id: v.content for v in cold.versions()} == {
            v.id: v.content for v in hot.versions()
        }


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_replica_that_is_gone(hot: Store, s3_proxy: FaultProxy) -> None:
    """Saves go on, waiting is loud, loads of what is here work, others say both reasons."""
    run = hot.run("gpt", write_back="cold")
    hot.wait_replicated(run.save(_state(1), step=1), _PATIENCE_S)
    hot.wait_replicated(run.save(_state(2), step=2), _PATIENCE_S)
    hot.evict(["gpt@1"], replica="cold")
    s3_proxy.set(Fault(kind=Kind.RESET, times=0))
    version = run.save(_state(3), step=3)
    _assert_loads(hot, 2)
    with pytest.raises(VersionNotFoundError, match=r"only the record .*replica 'cold'") as caught:
        hot.load("gpt@1")
    assert "try again when" in caught.value.hint
    with pytest.raises(NotReplicatedError, match="not in replica 'cold' yet"):
        hot.wait_replicated(version)
    s3_proxy.set()
    assert hot.wait_replicated(version, _PATIENCE_S).state == "replicated"
    _assert_loads(hot, 1)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_threads_load_from_a_bucket_at_once(hot: Store) -> None:
    """Many threads, whole versions and slices, of what only the bucket has."""
    run = hot.run("gpt")
    for step in range(4):
        run.save(_state(step), step=step)
    hot.replicate("replica:cold")
    hot.evict(replica="cold", keep="last 1")
    hot.gc(grace_s=0.0, orphan_age_s=0.0)
    failures: list[BaseException] = []

    def load(turn: int) -> None:
        try:
            _assert_loads(hot, turn % 4)
            part = hot.version(f"gpt@{turn % 3}")["model.w"][100:200]
            assert torch.equal(part, torch.full((100,), float(turn % 3)))
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=load, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
