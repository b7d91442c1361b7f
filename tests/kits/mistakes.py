"""Mistakes that users make with storage, each a function that makes it and raises.

``CASES`` has them by storage; a function takes the :class:`Place` that its storage offers.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import requests
from botocore.client import Config
from buckets import AzureBucket
from local_servers import SECRET, Server
from webserver import Headers, Reply, Request, WebServer

import ckptstore

__all__ = ["CASES", "PLACES", "Case", "Place"]

NOWHERE = "http://127.0.0.1:9"
_NOBODY = 65534
_OTHER = "AKIAOFSOMEBODYELSE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A storage with a store in it."""

    url: str
    """Of the store."""
    free: str
    """Of a place where a store could be created."""
    missing: str
    """Of a place in a bucket or container that does not exist."""
    options: Mapping[str, Any]
    """With which everything is allowed."""
    reader: Mapping[str, Any]
    """With which nothing may be written."""
    writer: Mapping[str, Any]
    """With which nothing may be listed; of a web server, with which it ignores ranges."""


Case = Callable[[Place], None]


def _opened(url: str, *, create: bool = False, **options: Any) -> None:  # noqa: ANN401
    with ckptstore.open(url, create=create, **options) as store:
        store.run("gpt").versions()


def _with(changes: Mapping[str, object]) -> Case:
    """Return the case of opening the store with other options; None removes one."""

    def case(place: Place) -> None:
        options = {**place.options, **changes}
        _opened(place.url, **{name: value for name, value in options.items() if value is not None})

    return case


def _with_line(name: str, value: str) -> Case:
    """Return the case of opening the store with another value in Azure's connection string."""

    def case(place: Place) -> None:
        parts = dict(part.split("=", 1) for part in place.options["connection_string"].split(";"))
        line = ";".join(f"{one}={text}" for one, text in {**parts, name: value}.items())
        _opened(place.url, connection_string=line)

    return case


def _missing(place: Place) -> None:
    _opened(place.missing, create=True, **place.options)


def _unknown_store(place: Place) -> None:
    _opened(place.free, **place.options)


def _save(place: Place) -> None:
    with ckptstore.open(place.url, **place.reader) as store:
        store.run("gpt").save({"w": [2.0]}, step=2)


def _load(place: Place) -> None:
    """Load from a server that sends whole files to this user."""
    with ckptstore.open(place.url, **place.writer) as store:
        store.load("gpt@1")


def _list(place: Place) -> None:
    _opened(place.url, **place.writer)


