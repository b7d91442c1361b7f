"""GCS through gcsfs keeps the contract, on fake-gcs-server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import GcsBucket, open_bucket
from doors import BucketDoor

from ckptstore.backends.base import Backend
from ckptstore.testing.answers import AnswerConformance
from ckptstore.testing.conformance import BackendConformance


class TestGcs(BucketDoor, BackendConformance):
    """The server is another process; the side door is plain HTTP."""

    backend_name = "gcs"
    thin = True

    @pytest.fixture
    def backend(self, gcs_bucket: GcsBucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        yield from self.opened(gcs_bucket, thin=self.thin)


@pytest.mark.short(sample=1)
class TestGcsByLibrary(TestGcs):
    """By gcsfs alone, which sends what the short path does not know."""

    thin = False


@pytest.mark.short(sample=7)
class TestGcsAnswers(AnswerConformance):
    """Answers to the short path, and to gcsfs for the other requests."""

    thin = True

    def backend_at(self, endpoint: str) -> Backend:
        """Open a bucket on a server of the suite."""
        options = {"token": "anon", "endpoint_url": endpoint}
        return open_bucket("gs://bucket/store", thin=self.thin, **options)


@pytest.mark.short(sample=1)
class TestGcsLibraryAnswers(TestGcsAnswers):
    """Answers to gcsfs alone."""

    thin = False
