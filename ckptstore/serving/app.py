"""The server's application: access, routes, errors, numbers and the access log.

The Hugging Face Hub, as its clients speak it, read-only: a repository is a run (``gpt``,
``ANY/gpt``, or a run whose name has one slash). Its revisions are the refs of the run (``main`` is
``latest``), commit hashes, and whole refs such as ``lr=1e-4/a@best:val_loss``, so that a run of any
name can be reached. A revision that can move is answered by a redirect to its commit, so that a
file is never mixed of two versions. S3, read-only: the keys of the bucket ``store`` are
``RUN/REF/FILE``.
"""

from __future__ import annotations

import asyncio
import base64
import calendar
import hashlib
import hmac
import ipaddress
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeAlias
from urllib.parse import parse_qs, parse_qsl, quote, unquote, unquote_to_bytes
from xml.sax.saxutils import escape

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ckptstore import errors
from ckptstore.pages.site import page
from ckptstore.serving.downloads import Downloads
from ckptstore.serving.model_folder import ModelFolder, ServedFile, split_commit
from ckptstore.serving.serving_limits import (
    BODY_BYTES_MAX,
    CONNECTION_CHECK_S,
    PAGE_ENTRIES,
    SIGNATURE_AGE_S,
)  # fmt: skip
from ckptstore.serving.versions import ServedVersions

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


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
            await (await self._guarded(request))(scope, receive, counted)
        except ClientDisconnect:
            note = " left"
        except errors.CkptStoreError as error:  # within a file: the server cuts the connection
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
        except errors.NotFoundError as error:
            status, message, headers = 404, str(error), {"X-Error-Code": "EntryNotFound"}
        except errors.InvalidInputError as error:
            status, message, headers = 422, str(error), None
        except errors.CkptStoreError as error:
            status, message, headers = 500, f"{error.kind}: {error.message}", None
        if s3:
            names = {503: "SlowDown", 416: "InvalidRange", 412: "PreconditionFailed"}
            return s3_error(status, names.get(status, "InternalError"), message)
        shown = quote(message.replace("\n", " ")[:_SHOWN_CHARS], safe=" /:;,.@#'()=-")
        told = {"X-Error-Message": shown, **(headers or {})}
        return PlainTextResponse(message + "\n", status, told)

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
            raise _missing("RepoNotFound", "there is nothing at this path")
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
            host = re.sub(r":\d*\Z", "", request.headers.get("host", ""))
            if not is_loopback(host.removeprefix("[").removesuffix("]")):
                raise HTTPException(421, "without a token, only names of loopback are answered")
            return None
        if s3 and not request.headers.get("authorization", "").startswith("Bearer "):
            if is_signed(request, self._token, self._clock.now_ms() / 1000):
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


_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([\w-]+)/s3/aws4_request, ?"
    r"SignedHeaders=([\w;-]+), ?Signature=([0-9a-f]{64})\Z"
)
_SAFE = "-_.~"


