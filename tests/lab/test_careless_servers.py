"""S3 servers without create-if-absent must be found out before anybody relies on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.client import Config
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from labkit.peers import Peer, PeerError
from labkit.saving import Place, assert_kept, collect, start_writers
from labkit.systems import LabPool, Swift

from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.probe import probe
from ckptstore.backends.registry import open_backend


class CarelessServer:
    """Subclass, and give a fixture ``direct``: the place of a store in a bucket that is empty."""

    finding: PutIfAbsent
    """What the probe must find."""

    @pytest.fixture
    def proxy(self, direct: Place) -> Iterator[FaultProxy]:
        """Put a proxy that only counts in between."""
        port = urlsplit(direct.options["endpoint_url"]).port
        assert port
        with FaultProxy(port) as made:
            yield made

    @pytest.fixture
    def place(self, direct: Place, proxy: FaultProxy) -> Place:
        """Return the same place, through the proxy."""
        endpoint = {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        return Place(url=direct.url, options=direct.options | endpoint)

    @staticmethod
    def counted(proxy: FaultProxy, path: str) -> Fault:
        """Count the PUTs whose path holds `path` from now on."""
        counter = Fault(kind=Kind.DELAY, method="PUT", path=path, times=0)
        proxy.set(counter)
        return counter

    def test_probe_finds_it_out(self, direct: Place) -> None:
        """The probe says what this server does with conditions."""
        backend = open_backend(direct.url, **direct.options)
        try:
            report = probe(backend)
        finally:
            backend.close()
        assert report.put_if_absent is self.finding
        assert not report.passed

    def test_no_store_for_many_writers(self, place: Place, proxy: FaultProxy, saver: Peer) -> None:
        """Creating a store is refused, and nothing of a store is ever sent."""
        commits = self.counted(proxy, "/commits/")
        with pytest.raises(PeerError) as refused:
            start_writers(saver, place, [0], saves=1)[0].result()
        assert refused.value.kind == "unsafe_backend"
        assert commits.seen == 0
        found = saver.ask("check", **place.words(), acked={}, save=False)
        assert found == {"versions": 0, "commits": 0, "problems": []}

    def test_single_writer(self, place: Place, proxy: FaultProxy, saver: Peer) -> None:
        """With single_writer=True the store works; a second writer without it is refused.

        Not one write of the refused writer reaches the server, and readers are welcome.
        """
        alone = Place(url=place.url, options=place.options | {"single_writer": True})
        promises = collect(start_writers(saver, alone, [0], saves=3))
        assert promises.failed == []
        assert len(promises.acked) == 3
        writes = self.counted(proxy, "/")
        for _ in range(2):
            with pytest.raises(PeerError) as refused:
                start_writers(saver, place, [1], saves=1)[0].result()
            assert refused.value.kind == "unsafe_backend"
        assert writes.seen == 0
        found = assert_kept(saver, place, promises.acked, save=False)
        assert found["versions"] == found["commits"] == 3

    def test_single_writers_take_turns(self, place: Place, saver: Peer) -> None:
        """Single writers, one after the other, go on where the one before stopped."""
        alone = Place(url=place.url, options=place.options | {"single_writer": True})
        acked: dict[str, list[int]] = {}
        for writer in range(2):
            promises = collect(start_writers(saver, alone, [writer], saves=2))
            assert promises.failed == []
            acked |= promises.acked
        found = assert_kept(saver, alone, acked, save=False)
        assert found["versions"] == 4


class TestRclone(CarelessServer):
    """``rclone serve s3`` takes no notice of conditions and does not say so."""

    finding = PutIfAbsent.IGNORED

    @pytest.fixture
    def direct(self, careless_bucket: S3Bucket) -> Place:
        """Make a bucket on rclone."""
        return Place(url=careless_bucket.url, options=careless_bucket.options())


class TestSwift(CarelessServer):
    """Swift's s3api answers 501 to every conditional PUT."""

    finding = PutIfAbsent.REFUSED

    @pytest.fixture
    def direct(self, lab_pool: LabPool) -> Place:
        """Make a bucket on Swift through boto3."""
        options: dict[str, Any] = dict(lab_pool.get(Swift).options())
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        client = boto3.client(
            "s3", endpoint_url=options["endpoint_url"], aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"], region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip
        client.create_bucket(Bucket=name)
        client.close()
        options["client_kwargs"] = {"region_name": "us-east-1"}
        return Place(url=f"s3://{name}/store", options=options)
