"""Side doors to buckets: other clients than those under test."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Self
from urllib.parse import quote
from xml.etree import ElementTree as ET

import boto3
import botocore.session
import requests
from azure.storage.blob import ResourceTypes, generate_account_sas
from botocore.client import Config
from botocore.exceptions import ClientError
from local_servers import AZURE_ACCOUNT, AZURE_KEY, SECRET

from ckptstore.backends.azure import AzureBackend
from ckptstore.backends.base import Backend
from ckptstore.backends.gcs import GcsBackend
from ckptstore.backends.registry import open_backend
from ckptstore.backends.s3 import S3Backend
from ckptstore.backends.s3_direct import DirectCalls
from ckptstore.backends.web import WebBackend

__all__ = ["PREFIX", "AzureBucket", "GcsBucket", "S3Bucket", "open_bucket", "without_thin_path"]

PREFIX = "some/Place/"
"""Prefix of the tested store in a bucket; upper case, which keys may not have."""

# Each client reads its service's description anew otherwise, for 0.2 s.
botocore.session.create_loader = cache(botocore.session.create_loader)


@cache
def _client(endpoint_url: str) -> Any:  # noqa: ANN401 - boto3 makes its classes at run time
    """Return one client per server: making one takes boto3 0.3 s."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id="labaccess",
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def _no_answer(*_: object) -> None:
    """Leave a request to the library."""


def without_thin_path(backend: Backend) -> None:
    """Have the library of a backend's service send all requests in this process."""
    if isinstance(backend, GcsBackend):
        vars(backend)["_send_thin"] = _no_answer
        return
    if isinstance(backend, WebBackend):
        backend._client.get().thin = False
        return
    if isinstance(backend, AzureBackend):
        client = backend._client.get()
        vars(client._config.transport.session.get_adapter(client.url))["direct"] = False
        return
    assert isinstance(backend, S3Backend)
    calls = backend._client.get()
    assert isinstance(calls, DirectCalls)
    calls._thin = None


def open_bucket(url: str, *, thin: bool = True, **options: Any) -> Backend:  # noqa: ANN401
    """Open a backend without retries; unless `thin`, the library sends all requests."""
    backend = open_backend(url, retry=False, **options)
    if not thin:
        without_thin_path(backend)
    return backend


class _Bucket:
    """A new bucket of a server, and its URL."""

    scheme = ""

    def __init__(self, endpoint_url: str) -> None:
        self.endpoint_url = endpoint_url
        self.name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.url = f"{self.scheme}://{self.name}/{PREFIX.rstrip('/')}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the server forgets the bucket when it ends."""


class _HttpBucket(_Bucket):
    """A bucket through plain HTTP."""

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self._session = requests.Session()

    def _url(self, path: str) -> str:
        return self.endpoint_url + path

    def _call(self, method: str, path: str, **request: Any) -> requests.Response:  # noqa: ANN401
        answer = self._session.request(method, self._url(path), timeout=120, **request)
        answer.raise_for_status()
        return answer

    def _read(self, path: str) -> bytes | None:
        """Return the content at a path, or None if there is none."""
        answer = self._session.get(self._url(path), timeout=120)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.content

    def __exit__(self, *_: object) -> None:
        self._session.close()


