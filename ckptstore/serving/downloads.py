"""Answers with files: headers, ranges, and bodies that stop at the first damaged byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckptstore.backends.transfers import Threads
from ckptstore.integrations.safetensors_stream import Scratch
from ckptstore.serving.model_folder import ModelFolder, ServedFile
from ckptstore.serving.parts_sender import SENDER, Parts, read_ahead
from ckptstore.serving.serving_limits import DOWNLOAD_WAIT_S, DOWNLOADS_MAX, DOWNLOADS_WIDE

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})\Z")
_TYPES = {".json": "application/json", ".md": "text/plain; charset=utf-8"}


class Downloads:
    """Bounds how many files are sent at the same time, and how many parts are read.

    Parameters
    ----------
    reads
        Parts that may be read at once.
    """

    def __init__(self, reads: int) -> None:
        self._readers = Threads(min(reads, DOWNLOADS_MAX), thread_name_prefix="ckptstore-serve")
        self._scratch = Scratch()
        self._active = asyncio.Queue[None](DOWNLOADS_MAX)

    async def answer(
        self, request: Request, folder: ModelFolder, name: str, headers: Mapping[str, str]
    ) -> Response:
        """Return the answer to HEAD or GET of a file, or of a range of it."""
        file = folder.file(name)
        wanted = _range(request, file)
        start, stop = wanted or (0, file.nbytes)
        sent = {
            "Accept-Ranges": "bytes",
            "Content-Length": str(stop - start),
            "ETag": f'"{file.etag}"',
            "Last-Modified": f"{folder.version.created_at:%a, %d %b %Y %H:%M:%S GMT}",
            "Content-Type": _TYPES.get(name[name.rfind(".") :], "application/octet-stream"),
            **headers,
        }
        if not _names(request.headers.get("if-match", "*"), file):
            raise HTTPException(412, "the ref names another version by now")
        if _names(request.headers.get("if-none-match", ""), file):
            return Response(status_code=304, headers={"ETag": sent["ETag"]})
        if wanted is not None:
            sent["Content-Range"] = f"bytes {start}-{stop - 1}/{file.nbytes}"
        status = 200 if wanted is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=sent)
        try:
            await asyncio.wait_for(self._active.put(None), DOWNLOAD_WAIT_S)
        except TimeoutError:
            raise HTTPException(503, "too many downloads", {"Retry-After": "5"}) from None
        stream = folder.stream(name, self._scratch)
        parts = read_ahead(stream, start, stop, self._readers, self._windows)
        return _Download(parts, status, sent, self._active.get_nowait)

    def _windows(self) -> int:
        return 3 if self._active.qsize() <= DOWNLOADS_WIDE else 2


class _Download(Response):
    """A file on its way; an error cuts the connection before a wrong byte is sent."""

    def __init__(
        self, parts: Parts, status: int, headers: Mapping[str, str], release: Callable[[], None]
    ) -> None:
        self.status_code = status
        self.init_headers(headers)
        self._parts = parts
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **start})
            await scope["state"][SENDER].send(self._parts, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._release()


def _names(etags: str, file: ServedFile) -> bool:
    """Return whether a list of ETags, or a star, names a file as it is."""
    return not {"*", file.etag}.isdisjoint(one.strip(' "') for one in etags.split(","))


def _range(request: Request, file: ServedFile) -> tuple[int, int] | None:
    """Return the one range that a request asks for; None for all of the file."""
    match = _RANGE.match(request.headers.get("range", ""))
    only_if = request.headers.get("if-range", file.etag).strip('"')
    if match is None or match[0] == "bytes=-" or only_if != file.etag:
        return None
    first, last = match.groups()
    if first and last and int(last) < int(first):  # no range, by RFC 9110, section 14.1.1
        return None
    start = int(first) if first else max(0, file.nbytes - int(last))
    stop = min(int(last) + 1, file.nbytes) if first and last else file.nbytes
    if start >= stop:
        headers = {"Content-Range": f"bytes */{file.nbytes}"}
        raise HTTPException(416, "the range is outside of the file", headers)
    return start, stop