def _with_modes(mode: int, user: Case, place: Place) -> None:
    """Call while the store's folders have a mode, as somebody whom it binds."""
    folders = [Path(place.url), *(path for path in Path(place.url).rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(mode)
    try:
        with _nobody():
            user(place)
    finally:
        for folder in folders:
            folder.chmod(0o755)


_OBJECTS: dict[str, Case] = {
    "no such bucket": _missing,
    "no store there": _unknown_store,
    "no right to write": _save,
    "no right to list": _list,
}

CASES: dict[str, dict[str, Case]] = {
    "s3": {
        "wrong key": _with({"key": _OTHER}),
        "wrong secret": _with({"secret": _OTHER}),
        "no credentials": _with({"key": None, "secret": None}),
        "misspelt option": _with({"endpont_url": "x"}),
        "server away": _with({"endpoint_url": NOWHERE}),
        **_OBJECTS,
    },
    "gs": {
        "no credentials": _with({"token": "google_default"}),
        "missing key file": _with({"token": "no-such-key.json"}),
        "misspelt option": _with({"endpont_url": "x"}),
        "server away": _with({"endpoint_url": NOWHERE}),
        "no such bucket": _missing,
        "no store there": _unknown_store,
    },
    "az": {
        "wrong key": _with_line("AccountKey", _OTHER.ljust(88, "=")),
        "no credentials": _with({"connection_string": None, "account_name": "devstoreaccount1"}),
        "misspelt option": _with({"acount_key": "x"}),
        "server away": _with_line("BlobEndpoint", f"{NOWHERE}/devstoreaccount1"),
        **_OBJECTS,
    },
    "http": {
        "wrong password": _with({"password": _OTHER}),
        "no credentials": _with({"username": None, "password": None}),
        "misspelt option": _with({"pasword": "x"}),
        "server away": _missing,
        "no store there": _unknown_store,
        "no right to write": _save,
        "server without ranges": _load,
    },
    "a folder": {
        "misspelt option": _with({"endpont_url": "x"}),
        "no store there": _unknown_store,
        "no right to write": partial(_with_modes, 0o555, _save),
        "no right to list": partial(_with_modes, 0o311, _list),
    },
}
"""Mistakes by storage."""


@contextmanager
def _nobody() -> Iterator[None]:
    """Let this process have nobody's rights, if it has root's."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def _s3(server: Server) -> Place:
    """Return a bucket of a moto, which checks credentials and rights from then on."""
    root = {
        "aws_access_key_id": "root", "aws_secret_access_key": "root", "region_name": "us-east-1",
        "endpoint_url": server.url, "config": Config(s3={"addressing_style": "path"}),
    }  # fmt: skip
    boto3.client("s3", **root).create_bucket(Bucket="bucket")
    iam = boto3.client("iam", **root)

    def user(name: str, *actions: str) -> dict[str, Any]:
        """Return the options of a user with some rights."""
        allowed = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return {
            "key": made["AccessKeyId"],
            "secret": made["SecretAccessKey"],
            "endpoint_url": server.url,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    place = Place(
        url="s3://bucket/store",
        free="s3://bucket/free",
        missing="s3://no-such-bucket/store",
        options=user("owner", "s3:*"),
        reader=user("reader", "s3:GetObject", "s3:ListBucket"),
        writer=user("writer", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
    )
    _fill(place)
    requests.post(f"{server.url}/moto-api/reset-auth", data="0", timeout=120).raise_for_status()
    return place


def _gcs(server: Server) -> Place:
    bucket = {"name": "mistakes"}
    requests.post(f"{server.url}/storage/v1/b", json=bucket, timeout=120).raise_for_status()
    place = Place(
        url="gs://mistakes/store", free="gs://mistakes/free", missing="gs://no-such-bucket/store",
        options={"token": "anon", "endpoint_url": server.url}, reader={}, writer={},
    )  # fmt: skip
    _fill(place)
    return place


def _azure(server: Server) -> Place:
    bucket = AzureBucket(server.url)
    place = Place(
        url=f"az://{bucket.name}/store", free=f"az://{bucket.name}/free",
        missing="az://no-such-container/store", options=bucket.options(),
        reader=bucket.limited("rl"), writer=bucket.limited("rwdc"),
    )  # fmt: skip
    _fill(place)
    return place


def _folder(folder: Path) -> Place:
    place = Place(
        url=str(folder / "store"), free=str(folder / "free"), missing="", options={}, reader={},
        writer={},
    )  # fmt: skip
    _fill(place)
    return place


def _web(server: WebServer) -> Place:
    with ckptstore.open(server.folder / "store", create=True) as store:
        store.run("gpt").save({"w": [1.0], "b": bytes(200_000)}, step=1)
    options = {"username": "reader", "password": SECRET}
    logins = [
        f"Basic {b64encode(f'{name}:{SECRET}'.encode()).decode()}" for name in ("reader", "whole")
    ]

    def change(request: Request, reply: Reply) -> Reply:
        login = request.headers.get("Authorization")
        if login == logins[1]:
            return server.honest(replace(request, headers=Headers()))
        return reply if login == logins[0] else Reply(status=401)

    server.change = change
    return Place(
        url=f"{server.url}/store", free=f"{server.url}/free", missing="http://127.0.0.1:9/store",
        options=options, reader=options, writer={**options, "username": "whole"},
    )  # fmt: skip


PLACES: dict[str, Callable[..., Place]] = {
    "s3": _s3, "gs": _gcs, "az": _azure, "http": _web, "a folder": _folder,
}  # fmt: skip


def _fill(place: Place) -> None:
    """Create a store with a version."""
    with ckptstore.open(place.url, create=True, **place.options) as store:
        store.run("gpt").save({"w": [1.0]}, step=1)
