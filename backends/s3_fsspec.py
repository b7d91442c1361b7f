"""S3 through s3fs: its sessions, its event loop, and every storage option that it knows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import s3fs
from botocore.exceptions import HTTPClientError
from fsspec.asyn import sync

from ckptstore import limits
from ckptstore.backends.base import Buffers
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.buffered_writer import Body
from ckptstore.backends.s3_calls import Accept, Request, base_config
from ckptstore.backends.scatter import Scatter


class S3fsCalls:
    """Plain calls of the S3 API by an ``S3FileSystem``.

    Below it, aiohttp sends a request again when a kept-alive connection proves broken: a create
    whose answer was lost then finds its own object and is told that it exists, which the
    contract of backends allows.
    """

    def __init__(self, fs: Foreign) -> None:
        self._fs = fs

    def call(self, method: str, request: Request) -> Foreign:
        """Return the answer of a call."""

        async def call() -> Foreign:
            return await self._fs._call_s3(method, **request)

        return sync(self._fs.loop, call)

    def send(self, method: str, request: Request, body: Buffers) -> Foreign:
        """Send a body with its MD5, which the server compares."""
        data = b"".join(body)  # a copy: after a timeout the event loop may still be sending
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        sealed = {"Body": Body(data), "ContentMD5": base64.b64encode(digest).decode()}
        answer = self.call(method, request | sealed)
        if "ETag" not in answer:  # aiohttp follows redirects, and a PUT becomes a GET of a page
            raise HTTPClientError(error="an answer without ETag")
        return answer

    def read(self, request: Request, accept: Accept) -> bytes:
        """Return the body of an object."""
        data: bytes = self._get(request, accept, lambda body: body.read())
        return data

    def read_into(
        self, request: Request, buffers: Buffers, accept: Accept, patience_s: float = 0.0
    ) -> int:
        """Fill buffers from the body."""
        scatter = Scatter(buffers)

        async def fill(body: Foreign) -> None:
            while scatter.left and (data := await body.read(limits.STREAM_BYTES)):
                scatter.feed(data)

        with closing(scatter):  # after a failure the event loop may still be receiving
            self._get(request, accept, fill, patience_s)
            return scatter.left

    def _get(
        self, request: Request, accept: Accept, use: Foreign, patience_s: float = 0.0
    ) -> Foreign:
        """Return what the coroutine function `use` makes of an object's body."""

        async def fetch() -> Foreign:
            async with asyncio.timeout(patience_s or None):
                answer = await self._fs._call_s3("get_object", **request)
            async with answer["Body"] as body:
                accept(answer)
                return await use(body)

        return sync(self._fs.loop, fetch)

    def close(self) -> None:
        """Close the connections."""
        fs = self._fs
        if fs._s3 is not None:
            fs.close_session(fs.loop, fs._s3creator)
            fs._s3 = None


def s3fs_client(options: Mapping[str, object]) -> S3fsCalls:
    """Return a new client of s3fs; `options` are those of ``s3fs.S3FileSystem``."""
    rest: dict[str, Any] = dict(options)
    config = base_config(rest.pop("config_kwargs", {}))
    fs = s3fs.S3FileSystem(
        **rest, config_kwargs=config, use_listings_cache=False, skip_instance_cache=True
    )
    fs.retries = 1
    return S3fsCalls(fs)