def has_token(request: Request, token: str) -> bool:
    """Return True if a request carries the token, as bearer or as password."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())


def is_signed(request: Request, token: str, now_s: float) -> bool:
    """Return True if a request of S3 is signed (version 4) with the token as the secret key.

    Parameters
    ----------
    now_s
        Seconds since 1970; signatures of another time are refused.
    """
    match = _SIGNED.match(request.headers.get("authorization", ""))
    stamp = request.headers.get("x-amz-date", "")
    if match is None or not re.fullmatch(r"\d{8}T\d{6}Z", stamp):
        return False
    _key, day, region, names, signature = match.groups()
    try:
        made_s = calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        return False
    headers = [(name, request.headers.get(name, "")) for name in names.split(";")]
    if abs(now_s - made_s) > SIGNATURE_AGE_S or "host" not in names.split(";"):
        return False
    query = parse_qsl(request.url.query, keep_blank_values=True)
    pairs = sorted((quote(name, _SAFE), quote(value, _SAFE)) for name, value in query)
    canonical = (
        request.method,
        quote(unquote_to_bytes(request.scope["raw_path"]), "/" + _SAFE),
        "&".join(f"{name}={value}" for name, value in pairs),
        *(f"{name}:{' '.join(value.split())}" for name, value in headers),
        "",
        names,
        request.headers.get("x-amz-content-sha256", ""),
    )
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    scope = f"{day}/{region}/s3/aws4_request"
    key = f"AWS4{token}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.compare_digest(key.hex(), signature)


class Hub:
    """Answers of the Hub."""

    def __init__(self, versions: ServedVersions, downloads: Downloads) -> None:
        self._versions = versions
        self._downloads = downloads

    async def answer(self, request: Request, parts: Sequence[str]) -> Response | None:
        """Return the answer to a path of the protocol; None if it is none."""
        if parts[:2] == ["api", "models"]:
            return await self._api(request, parts[2:])
        at = parts.index("resolve", 1) if "resolve" in parts[1:3] else 0
        if at < 1 or len(parts) < at + 3:
            return None
        return await self._file(request, parts[:at], parts[at + 1], parts[at + 2 :])

    async def _file(
        self, request: Request, repo: Sequence[str], revision: str, path: Sequence[str]
    ) -> Response:
        folder = await self._folder(repo, revision)
        name = "/".join(path)
        headers = {"X-Repo-Commit": folder.commit}
        if name not in folder.files:
            raise _missing("EntryNotFound", f"there is no file {name!r:.200}", headers)
        if split_commit(revision) is None:
            place = "/".join(quote(part, safe="") for part in (folder.commit, *path))
            start = "/".join(quote(part, safe="") for part in repo)
            return RedirectResponse(f"/{start}/resolve/{place}", 307, headers)
        headers["X-Linked-Size"] = str(folder.files[name].nbytes)
        headers["X-Linked-Etag"] = f'"{folder.files[name].etag}"'
        return await self._downloads.answer(request, folder, name, headers)

    async def _api(self, request: Request, parts: Sequence[str]) -> Response | None:
        words = ("revision", "tree", "paths-info")
        at = next((at for at in (1, 2) if at >= len(parts) or parts[at] in words), 0)
        if not at or not parts:
            return None
        repo, word, rest = parts[:at], "".join(parts[at : at + 1]), parts[at + 1 :]
        folder = await self._folder(repo, rest[0] if rest else "main")
        headers = {"X-Repo-Commit": folder.commit}
        if word == "tree":
            return _tree(request, folder, "/".join(rest[1:]))
        if word == "paths-info":
            body = b""
            try:
                async with asyncio.timeout(CONNECTION_CHECK_S):
                    async for part in request.stream():
                        body += part
                        if len(body) > BODY_BYTES_MAX:
                            raise HTTPException(413, "the list of paths is too long")
            except TimeoutError as error:
                raise HTTPException(408, "the list of paths does not come") from error
            paths = parse_qs(body.decode("latin-1")).get("paths", [])
            found = [_entry(folder, name) for name in paths if name in folder.files]
            return JSONResponse(found, headers=headers)
        files = folder.files.values()
        document = {
            "id": "/".join(repo),
            "sha": folder.commit,
            "lastModified": f"{folder.version.created_at:%Y-%m-%dT%H:%M:%S.000Z}",
            "tags": ["ckptstore", *folder.version.tags],
            "siblings": [{"rfilename": file.name, "size": file.nbytes} for file in files],
        }
        return JSONResponse(document, headers=headers)

    async def _folder(self, repo: Sequence[str], revision: str) -> ModelFolder:
        return await run_sync(self._find, repo, revision)

    def _find(self, repo: Sequence[str], revision: str) -> ModelFolder:
        """Return the folder of a revision.

        Raises
        ------
        HTTPException
            There is none; its headers say so as clients of the Hub expect.
        """
        ref, _, query = revision.partition("?")
        try:
            if "@" in ref or ref.startswith("#") or split_commit(ref):
                return self._versions.folder(revision)
            catalog = self._versions.catalog()
            names = [name for name in ("/".join(repo), repo[-1]) if catalog.has_run(name)]
            if not names:
                raise _missing("RepoNotFound", f"the store has no run {repo[-1]!r:.200}")
            if ref == "main" and "main" not in catalog.run(names[0]).tags:
                revision = "latest" + ("?" + query if query else "")
            return self._versions.folder(revision, run=names[0])
        except errors.ObjectNotFoundError:
            raise
        except (errors.NotFoundError, errors.InvalidRefError) as error:
            raise _missing("RevisionNotFound", error.message) from error


def _missing(code: str, message: str, headers: dict[str, str] | None = None) -> HTTPException:
    return HTTPException(404, message, {**(headers or {}), "X-Error-Code": code})


def _entry(folder: ModelFolder, name: str) -> dict[str, Any]:
    file = folder.files.get(name)
    if file is None:
        return {"type": "directory", "path": name, "size": 0, "oid": folder.commit}
    return {"type": "file", "path": name, "size": file.nbytes, "oid": file.etag}


def _tree(request: Request, folder: ModelFolder, below: str) -> Response:
    """Return files, and folders where the listing is not recursive, a page at a time."""
    query, start = request.query_params, f"{below}/" if below else ""
    names = folder.below(below)
    if query.get("recursive", "").lower() in {"true", "1"}:
        names = [name for name in folder.files if name.startswith(start)]
    if not names:
        raise _missing("EntryNotFound", f"there is no folder {below!r:.200}")
    left = [name for name in names if name > query.get("cursor", "")]
    headers = {"X-Repo-Commit": folder.commit}
    if len(left) > PAGE_ENTRIES:
        next_page = request.url.include_query_params(cursor=left[PAGE_ENTRIES - 1])
        headers["Link"] = f'<{next_page}>; rel="next"'
    return JSONResponse([_entry(folder, name) for name in left[:PAGE_ENTRIES]], headers=headers)


BUCKET = "store"
_LAST = "\U0010ffff"
"""Behind all keys."""
_Entry: TypeAlias = "tuple[ModelFolder, ServedFile] | None"
"""A file; None for a common prefix."""
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


def is_s3(request: Request) -> bool:
    """Return True for a request of a client of S3, by the headers that these send."""
    names = request.headers.keys()
    signed = request.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256")
    sent = [name for name in names if name != "x-amz-cf-id"]  # CloudFront's
    return signed or any(name.startswith(("x-amz-", "amz-sdk-")) for name in sent)


def s3_error(status: int, code: str, message: str) -> Response:
    """Return an error as S3 does."""
    return _xml(f"<Error>{_tags({'Code': code, 'Message': message})}</Error>", status)


def _tags(values: Mapping[str, object]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def _xml(text: str, status: int = 200) -> Response:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'
    return Response(body, status, None, "application/xml")


class S3Bucket:
    """Answers of the bucket."""

    def __init__(self, versions: ServedVersions, downloads: Downloads) -> None:
        self._versions = versions
        self._downloads = downloads

    async def answer(self, request: Request, parts: Sequence[str]) -> Response:
        """Return the answer to any request."""
        query = request.query_params
        if parts and parts[0] != BUCKET:
            return s3_error(404, "NoSuchBucket", f"the only bucket is {BUCKET}")
        if request.method not in {"GET", "HEAD"}:
            return s3_error(403, "AccessDenied", "the store is read-only here")
        if not parts:
            date = "<CreationDate>1970-01-01T00:00:00.000Z</CreationDate>"
            buckets = f"<Buckets><Bucket><Name>{BUCKET}</Name>{date}</Bucket></Buckets>"
            tag = "ListAllMyBucketsResult"
            return _xml(f'<{tag} xmlns="{_XMLNS}"><Owner/>{buckets}</{tag}>')
        if "location" in query:
            return _xml(f'<LocationConstraint xmlns="{_XMLNS}"/>')
        key = "/".join(parts[1:])
        if key:
            found = await run_sync(self._find, key)
            if found is None or not found[3]:
                return s3_error(404, "NoSuchKey", "there is no such key")
            return await self._downloads.answer(request, found[0], found[3], {})
        if request.method == "HEAD":
            return Response(headers={"x-amz-bucket-region": "us-east-1"})
        return await run_sync(self._list, request)

    def _find(self, key: str) -> tuple[ModelFolder, str, str, str] | None:
        """Return the folder of a key, run, ref and file; an empty file where there is none."""
        found = []
        for run, rest in self._versions.split(key.split("/")):
            try:
                folder, ref, name = self._versions.below(run, rest)
            except (errors.NotFoundError, errors.InvalidInputError):
                continue
            found.append((folder, run, ref, name if name in folder.files else ""))
        return max(found, key=lambda one: (bool(one[3]), len(one[1] + one[2])), default=None)

    def _list(self, request: Request) -> Response:
        query = request.query_params
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get(key, "") for key in ("continuation-token", "start-after", "marker"))
        most = query.get("max-keys", str(PAGE_ENTRIES))
        count = min(int(most[:9]), PAGE_ENTRIES) if most[:9].isdecimal() else PAGE_ENTRIES
        page = list(itertools.islice(self._entries(prefix, delimiter, after), count + 1))
        more, page = len(page) > count > 0, page[:count]
        told = {"Name": BUCKET, "Prefix": prefix, "Delimiter": delimiter, "MaxKeys": count}
        told |= {"KeyCount": len(page), "IsTruncated": str(more).lower()}
        if more:  # the latter in version 1
            told |= dict.fromkeys(("NextContinuationToken", "NextMarker"), page[-1][0])
        parts = [_tags(told)]
        for key, found in page:
            if found is None:
                parts.append(f"<CommonPrefixes>{_tags({'Prefix': key})}</CommonPrefixes>")
                continue
            folder, file = found
            time = f"{folder.version.created_at:%Y-%m-%dT%H:%M:%S.000Z}"
            about = {"Key": key, "LastModified": time, "ETag": f'"{file.etag}"'}
            about |= {"Size": str(file.nbytes), "StorageClass": "STANDARD"}
            parts.append(f"<Contents>{_tags(about)}</Contents>")
        return _xml(f'<ListBucketResult xmlns="{_XMLNS}">{"".join(parts)}</ListBucketResult>')

    def _entries(self, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, _Entry]]:
        """Yield keys with their files, and common prefixes, in order, after a place."""
        ready: list[tuple[str, int, int, _Entry]] = []
        last, serial = after, itertools.count()
        for start, run, ref in [*self._starts(prefix), (_LAST, "", "")]:
            while ready and ready[0][0] < start:  # what follows begins with this start, or later
                key, *_, entry = heappop(ready)
                if key > last:
                    last = key
                    yield key, entry
            if run and start + _LAST > after:
                for key, entry in self._below(start, run, ref, prefix, delimiter):
                    # Of equal keys, that of the longest ref comes first.
                    heappush(ready, (key, -len(start), next(serial), entry))

    def _below(
        self, start: str, run: str, ref: str, prefix: str, delimiter: str
    ) -> Iterator[tuple[str, _Entry]]:
        """Yield the keys of one version; a common prefix in place of those that have it."""
        names: Mapping[str, ServedFile] = {}
        if delimiter and (at := start.find(delimiter, len(prefix))) >= 0:  # all have it
            yield start[: at + len(delimiter)], None
            return
        with suppress(errors.CkptStoreError):  # a version without weights, or whose data is gone
            folder = self._versions.folder(ref, run=run)
            names = folder.files
        for name, file in names.items():
            key = start + name
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            if key.startswith(prefix):
                yield (key, (folder, file)) if at < 0 else (key[: at + len(delimiter)], None)

    def _starts(self, prefix: str) -> list[tuple[str, str, str]]:
        """Return what the keys of each version begin with, its run and its ref, in order."""
        starts = {
            f"{run}/{ref}/": (run, ref)
            for run in self._versions.runs()
            if f"{run}/".startswith(prefix) or prefix.startswith(f"{run}/")
            for ref in self._versions.refs(run)
        }
        found = self._find(prefix)
        if found is not None:  # also a ref that is not listed
            starts[f"{found[1]}/{found[2]}/"] = found[1], found[2]
        return sorted(
            (start, *names)
            for start, names in starts.items()
            if start.startswith(prefix) or prefix.startswith(start)
        )