class S3Bucket(_Bucket):
    """A bucket through boto3, whose client is shared."""

    scheme = "s3"

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self._client = _client(endpoint_url)
        self._client.create_bucket(Bucket=self.name)

    def options(self, endpoint_url: str = "") -> dict[str, Any]:
        """Return storage options for the backend under test, perhaps through a proxy."""
        return {
            "key": "labaccess",
            "secret": SECRET,
            "endpoint_url": endpoint_url or self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def chain(self) -> dict[str, str]:
        """Return the credentials as variables of the environment, as a user would set them."""
        return {
            "AWS_ACCESS_KEY_ID": "labaccess",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def read(self, key: str) -> bytes | None:
        """Return the stored bytes, or None if there is no object."""
        try:
            answer = self._client.get_object(Bucket=self.name, Key=PREFIX + key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise
        data: bytes = answer["Body"].read()
        return data

    def write(self, key: str, data: bytes) -> None:
        """Store an object."""
        self._client.put_object(Bucket=self.name, Key=PREFIX + key, Body=data)

    def keys(self) -> set[str]:
        """Return the keys of all objects; none may lie outside the prefix."""
        found = set()
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name):
            for item in page.get("Contents", ()):
                assert item["Key"].startswith(PREFIX)
                found.add(item["Key"].removeprefix(PREFIX))
        return found


class GcsBucket(_HttpBucket):
    """A bucket through plain HTTP."""

    scheme = "gs"

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self._call("POST", "/storage/v1/b", json={"name": self.name})

    def options(self, endpoint_url: str = "") -> dict[str, Any]:
        """Return storage options for the backend under test, perhaps through a proxy."""
        return {"token": "anon", "endpoint_url": endpoint_url or self.endpoint_url}

    def read(self, key: str) -> bytes | None:
        """Return the stored bytes, or None if there is no object."""
        return self._read(f"/storage/v1/b/{self.name}/o/{quote(PREFIX + key, safe='')}?alt=media")

    def write(self, key: str, data: bytes) -> None:
        """Store an object."""
        path = f"/upload/storage/v1/b/{self.name}/o?uploadType=media"
        self._call("POST", f"{path}&name={quote(PREFIX + key, safe='')}", data=data)

    def keys(self) -> set[str]:
        """Return the keys of all objects; none may lie outside the prefix."""
        items = self._call("GET", f"/storage/v1/b/{self.name}/o").json().get("items", [])
        assert all(item["name"].startswith(PREFIX) for item in items)
        return {item["name"].removeprefix(PREFIX) for item in items}


class AzureBucket(_HttpBucket):
    """A container through plain HTTP, by a SAS token."""

    scheme = "az"

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self._token = self.token("rwdlc")
        self._call("PUT", "?restype=container")

    def options(self, endpoint_url: str = "") -> dict[str, Any]:
        """Return storage options for the backend under test, perhaps through a proxy."""
        return {"connection_string": self._line(endpoint_url, f"AccountKey={AZURE_KEY}")}

    def limited(self, rights: str) -> dict[str, Any]:
        """Return storage options with only some rights: r(ead), w(rite), d(elete), l(ist) ..."""
        return {"connection_string": self._line("", f"SharedAccessSignature={self.token(rights)}")}

    def chain(self) -> dict[str, str]:
        """Return the credentials as variables of the environment, as a user would set them."""
        return {"AZURE_STORAGE_CONNECTION_STRING": self.options()["connection_string"]}

    def token(self, rights: str) -> str:
        """Return a SAS token of the account with some rights."""
        return generate_account_sas(
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            resource_types=ResourceTypes(container=True, object=True),
            permission=rights,
            expiry=datetime.now(UTC) + timedelta(hours=6),
        )

    def read(self, key: str) -> bytes | None:
        """Return the stored bytes, or None if there is no object."""
        return self._read(f"/{quote(PREFIX + key)}?")

    def write(self, key: str, data: bytes, **headers: str) -> None:
        """Store an object."""
        headers = {"x-ms-blob-type": "BlockBlob", **headers}
        self._call("PUT", f"/{quote(PREFIX + key)}?", data=data, headers=headers)

    def tiers(self) -> dict[str, str]:
        """Return the access tier of every object; none may lie outside the prefix."""
        found: dict[str, str] = {}
        marker = ""
        while True:
            answer = self._call("GET", f"?restype=container&comp=list&marker={quote(marker)}")
            page = ET.fromstring(answer.content)  # noqa: S314 - of our own server
            for blob in page.iter("Blob"):
                name = blob.findtext("Name", "")
                assert name.startswith(PREFIX)
                found[name.removeprefix(PREFIX)] = blob.findtext("Properties/AccessTier", "")
            if not (marker := page.findtext("NextMarker", "")):
                return found

    def keys(self) -> set[str]:
        """Return the keys of all objects; none may lie outside the prefix."""
        return set(self.tiers())

    def _line(self, endpoint_url: str, credential: str) -> str:
        endpoint = f"{endpoint_url or self.endpoint_url}/{AZURE_ACCOUNT}"
        return f"AccountName={AZURE_ACCOUNT};{credential};BlobEndpoint={endpoint}"

    def _url(self, path: str) -> str:
        return f"{self.endpoint_url}/{AZURE_ACCOUNT}/{self.name}{path}&{self._token}"
