"""Publications in buckets: browsers show the page, and readers need no client of the storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests
import torch
from buckets import PREFIX, AzureBucket, GcsBucket, S3Bucket

import ckptstore
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a local store of two versions."""
    store = ckptstore.open(tmp_path / "store", create=True)
    for step in (1, 2):
        store.run("gpt").save({"w": torch.full((70_000,), float(step))}, step=step)
    return store


def _publish(store: Store, bucket: S3Bucket | GcsBucket | AzureBucket) -> None:
    with ckptstore.open(bucket.url, create=True, **bucket.options()) as target:
        for _ in range(2):  # the second replaces both files
            assert store.publish(target, ["gpt@2"]).versions_count == 1


def test_s3(store: Store, s3_bucket: S3Bucket) -> None:
    """A copy on S3 is read by plain HTTP, and its page is one."""
    _publish(store, s3_bucket)
    anyone = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject", "s3:HeadObject"],  # of these, AWS needs the first alone
        "Resource": f"arn:aws:s3:::{s3_bucket.name}/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [anyone]})
    s3_bucket._client.put_bucket_policy(Bucket=s3_bucket.name, Policy=policy)
    url = f"{s3_bucket.endpoint_url}/{s3_bucket.name}/{PREFIX.rstrip('/')}"
    page = requests.get(f"{url}/index.html", timeout=120)
    assert page.headers["Content-Type"].startswith("text/html")
    assert "gpt@2" in page.text
    with ckptstore.open(url) as web:
        assert [one.step for one in web.versions()] == [2]
        assert web.load("gpt@2")["w"][5] == 2.0


def test_gcs(store: Store, gcs_bucket: GcsBucket) -> None:
    """A copy on GCS is read by plain HTTP, and its page is one."""
    _publish(store, gcs_bucket)
    url = f"{gcs_bucket.endpoint_url}/{gcs_bucket.name}/{PREFIX.rstrip('/')}"
    page = requests.get(f"{url}/index.html", timeout=120)
    assert page.headers["Content-Type"].startswith("text/html")
    with ckptstore.open(url) as web:
        assert web.load("gpt@2")["w"][5] == 2.0


def test_azure(store: Store, azure_bucket: AzureBucket) -> None:
    """The page of a copy on Azure is one."""
    _publish(store, azure_bucket)
    page = azure_bucket._call("HEAD", f"/{PREFIX}index.html?")
    assert page.headers["Content-Type"].startswith("text/html")
