"""Storage classes of Ceph's gateway: packs move to a second pool and back, and lose nothing.

Ceph copies an object onto itself to change its class, and deletes what it had before some hours
later. A copy within one class is where releases of it were seen to delete too much
(https://tracker.ceph.com/issues/70746); so that deletion is made to happen here, at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from buckets import PREFIX, S3Bucket
from labkit.systems import Ceph

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.backends.storage_classes import ColdStorage
from ckptstore.config import SYSTEM

_MIB = 1 << 20


def _classes(bucket: S3Bucket) -> dict[str, str]:
    listed = bucket._client.list_objects_v2(Bucket=bucket.name)["Contents"]
    return {item["Key"].removeprefix(PREFIX): item["StorageClass"] for item in listed}


@pytest.mark.parametrize("client", ["direct", "s3fs"])
def test_an_object_moves_and_stays_whole(ceph: Ceph, bucket: S3Bucket, client: str) -> None:
    """There and back, by either client, and after the gateway deleted what it had before."""
    data = bytes.fromhex(SYSTEM.random_hex(12 * _MIB))  # Ceph keeps 4 MiB with the name
    with _opened(bucket, client) as cold:
        key = "packs/aa/a.pack"
        bucket.write(key, data)
        for name in ("STANDARD_IA", "STANDARD"):
            assert cold.set_class(key, name)
            assert not cold.set_class(key, name)
            assert _classes(bucket)[key] == cold.restore_state(key).storage_class == name
            ceph.tell("collect")
            assert bucket.read(key) == data


def test_two_that_move_one_object_lose_nothing(ceph: Ceph, bucket: S3Bucket) -> None:
    """Both may copy it from where it was; neither within its new class."""
    data = bytes.fromhex(SYSTEM.random_hex(12 * _MIB))
    keys = [f"packs/aa/{number}.pack" for number in range(4)]
    with _opened(bucket) as one, _opened(bucket) as two, ThreadPoolExecutor(8) as pool:
        for key in keys:
            bucket.write(key, data)
        SYSTEM.sleep(1.1)  # times of objects have seconds, and are what tells them apart
        moves = [
            pool.submit(cold.set_class, key, "STANDARD_IA") for key in keys for cold in (one, two)
        ]
        assert sum(move.result() for move in moves) >= len(keys)
    ceph.tell("collect")
    for key in keys:
        assert bucket.read(key) == data
    assert {_classes(bucket)[key] for key in keys} == {"STANDARD_IA"}


def test_versions_move_to_a_class_and_load(ceph: Ceph, bucket: S3Bucket) -> None:
    """Exactly the packs of the named versions; all others and every record stay."""
    torch.manual_seed(5)
    states = {step: {"model": {"w": torch.randn(3 * _MIB)}} for step in (1, 2, 3)}
    with ckptstore.open(bucket.url, create=True, codec="raw", **bucket.options()) as store:
        run = store.run("gpt")
        for step, state in states.items():
            run.save(state, step=step)
        report = store.archive(["gpt@1", "gpt@2"], storage_class="STANDARD_IA")
        assert report.ok
        moved = {key for key, name in _classes(bucket).items() if name == "STANDARD_IA"}
        assert len(moved) == report.moved.count == 2
        assert all(key.startswith("packs/") for key in moved)
        ceph.tell("collect")
        assert store.thaw("gpt@1", wait=True).ready
        for step, state in states.items():
            assert torch.equal(store.load(f"gpt@{step}")["model"]["w"], state["model"]["w"])
        again = store.archive(["gpt@1", "gpt@2"], storage_class="STANDARD_IA")
        assert (again.moved.count, again.there.count) == (0, 2)
        assert store.archive(["gpt@1"], storage_class="STANDARD").moved.count == 1
        ceph.tell("collect")
        checked = store.verify()
        assert checked.ok
        assert checked.cold_packs_count == 0


def test_new_packs_are_written_in_a_class(bucket: S3Bucket) -> None:
    """Packs alone."""
    options: dict[str, Any] = bucket.options()
    with ckptstore.open(bucket.url, create=True, pack_class="STANDARD_IA", **options) as store:
        store.run("gpt").save({"w": torch.randn(_MIB)}, step=1)
        for key, name in _classes(bucket).items():
            assert name == ("STANDARD_IA" if key.startswith("packs/") else "STANDARD")
        assert store.verify().ok


class _opened:
    """What reaches the classes of a bucket, for the length of a block."""

    def __init__(self, bucket: S3Bucket, client: str = "direct") -> None:
        self._backend = open_backend(bucket.url, client=client, **bucket.options())

    def __enter__(self) -> ColdStorage:
        cold = self._backend.cold_storage()
        assert cold is not None
        return cold

    def __exit__(self, *_: object) -> None:
        self._backend.close()
