"""A package outside ckptstore adds a backend in few lines, by the helpers that are promised."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import outside_backend
import pytest
from buckets import S3Bucket
from doors import BucketDoor
from local_servers import SECRET

import ckptstore
from ckptstore.backends import registry
from ckptstore.backends.base import Backend
from ckptstore.testing.answers import AnswerConformance
from ckptstore.testing.conformance import BackendConformance

LINES_MAX = 120
OPTIONS: dict[str, Any] = {
    "aws_access_key_id": "labaccess",
    "aws_secret_access_key": SECRET,
    "region_name": "us-east-1",
}


@pytest.mark.short(sample=1)
class TestOutsideBackend(BucketDoor, BackendConformance):
    """Through the shipped suite, on moto."""

    backend_name = "boto"
    secrets = (SECRET,)

    @pytest.fixture
    def backend(self, s3_bucket: S3Bucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket."""
        self.bucket = s3_bucket
        url = s3_bucket.url.replace("s3://", "boto://")
        backend = outside_backend.open_boto(url, endpoint_url=s3_bucket.endpoint_url, **OPTIONS)
        yield backend
        backend.close()


@pytest.mark.short(sample=3)
class TestOutsideAnswers(AnswerConformance):
    """Its answers too."""

    def backend_at(self, endpoint: str) -> Backend:
        """Open it on a server of the suite."""
        return outside_backend.open_boto("boto://bucket/store", endpoint_url=endpoint, **OPTIONS)


def test_it_is_short() -> None:
    """A whole backend, with its docstrings, fits into 120 lines."""
    assert outside_backend.__file__ is not None
    assert len(Path(outside_backend.__file__).read_text().splitlines()) < LINES_MAX


@pytest.mark.probes
def test_a_store_opens_by_the_entry_point(
    s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheme of an installed package opens stores, which its probe finds to be shareable."""
    point = metadata.EntryPoint("boto", "outside_backend:open_boto", registry.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group, name="": [point] * bool(name))
    url = s3_bucket.url.replace("s3://", "boto://")
    options = OPTIONS | {"endpoint_url": s3_bucket.endpoint_url}
    with ckptstore.open(url, create=True, **options) as store:
        store.run("gpt").save({"w": [1.0]}, step=1)
        assert store.repo.backend.name == "boto"
    with ckptstore.open(url, **options) as store:
        assert store.load("gpt@1") == {"w": [1.0]}
