"""The paced server of tests and benchmarks answers as S3 does to the requests that clients send."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from paced_s3 import Pace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks.paced import Paced, fastest, paced_server

_PART = 5 << 20


@pytest.fixture(scope="module", params=["Python", "C"])
def server(request: pytest.FixtureRequest) -> Iterator[Paced]:
    """Run each server, pacing nothing; without a compiler both are the one in Python."""
    with paced_server(Pace(), native=request.param == "C") as running:
        yield running


@pytest.fixture
def client(server: Paced) -> Any:  # noqa: ANN401 - boto3's
    """Return a client of boto3 that tries each request once; the server is empty."""
    server.pace(Pace())
    server.empty()
    return boto3.client(
        "s3",
        endpoint_url=server.environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106 - the server checks none
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


def _bytes(size: int, seed: int = 1) -> bytes:
    return bytes((seed * 7 + at * 31) % 251 for at in range(1 << 10)) * (size >> 10)


def test_ranges_of_a_multipart_upload(client: Any) -> None:  # noqa: ANN401
    """Parts come back in order of their numbers, across the borders of parts and blocks."""
    parts = [_bytes(_PART, 1), _bytes(_PART + 1024, 2), _bytes(3072, 3)]
    upload = client.create_multipart_upload(Bucket="b", Key="k")["UploadId"]
    named = []
    for number in (2, 1, 3):
        sent = client.upload_part(
            Bucket="b", Key="k", UploadId=upload, PartNumber=number, Body=parts[number - 1]
        )
        named.append({"PartNumber": number, "ETag": sent["ETag"]})
    named.sort(key=lambda part: part["PartNumber"])
    client.complete_multipart_upload(
        Bucket="b", Key="k", UploadId=upload, MultipartUpload={"Parts": named}
    )
    whole = b"".join(parts)
    assert client.get_object(Bucket="b", Key="k")["Body"].read() == whole
    assert client.head_object(Bucket="b", Key="k")["ContentLength"] == len(whole)
    for begin, end in ((0, 1), (_PART - 3, _PART + 9), (262_143, 2 * _PART + 2000)):
        answer = client.get_object(Bucket="b", Key="k", Range=f"bytes={begin}-{end - 1}")
        assert answer["Body"].read() == whole[begin:end]
    tail = client.get_object(Bucket="b", Key="k", Range="bytes=-100")
    assert tail["Body"].read() == whole[-100:]


def test_only_one_put_if_absent_wins(client: Any) -> None:  # noqa: ANN401
    """A PUT with ``If-None-Match: *`` is refused where an object is; a plain one replaces it."""
    client.put_object(Bucket="b", Key="k", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="b", Key="k", Body=b"second", IfNoneMatch="*")
    assert client.get_object(Bucket="b", Key="k")["Body"].read() == b"first"
    client.put_object(Bucket="b", Key="k", Body=b"third")
    client.copy_object(Bucket="b", Key="copy", CopySource={"Bucket": "b", "Key": "k"})
    client.delete_object(Bucket="b", Key="k")
    assert client.get_object(Bucket="b", Key="copy")["Body"].read() == b"third"


def test_listings_in_pages(client: Any) -> None:  # noqa: ANN401
    """Pages of a listing have every name once, in order; deleted ones and folders are as asked."""
    names = [f"a/{at:02d}" for at in range(7)] + ["a/deep/1", "a/deep/2", "b"]
    for name in names:
        client.put_object(Bucket="b", Key=name, Body=name.encode())
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="b", Prefix="a/", PaginationConfig={"PageSize": 4}
    )
    assert [item["Key"] for page in pages for item in page["Contents"]] == names[:9]
    cut = client.list_objects_v2(Bucket="b", Prefix="a/", Delimiter="/")
    assert [one["Prefix"] for one in cut["CommonPrefixes"]] == ["a/deep/"]
    client.delete_objects(Bucket="b", Delete={"Objects": [{"Key": name} for name in names[:8]]})
    left = client.list_objects_v2(Bucket="b")["Contents"]
    assert [item["Key"] for item in left] == ["a/deep/2", "b"]


def test_requests_above_the_limits_are_refused(server: Paced, client: Any) -> None:  # noqa: ANN401
    """More requests than a second's worth get 503 SlowDown, and are counted as such."""
    client.put_object(Bucket="b", Key="k", Body=b"data")
    server.pace(Pace(busy_rate=2.0))
    answers = []
    for _ in range(40):
        try:
            answers.append(client.get_object(Bucket="b", Key="k")["Body"].read())
        except ClientError as error:
            answers.append(error.response["Error"]["Code"])
    counts = server.counts()
    assert set(answers) == {b"data", "SlowDown"}
    assert counts["busy"] == answers.count("SlowDown")
    assert counts["kinds"] == {"get": 40}


def test_one_request_in_so_many_is_slow(server: Paced, client: Any) -> None:  # noqa: ANN401
    """The requests that are answered late are counted: one in ten of fifty are five."""
    client.put_object(Bucket="b", Key="k", Body=b"data")
    server.pace(Pace(slow_every=10, slow_s=0.001))
    for _ in range(50):
        client.head_object(Bucket="b", Key="k")
    assert server.counts()["slow"] == 5


def test_framed_bodies(server: Paced, client: Any) -> None:  # noqa: ANN401
    """A body in ``aws-chunked`` framing, with a checksum behind it, is stored without either."""
    data = _bytes(300 << 10)
    framed = b"".join(
        f"{len(piece):x};chunk-signature=0\r\n".encode() + piece + b"\r\n"
        for piece in (data[:1000], data[1000:])
    )
    framed += b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    line = http.client.HTTPConnection("127.0.0.1", server.port)
    told = {"Content-Encoding": "aws-chunked", "x-amz-decoded-content-length": str(len(data))}
    for name in ("one", "two"):  # the second shows that nothing of the first is left
        line.request("PUT", f"/b/{name}", body=framed, headers=told)
        answer = line.getresponse()
        answer.read()
        assert answer.status == 200
    line.close()
    assert client.get_object(Bucket="b", Key="two")["Body"].read() == data


def test_the_plain_loop_moves_what_it_says(server: Paced) -> None:
    """The loop that gives the bound sends and fetches all of its bytes, and leaves none."""
    server.pace(Pace())
    found = fastest(server, 32 << 20, threads=(2, 4))
    assert {what: [*rates] for what, rates in found.items()} == {"save": [2, 4], "load": [2, 4]}
    counts = server.counts()
    assert counts["received"] == counts["sent"] == 2 * (32 << 20)
    assert counts["kinds"] == {"put": 8, "get": 8}
