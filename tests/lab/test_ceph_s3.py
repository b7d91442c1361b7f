"""S3 as Ceph's gateway speaks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import S3Bucket
from doors import BucketDoor
from labkit.peers import local_peer
from labkit.systems import Ceph
from labkit.two_clients import Clients, TwoClientTests
from local_servers import SECRET

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance


@pytest.fixture(scope="module")
def clients(ceph: Ceph) -> Iterator[Clients]:
    """Open one bucket in two processes."""
    program = "backend_peer.py"
    with (
        S3Bucket(ceph.options()["endpoint_url"]) as bucket,
        local_peer(program) as one,
        local_peer(program) as two,
    ):
        for peer in (one, two):
            peer.ask("open", url=bucket.url, options=bucket.options())
        yield one, two


class TestConformance(BucketDoor, BackendConformance):
    """The backend's contract on Ceph, by botocore alone; the side door is boto3."""

    backend_name = "s3"
    client = "direct"
    secrets = (SECRET, "labaccess")

    @pytest.fixture
    def backend(self, bucket: S3Bucket) -> Iterator[Backend]:
        """Open a prefix of a new bucket, without retries."""
        self.bucket = bucket
        options = bucket.options() | {"client": self.client}
        backend = open_backend(bucket.url, retry=False, **options)
        yield backend
        backend.close()


class TestConformanceByS3fs(TestConformance):
    """The same by s3fs."""

    client = "s3fs"


class TestTwoClients(TwoClientTests):
    """What two processes see of each other's objects."""

    race_rounds = 40
