"""GCS through gcsfs keeps the contract, on fake-gcs-server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from buckets import GcsBucket
from doors import BucketDoor

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.answers import AnswerConformance
from ckptstore.testing.conformance import BackendConformance


class TestGcs(BucketDoor, BackendConformance):
    """The server is another process; the side door is plain HTTP."""

    backend_name = "gcs"

    @pytest.fixture
    def backend(self, gcs_bucket: GcsBucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        self.bucket = gcs_bucket
        backend = open_backend(gcs_bucket.url, retry=False, **gcs_bucket.options())
        yield backend
        backend.close()


@pytest.mark.short(sample=7)
class TestGcsAnswers(AnswerConformance):
    """Answers to gcsfs."""

    def backend_at(self, endpoint: str) -> Backend:
        """Open a bucket on a server of the suite."""
        options: dict[str, Any] = {"token": "anon", "endpoint_url": endpoint}
        return open_backend("gs://bucket/store", retry=False, **options)
