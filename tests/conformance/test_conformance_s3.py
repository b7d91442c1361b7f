"""S3 keeps the contract, through either client, on moto; bodies are received in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from buckets import AzureBucket, S3Bucket, open_bucket
from doors import BucketDoor
from local_servers import SECRET

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.answers import AnswerConformance
from ckptstore.testing.conformance import BackendConformance


@pytest.mark.short(sample=2)
class TestS3(BucketDoor, BackendConformance):
    """By botocore alone. The server is another process; the side door is boto3."""

    backend_name = "s3"
    client = "direct"
    thin = True
    secrets = (SECRET, "labaccess")

    @pytest.fixture
    def backend(self, s3_bucket: S3Bucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        yield from self.opened(s3_bucket, thin=self.thin, client=self.client)


@pytest.mark.short(sample=1)
class TestS3ByLibrary(TestS3):
    """By botocore's client alone, which sends what the short path does not know."""

    thin = False


@pytest.mark.short(sample=1)
class TestS3ByS3fs(TestS3):
    """By s3fs, which takes over where it alone knows an option."""

    client = "s3fs"


@pytest.mark.short(sample=7)
class TestS3Answers(AnswerConformance):
    """Answers to botocore alone."""

    client = "direct"
    thin = True

    def backend_at(self, endpoint: str) -> Backend:
        """Open a bucket on a server of the suite."""
        options: dict[str, Any] = {"key": "labaccess", "secret": SECRET, "endpoint_url": endpoint}
        options |= {"client": self.client, "client_kwargs": {"region_name": "us-east-1"}}
        return open_bucket("s3://bucket/store", thin=self.thin, **options)


@pytest.mark.short(sample=1)
class TestS3LibraryAnswers(TestS3Answers):
    """Answers to botocore's client."""

    thin = False


@pytest.mark.short(sample=3)
class TestS3fsAnswers(TestS3Answers):
    """Answers to s3fs."""

    client = "s3fs"


@pytest.mark.parametrize(("server", "last"), [("s3", "stream"), ("azure", "read_chunked")])
def test_bytes_are_received_where_they_are_wanted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: str, last: str
) -> None:
    """No library in between takes the body into memory of its own: a later one might."""
    bucket: S3Bucket | AzureBucket = request.getfixturevalue(f"{server}_bucket")
    backend = open_backend(bucket.url, retry=False, **bucket.options())
    data = bytes(range(256)) * 40_000
    backend.put("a", data)

    def copied(*_: object, **__: object) -> None:
        pytest.fail("urllib3 copied the body")

    for name in ("read", "readinto", "read1", last):
        monkeypatch.setattr(urllib3.HTTPResponse, name, copied, raising=False)
    parts = [memoryview(bytearray(size)) for size in (64, 5_000_000, 0, 64, 3_000_000)]
    for _ in range(3):  # and the connection is good for another request
        backend.read_into("a", 1000, parts)
        assert b"".join(parts) == data[1000:8_001_128]
    backend.close()
