"""GCS through gcsfs keeps the contract, on fake-gcs-server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import GcsBucket

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance


class TestGcs(BackendConformance):
    """The server is another process; the side door is plain HTTP."""

    backend_name = "gcs"

    @pytest.fixture
    def backend(self, gcs_bucket: GcsBucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        self.bucket = gcs_bucket
        backend = open_backend(gcs_bucket.url, retry=False, **gcs_bucket.options())
        yield backend
        backend.close()

    def raw_read(self, key: str) -> bytes | None:
        """Read by HTTP."""
        return self.bucket.read(key)

    def raw_write(self, key: str, data: bytes) -> None:
        """Write by HTTP."""
        self.bucket.write(key, data)

    def raw_keys(self) -> set[str]:
        """List by HTTP."""
        return self.bucket.keys()
