"""Packs go to S3 and Azure in parts: whole or not at all, and parts of dead writers go away."""

from __future__ import annotations

import os
from typing import Any

import pytest
from buckets import AzureBucket, S3Bucket
from faultproxy import Fault, FaultProxy, Kind

from ckptstore.backends.base import Backend, Leftovers
from ckptstore.backends.part_sender import SMALL_PART_BYTES
from ckptstore.backends.registry import open_backend
from ckptstore.errors import StorageError, StoragePermissionError

KEY = "packs/ab/00.pack"
DATA = os.urandom(2 * SMALL_PART_BYTES + 100)
NOW = 4e9


def _open(bucket: S3Bucket | AzureBucket, proxy: FaultProxy, **more: Any) -> Backend:  # noqa: ANN401
    return open_backend(bucket.url, **bucket.options(f"http://127.0.0.1:{proxy.port}"), **more)


def _put(backend: Backend, data: bytes = DATA) -> None:
    with backend.open_writer(KEY) as writer:
        writer.write(data)
        writer.commit()


@pytest.mark.parametrize("client", ["direct", "s3fs"])
def test_a_pack_is_one_upload_in_parts(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, client: str
) -> None:
    """Three parts, a beginning and an end; what fits into one part is one PUT; both read back."""
    puts = Fault(kind=Kind.DELAY, method="PUT", times=0)
    posts = Fault(kind=Kind.DELAY, method="POST", times=0)
    s3_proxy.set(puts, posts)
    backend = _open(s3_bucket, s3_proxy, client=client)
    _put(backend)
    assert (puts.seen, posts.seen) == (3, 2)
    assert s3_bucket.read(KEY) == DATA
    _put(backend, DATA[:SMALL_PART_BYTES])
    assert (puts.seen, posts.seen) == (4, 2)
    assert s3_bucket.read(KEY) == DATA[:SMALL_PART_BYTES]
    backend.close()


@pytest.mark.short(sample=6)
@pytest.mark.parametrize("kind", [Kind.LOST, Kind.STATUS_AFTER, Kind.STATUS, Kind.RESET])
@pytest.mark.parametrize(
    ("server", "method", "skip", "code"),
    [
        *(("s3", method, skip, "InternalError") for method in ("POST", "PUT") for skip in (0, 1)),
        *(("azure", "PUT", skip, "ServerBusy") for skip in (0, 3)),
    ],
)
def test_one_lost_answer_costs_nothing(
    request: pytest.FixtureRequest, server: str, kind: Kind, method: str, skip: int, code: str
) -> None:
    """Of the beginning, a part, a block, or the end, whether or not the server had done it."""
    bucket = request.getfixturevalue(f"{server}_bucket")
    proxy = request.getfixturevalue(f"{server}_proxy")
    proxy.set(Fault(kind=kind, method=method, skip=skip, code=code))
    backend = _open(bucket, proxy)
    _put(backend)
    assert bucket.read(KEY) == DATA
    backend.close()


@pytest.mark.parametrize(("method", "skip"), [("PUT", 1), ("POST", 1)])
def test_an_upload_that_the_storage_dropped_is_no_object(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, method: str, skip: int
) -> None:
    """An old upload may be aborted under its writer: the commit fails, and says why."""
    lost = Fault(kind=Kind.STATUS, method=method, skip=skip, times=0, code="NoSuchUpload")
    lost.status = 404
    s3_proxy.set(lost)
    backend = _open(s3_bucket, s3_proxy)
    with pytest.raises(StorageError, match="dropped"):
        _put(backend)
    assert s3_bucket.read(KEY) is None
    backend.close()


def test_uploads_of_dead_writers_are_removed(s3_bucket: S3Bucket, s3_proxy: FaultProxy) -> None:
    """The old ones of this store: not those of other prefixes and programs, nor young ones."""
    backend = _open(s3_bucket, s3_proxy)
    client, where = s3_bucket._client, s3_bucket.name
    prefix = s3_bucket.url.removeprefix(f"s3://{where}/")
    others = ["elsewhere/packs/c", f"{prefix}/backups/d"]
    for name in (f"{prefix}/packs/a", f"{prefix}/packs/b", *others):
        client.create_multipart_upload(Bucket=where, Key=name)
    assert backend.remove_leftovers(modified_before=1.0) == Leftovers()
    assert backend.remove_leftovers(modified_before=NOW, dry_run=True) == Leftovers(count=2)
    assert backend.remove_leftovers(modified_before=NOW) == Leftovers(count=2)
    assert backend.remove_leftovers(modified_before=NOW) == Leftovers()
    left = client.list_multipart_uploads(Bucket=where)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(others)
    backend.close()


def test_an_aborted_writer_leaves_no_upload(s3_bucket: S3Bucket, s3_proxy: FaultProxy) -> None:
    """Also when a part was refused for good; the refusal is what is raised."""
    refusal = Fault(kind=Kind.STATUS, method="PUT", times=0, status=403, code="AccessDenied")
    s3_proxy.set(refusal)
    backend = _open(s3_bucket, s3_proxy)
    with pytest.raises(StoragePermissionError):
        _put(backend)
    backend.close()  # waits for the threads
    assert "Uploads" not in s3_bucket._client.list_multipart_uploads(Bucket=s3_bucket.name)
    assert s3_bucket.read(KEY) is None


@pytest.mark.parametrize("status", [403, 501])
def test_uploads_that_may_not_be_listed_stay(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, status: int
) -> None:
    """Collections work without this right, and on servers without this request."""
    s3_proxy.set(Fault(kind=Kind.STATUS, method="GET", status=status, code="AccessDenied"))
    backend = _open(s3_bucket, s3_proxy)
    assert backend.remove_leftovers(modified_before=NOW) == Leftovers()
    backend.close()
