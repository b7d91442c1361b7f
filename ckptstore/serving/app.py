"""The server's application: access, routes, errors, numbers and the access log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import quote, unquote

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError
from ckptstore.pages.site import page
from ckptstore.serving.access import has_token, is_signed
from ckptstore.serving.downloads import Downloads
from ckptstore.serving.hub import Hub
from ckptstore.serving.s3_bucket import S3Bucket, is_s3, s3_error
from ckptstore.serving.versions import ServedVersions

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_ORIGIN = r"\A(?i:https?)://[^/]*"
"""Before the path, as some clients of S3 write it."""
_SHOWN_CHARS = 300
_ASK = {"WWW-Authenticate": 'Basic realm="ckptstore"'}

# What is shown changes with the store, and no page of another site may frame or reuse it.
_OF_PAGES = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ServeApp:
    """Answers requests of the Hub's clients, of S3's, and of browsers.

    Parameters
    ----------
    token
        Needed by every request but ``/healthz``; empty for none.
    log
        Gets a line for each request: address, method, path, status, bytes, seconds.
    """

    def __init__(self, versions: ServedVersions, *, token: str, log: Callable[[str], None]) -> None:
        self._versions = versions
        self._token = token
        self._log = log
        self._clock = versions.store.repo.environment
        downloads = Downloads(versions.store.repo.load_backend.capabilities.concurrency)
        self._hub = Hub(versions, downloads)
        self._s3 = S3Bucket(versions, downloads)
        self._counts: Counter[str] = Counter()
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        for key, begin in (("path", _ORIGIN), ("raw_path", _ORIGIN.encode())):
            scope[key] = re.sub(begin, scope[key][:0], scope[key])
        request = Request(scope, receive)
        began, status, sent = self._clock.monotonic(), 500, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            await send(message)
            sent += len(message.get("body", b""))

        self._active += 1
        note = ""
        try:
            response = await self._guarded(request)
            await response(scope, receive, counted)
        except ClientDisconnect:
            note = " left"
        except CkptStoreError as error:  # in the middle of a file: the server cuts the connection
            self._counts["cut_total"] += 1
            note = f" cut: {error.kind}: {error.message}"
        finally:
            self._active -= 1
            self._counts[f'requests_total{{status="{status // 100}xx"}}'] += 1
            self._counts["sent_bytes_total"] += sent
            path = quote(scope["path"][:_SHOWN_CHARS], safe="/:@=+,-._~")
            took, client = self._clock.monotonic() - began, (scope["client"] or ("-",))[0]
            self._log(f"{client} {request.method} {path} {status} {sent} {took:.3f}{note}")

    async def _guarded(self, request: Request) -> Response:
        """Return an answer, also to what fails before it begins."""
        s3 = is_s3(request)
        try:
            return await self._answer(request, s3=s3)
        except HTTPException as error:
            status, message, headers = error.status_code, error.detail, error.headers
        except NotFoundError as error:
            status, message, headers = 404, str(error), {"X-Error-Code": "EntryNotFound"}
        except InvalidInputError as error:
            status, message, headers = 422, str(error), None
        except CkptStoreError as error:
            status, message, headers = 500, f"{error.kind}: {error.message}", None
        if s3:
            names = {503: "SlowDown", 416: "InvalidRange", 412: "PreconditionFailed"}
            code = names.get(status, "InternalError")
            return s3_error(status, code, message)
        shown = quote(message.replace("\n", " ")[:_SHOWN_CHARS], safe=" /:;,.@#'()=-")
        return PlainTextResponse(
            message + "\n", status, {"X-Error-Message": shown, **(headers or {})}
        )

    async def _answer(self, request: Request, *, s3: bool) -> Response:
        raw = request.scope["raw_path"].decode("latin-1").removeprefix("/")
        parts = [unquote(part) for part in raw.split("/")] if raw else []
        if parts == ["healthz"]:
            return PlainTextResponse("ok\n")
        refused = self._refusal(request, s3=s3)
        if refused is not None:
            return refused
        if s3:
            return await self._s3.answer(request, parts)
        if request.method not in {"GET", "HEAD"} and "paths-info" not in parts:
            raise HTTPException(405, "the store is read-only here", {"Allow": "GET, HEAD"})
        if parts == ["metrics"]:
            return PlainTextResponse(self._metrics())
        answer = await self._hub.answer(request, parts)
        if answer is None:
            path = "/" + "/".join(parts)
            answer = await run_sync(partial(self._page, path, dict(request.query_params)))
        if answer is None:
            raise HTTPException(
                404, "there is nothing at this path", {"X-Error-Code": "RepoNotFound"}
            )
        return answer

    def _page(self, path: str, query: Mapping[str, str]) -> Response | None:
        """Return the page of the store, or a part of it; None for other paths. Runs in a thread."""
        answer = page(self._versions.store, path, query)
        if answer is None:
            return None
        return Response(answer.body, answer.status, _OF_PAGES, answer.media_type)

    def _refusal(self, request: Request, *, s3: bool) -> Response | None:
        """Return the answer to a request that may not read; None if it may."""
        if not self._token:
            # A page of another site reaches loopback under its own name, by a name that it moves.
            host = request.headers.get("host", "").rpartition(":")
            if (host[0] or host[2]) not in _LOOPBACK:
                raise HTTPException(421, "without a token, only names of loopback are answered")
            return None
        if s3 and not request.headers.get("authorization", "").startswith("Bearer "):
            now_s = self._clock.now_ms() / 1000
            if is_signed(request, self._token, now_s):
                return None
            return s3_error(403, "SignatureDoesNotMatch", "sign with the token as secret key")
        if has_token(request, self._token):
            return None
        sent = "authorization" in request.headers
        message = "the token is another one" if sent else "no token was sent: set HF_TOKEN"
        raise HTTPException(401, message, _ASK)

    def _metrics(self) -> str:
        """Return numbers in the text format of Prometheus."""
        numbers = {**self._counts, "requests_active": self._active}
        return "".join(f"ckptstore_serve_{key} {numbers[key]}\n" for key in sorted(numbers))
