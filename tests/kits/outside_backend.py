"""A backend of a package outside ckptstore: buckets through boto3, under URLs ``boto://``.

It shows how little such a package needs: tests/conformance/test_outside_backend.py runs the suites
on it and counts its lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError
from botocore.exceptions import EndpointConnectionError as NotReachedError

from ckptstore import limits
from ckptstore.backends.base import Buffer, ObjectInfo, ObjectWriter, check_key
from ckptstore.backends.bucket import BucketBackend, CheckRange, Wait, parse_bucket_url
from ckptstore.backends.buffered_writer import BufferedWriter
from ckptstore.backends.httperrors import error_for_answer, error_for_silence
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.scatter import Scatter
from ckptstore.errors import CkptStoreError, CorruptObjectError, StorageError, TransientStorageError


class BotoBackend(BucketBackend[Any]):
    """The objects below one prefix of a bucket."""

    name = "boto"

    def open_writer(self, key: str) -> ObjectWriter:
        """Return a writer that collects in memory and sends one request."""
        check_key(key)
        return BufferedWriter(lambda body: self._upload(key, body.getvalue()))

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        body = self._call("get_object", f"get {key}", key)["Body"]
        data: bytes = self._run(f"get {key}", lambda _: body.read(bytes_max + 1))
        body.close()
        if len(data) > bytes_max:
            msg = f"{key} has more than the {bytes_max} bytes allowed"
            raise CorruptObjectError(msg)
        return data

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of an object."""
        found = self._call("head_object", f"stat {key}", key)
        return self._info(key, {**found, "Size": found["ContentLength"]})

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._call("delete_object", f"delete {key}", key)

    def close(self) -> None:
        """Close this process's connections."""
        if (client := self._client.take()) is not None:
            client.close()

    def _call(self, method: str, what: str, key: str, **more: object) -> Any:  # noqa: ANN401
        request = {"Bucket": self._location.bucket, "Key": self._location.object_name(key), **more}
        create = "IfNoneMatch" in more
        return self._run(what, lambda boto: getattr(boto, method)(**request), conditional=create)

    def _body(self, key: str, data: Buffer) -> bytes:
        return bytes(data)

    def _upload(
        self, key: str, body: bytes, *, conditional: bool = False, storage_class: str = ""
    ) -> None:
        more: dict[str, object] = {"IfNoneMatch": "*"} if conditional else {}
        self._call("put_object", f"put {key}", key, Body=body, **more)

    def _receive(
        self, key: str, span: str, buffers: Sequence[memoryview], check: CheckRange, _: Wait
    ) -> int:
        answer = self._call("get_object", f"get {key}", key, Range=span)
        check(answer.get("ContentRange", ""), answer["ContentLength"])
        scatter = Scatter(buffers)
        while data := self._run(f"get {key}", lambda _: answer["Body"].read(limits.STREAM_BYTES)):
            scatter.feed(data)
        return scatter.left

    def _page(
        self, what: str, prefix: str, after: str, token: str
    ) -> tuple[list[tuple[str, Mapping[str, Any]]], str]:
        ask = {"Bucket": self._location.bucket, "Prefix": prefix, "StartAfter": after}
        ask |= {"ContinuationToken": token} if token else {}
        page = self._run(what, lambda client: client.list_objects_v2(**ask))
        items = [(item["Key"], item) for item in page.get("Contents", ())]
        return items, page.get("NextContinuationToken", "")

    def _info(self, key: str, item: Mapping[str, Any]) -> ObjectInfo:
        modified_at = item["LastModified"].timestamp()
        return ObjectInfo(key=key, size_bytes=item["Size"], modified_at=modified_at)

    @staticmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> CkptStoreError:
        if isinstance(error, ClientError):
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            code = error.response["Error"].get("Code", "")
            return error_for_answer(status, code, what, conditional=conditional)
        if isinstance(error, NotReachedError | ConnectTimeoutError):
            return TransientStorageError(f"{what}: {type(error).__name__}")
        if isinstance(error, BotoCoreError):
            return error_for_silence(f"{what}: {type(error).__name__}", conditional=conditional)
        return StorageError(f"{what}: {error}", hint="check the storage options")


def _client(options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    settings = Config(retries={"total_max_attempts": 1}, max_pool_connections=32)
    return boto3.client("s3", config=settings, **options)


def open_boto(url: str, **options: object) -> BotoBackend:
    """Return the backend of ``boto://bucket/prefix``; `options` are those of ``boto3.client``."""
    return BotoBackend(parse_bucket_url(url), PerProcess(_client, options))
