"""SIGKILL in the middle of archive and thaw: running the command again is all that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import torch
from buckets import PREFIX, S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from local_servers import SECRET

import ckptstore

_VERSIONS = 10
_LOOKS = 30
"""How often moto is asked how far a restore is before it is done."""
_STILL_S = 3600.0
_PATIENCE_S = 120.0


@pytest.fixture
def options(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return storage options, without credentials: these are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "labaccess")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return {"endpoint_url": s3_bucket.endpoint_url}


@pytest.fixture
def bucket(s3_bucket: S3Bucket, options: dict[str, Any]) -> S3Bucket:
    """Return a bucket with a run whose versions have a pack each, but for the head."""
    with ckptstore.open(s3_bucket.url, create=True, codec="raw", **options) as store:
        run = store.run("gpt")
        for step in range(1, _VERSIONS + 1):
            run.save({"w": torch.full((70_000,), float(step))}, step=step)
        state = {f"m{step}": torch.full((40_000,), float(step)) for step in range(_VERSIONS)}
        for count in range(1, _VERSIONS + 1):  # a version of many packs
            part = dict(list(state.items())[:count])
            store.run("wide").save(part, step=count)
        store.run("wide").save({"w": torch.zeros(3)}, step=_VERSIONS + 1)
    return s3_bucket


@pytest.fixture
def restores(bucket: S3Bucket) -> Iterator[Callable[[int], None]]:
    """Return what says after how many looks moto takes a restore one step further."""
    api = f"{bucket.endpoint_url}/moto-api/state-manager"
    model: dict[str, Any] = {"model_name": "s3::keyrestore"}

    def after(looks: int) -> None:
        manual: dict[str, Any] = {"progression": "manual", "times": looks}
        requests.post(f"{api}/set-transition", json={**model, "transition": manual}, timeout=120)

    yield after
    requests.post(f"{api}/unset-transition", json=model, timeout=120)


def _command(url: str, port: int, *words: str) -> list[str]:
    endpoint = f"endpoint_url=http://127.0.0.1:{port}"
    program = "import sys; from ckptstore.cli.main import main; main()"
    return [sys.executable, "-c", program, *words, "--store", url, "--option", endpoint, "--json"]


def _run(url: str, port: int, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        _command(url, port, *words), capture_output=True, check=False, timeout=_PATIENCE_S
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _kill(command: list[str], when: Callable[[], bool]) -> None:
    """Run a command until something holds, then kill it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not when():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def _classes(bucket: S3Bucket) -> dict[str, str]:
    listed = bucket._client.list_objects_v2(Bucket=bucket.name)["Contents"]
    return {item["Key"].removeprefix(PREFIX): item["StorageClass"] for item in listed}


def _cold(bucket: S3Bucket) -> set[str]:
    return {key for key, name in _classes(bucket).items() if name == "GLACIER"}


def _restores_asked(bucket: S3Bucket, keys: set[str]) -> set[str]:
    heads = {key: bucket._client.head_object(Bucket=bucket.name, Key=PREFIX + key) for key in keys}
    return {key for key, head in heads.items() if "Restore" in head}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moved", [0, 5])
def test_a_killed_archive_is_finished_by_the_next(
    bucket: S3Bucket, options: dict[str, Any], s3_proxy: FaultProxy, moved: int
) -> None:
    """At each moment the store is whole; then exactly the packs of old versions are cold."""
    s3_proxy.set(
        Fault(kind=Kind.DELAY, method="PUT", path="/packs/", skip=moved, times=0, seconds=_STILL_S)
    )
    words = ("archive", "--run", "gpt", "--class", "GLACIER")
    command = _command(bucket.url, s3_proxy.port, *words)
    hung = s3_proxy._faults[0]
    _kill(command, lambda: len(_cold(bucket)) == moved and hung.hits > 0)
    with ckptstore.open(bucket.url, **options) as store:
        report = store.verify()
        assert report.ok
        assert report.cold_packs_count == moved
        assert len(store.versions("gpt")) == _VERSIONS
        assert store.load("gpt")["w"][0] == float(_VERSIONS)
    s3_proxy.set()
    done = _run(bucket.url, s3_proxy.port, *words)
    assert (done["moved"]["count"], done["there"]["count"]) == (_VERSIONS - 1 - moved, moved)
    assert len(_cold(bucket)) == _VERSIONS - 1
    again = _run(bucket.url, s3_proxy.port, *words)
    assert (again["moved"]["count"], again["there"]["count"]) == (0, _VERSIONS - 1)
    assert all(key.startswith("packs/") for key in _cold(bucket))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asked", [3, _VERSIONS])
def test_a_killed_thaw_is_finished_by_the_next(
    bucket: S3Bucket,
    options: dict[str, Any],
    s3_proxy: FaultProxy,
    restores: Callable[[int], None],
    asked: int,
) -> None:
    """Killed while it asks, or while it waits: the next asks for the rest, and for no more."""
    ref = f"wide@{_VERSIONS}"
    with ckptstore.open(bucket.url, **options) as store:
        store.archive(runs=["wide"], storage_class="GLACIER")
    cold = _cold(bucket)
    assert len(cold) == _VERSIONS
    restores(_LOOKS)
    for _ in range(_LOOKS):  # moto counts looks before the request, too
        _restores_asked(bucket, cold)
    s3_proxy.set(
        Fault(kind=Kind.DELAY, method="POST", path="/packs/", skip=asked, times=0, seconds=_STILL_S)
    )
    words = ("thaw", ref, "--wait", "--poll", "1s")
    hung = s3_proxy._faults[0]

    def there() -> bool:
        sent = hung.seen > min(asked, _VERSIONS - 1)  # before that, each look would count
        return sent and len(_restores_asked(bucket, cold)) == asked

    _kill(_command(bucket.url, s3_proxy.port, *words), there)
    counted = Fault(kind=Kind.DELAY, method="POST", path="/packs/", times=0, seconds=0.0)
    s3_proxy.set(counted)
    looked = _run(bucket.url, s3_proxy.port, "thaw", ref)
    assert looked["requested"]["count"] == _VERSIONS - asked == counted.seen
    assert looked["restoring"]["count"] == _VERSIONS
    restores(1)
    done = _run(bucket.url, s3_proxy.port, *words)
    assert done["ready"] is True
    assert counted.seen == _VERSIONS - asked
    with ckptstore.open(bucket.url, **options) as store:
        assert store.load(ref)[f"m{_VERSIONS - 1}"][0] == float(_VERSIONS - 1)


def test_lost_answers_and_refusals_are_survived(
    bucket: S3Bucket, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """A move whose answer is lost is not made twice; busy and broken servers are asked again."""
    through = {**options, "endpoint_url": f"http://127.0.0.1:{s3_proxy.port}"}
    s3_proxy.set(
        Fault(kind=Kind.LOST, method="PUT", path="/packs/", every=3, times=2),
        Fault(kind=Kind.STATUS_AFTER, method="PUT", path="/packs/", every=3, times=2, status=500),
        Fault(kind=Kind.STATUS, method="HEAD", path="/packs/", every=4, times=5, status=503),
        Fault(kind=Kind.RESET, method="POST", path="/packs/", times=2),
    )
    with ckptstore.open(bucket.url, **through) as store:
        report = store.archive(runs=["gpt"], storage_class="GLACIER")
        assert report.ok
        assert report.moved.count == len(_cold(bucket)) == _VERSIONS - 1
        assert store.thaw("gpt@1", wait=True, poll_s=0.05).ready
        assert store.load("gpt@1")["w"][0] == 1.0
