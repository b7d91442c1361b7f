"""S3 through s3fs keeps the contract, on moto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import S3Bucket
from local_servers import SECRET

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance


class TestS3(BackendConformance):
    """The server is another process; the side door is boto3."""

    backend_name = "s3"
    secrets = (SECRET, "labaccess")

    @pytest.fixture
    def backend(self, s3_bucket: S3Bucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        self.bucket = s3_bucket
        backend = open_backend(s3_bucket.url, retry=False, **s3_bucket.options())
        yield backend
        backend.close()

    def raw_read(self, key: str) -> bytes | None:
        """Read by boto3."""
        return self.bucket.read(key)

    def raw_write(self, key: str, data: bytes) -> None:
        """Write by boto3."""
        self.bucket.write(key, data)

    def raw_keys(self) -> set[str]:
        """List by boto3."""
        return self.bucket.keys()
