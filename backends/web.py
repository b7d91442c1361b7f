"""Stores that a web server publishes: read-only, by GET, HEAD and ranges, without listings.

Everything that a server sends is treated as hostile: an answer must be exactly the object or range
that was requested, within its limits of size and time. What it contains is checked by the digests
of the layers above. The transport is urllib3: docs/design/0023-web-servers.md says why. Ranges
without a proxy go by :mod:`ckptstore.backends.wire`, over its connections.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any, Final, NoReturn
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions
from urllib3.util import parse_url

from ckptstore import errors, limits
from ckptstore.backends import base, bucket, wire
from ckptstore.backends.bucket import BucketBackend, BucketLocation, CheckRange, Foreign, Wait
from ckptstore.backends.httperrors import error_for_answer
from ckptstore.backends.per_process import PerProcess
from ckptstore.backends.receiving import Arrived, in_time, receive_into, wait_for_body
from ckptstore.config import SYSTEM

Answer = urllib3.BaseHTTPResponse | wire.HttpAnswer

CAPABILITIES: Final = replace(
    bucket.CAPABILITIES,
    put_if_absent=base.PutIfAbsent.REFUSED,
    concurrency=8,  # browsers open six connections to a host; few servers refuse eight
    lookup_lag_s=10.0,  # content delivery networks keep a 404; CloudFront for 10 s by default
    lists=False,
    read_only=True,
)

_OPTIONS: Final = ("username", "password", "token")
_TEXT: Final = re.compile(r"[\x20-\x7e]+\Z")
_REVALIDATED: Final = {"Cache-Control": "no-cache"}
"""Asks caches on the way to ask the server; ranges of packs, which never change, are left to them.
"""
_NOT_SENT = (exceptions.ConnectTimeoutError, exceptions.NewConnectionError, exceptions.ProxyError)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class _Headers(dict[str, str]):
    """Headers of a request, which may hold credentials; never shown."""

    def __repr__(self) -> str:
        return "<headers>"


class WebBackend(BucketBackend["_Pools"]):
    """The objects below one URL of a web server.

    Parameters
    ----------
    url
        Without credentials, query and fragment.
    headers
        Sent to the server of `url`, and to no other that it redirects to.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        location = BucketLocation(url=url, bucket=urlsplit(url).netloc, prefix="")
        super().__init__(location, PerProcess(_Pools))
        self.name = "web"
        self._headers = _Headers(headers)
        self._reached = False
        """Whether the server has answered before: if so, one that is away may come back."""

    @property
    def capabilities(self) -> base.Capabilities:
        """Return the properties of any web server."""
        return CAPABILITIES

    def get(self, key: str, *, bytes_max: int) -> bytes:
        """Return a whole object."""
        what = f"get {key}"

        def read(_: _Pools) -> bytes:
            """Return the body, as long as it stays within the bound."""
            data = bytearray()
            with self._answer("GET", key, _REVALIDATED) as answer, _in_time(what) as arrived:
                size = _length(answer.headers) or 0
                while size <= bytes_max and (part := answer.read1(limits.STREAM_BYTES)):
                    arrived(len(part))
                    data += part
                    size = len(data)
            base.check_size(key, size, bytes_max)
            return bytes(data)

        return self._run(what, read)

    def stat(self, key: str) -> base.ObjectInfo:
        """Return size and time of one object."""

        def ask(_: _Pools) -> base.ObjectInfo:
            """Return what the head of an answer says."""
            with self._answer("HEAD", key, _REVALIDATED) as answer:
                return self._info(key, answer.headers)

        return self._run(f"stat {key}", ask)

    def open_writer(self, key: str) -> base.ObjectWriter:
        """Raise ReadOnlyError."""
        self._refuse(key)

    def delete(self, key: str) -> None:
        """Raise ReadOnlyError."""
        self._refuse(key)

    def _body(self, key: str, data: base.Buffer) -> NoReturn:
        self._refuse(key)

    def _upload(self, key: str, *_: object, **__: object) -> NoReturn:
        self._refuse(key)

    def _refuse(self, key: str) -> NoReturn:
        base.check_key(key)
        raise base.read_only_error(self.url)

    def _page(self, what: str, *_: object) -> NoReturn:
        hint = "name runs or versions (ckptstore verify RUN), or replicate the store first"
        raise errors.StorageError(f"{what}: a web server lists no objects ({self.url})", hint=hint)

    def _receive(
        self, key: str, span: str, buffers: base.Buffers, check: CheckRange, wait: Wait
    ) -> int:
        what = f"get {key}"

        def receive(_: _Pools) -> int:
            """Fill the buffers from an answer."""
            with self._answer("GET", key, {"Range": span}, wait.sent()) as answer:
                wait.begun()
                wait_for_body(answer)
                check(answer.headers.get("Content-Range", ""), _length(answer.headers))
                with _in_time(what) as arrived:
                    return receive_into(answer, buffers, arrived)

        return self._run(what, receive)

    def _info(self, key: str, item: Mapping[str, Any]) -> base.ObjectInfo:
        size = _length(item)
        if size is None:
            msg = f"stat {key}: the server does not tell its size"
            raise errors.StorageError(msg, hint="serve the files as they are, without compression")
        try:
            modified_at = parsedate_to_datetime(item.get("Last-Modified", "")).timestamp()
        except (ValueError, OverflowError):
            # Not known: "now" keeps everyone from taking the object for old.
            modified_at = SYSTEM.now_ms() / 1000
        return base.ObjectInfo(key=key, size_bytes=size, modified_at=modified_at)

    @contextmanager
    def _answer(
        self, method: str, key: str, more: Mapping[str, str], limit_s: float = 0.0
    ) -> Iterator[Foreign]:
        """Give the answer for an object, after redirects, with its body still to be read.

        It fails if an answer does not begin within `limit_s`, unless that is 0.
        """
        what = f"{'stat' if method == 'HEAD' else 'get'} {base.check_key(key)}"
        url = f"{self.url}/{key}"
        headers = _Headers({**self._headers, **more, "Accept-Encoding": "identity"})
        for _ in range(limits.REDIRECTS_MAX + 1):
            answer = self._send(what, method, url, headers, limit_s)
            try:
                if answer.status not in _REDIRECTS:
                    _check_answer(answer, what, {200, 206} if "Range" in more else {200})
                    yield answer
                    return
                target = _redirected(url, answer.headers.get("Location", ""), what)
            finally:
                # A connection serves the next request only if nothing of this answer is left.
                (answer.release_conn if answer.closed else answer.close)()
            if urlsplit(target)[:2] != urlsplit(url)[:2]:
                headers = _Headers({**more, "Accept-Encoding": "identity"})
            url = target
        msg = f"{what}: more than {limits.REDIRECTS_MAX} redirects, one after another"
        raise errors.StorageError(msg)

    def _send(self, what: str, method: str, url: str, headers: _Headers, limit_s: float) -> Answer:
        """Send one request, and return the head of the answer."""
        try:
            answer = self._client.get().send(method, url, headers, limit_s)
        except (exceptions.HTTPError, OSError, ValueError) as error:
            found = self._translate(error, what, conditional=False)
            if isinstance(error, _NOT_SENT) and not self._reached:
                hint = f"is {self.url} right, and is the server up?"
                found = errors.StorageError(found.message, hint=hint)
            raise found from None  # its texts may hold a signed URL
        self._reached = True
        return answer

    @staticmethod
    def _translate(error: Exception, what: str, *, conditional: bool) -> errors.CkptStoreError:
        cause = error.__cause__ or error.__context__
        reason = getattr(cause, "verify_message", None) or getattr(cause, "strerror", None) or ""
        msg = f"{what}: {type(error).__name__}: {reason}".rstrip(": ")
        if isinstance(cause, ssl.SSLCertVerificationError):
            hint = "SSL_CERT_FILE names certificates of authorities that the system does not trust"
            return errors.StorageError(msg, hint=hint)
        if isinstance(error, ValueError):
            hint = "is the URL of the proxy right, or that of a redirect?"
            return errors.StorageError(msg, hint=hint)
        return errors.TransientStorageError(msg)


class _Pools:
    """Connections of one process: direct ones, and those through the environment's proxies."""

    thin = True
    """Whether direct requests for ranges go by the short path."""

    def __init__(self) -> None:
        self._managers: dict[str, urllib3.PoolManager] = {}

    def send(self, method: str, url: str, headers: _Headers, limit_s: float) -> Answer:
        """Send one request; nothing is retried, followed or decoded."""
        parts = urlsplit(url)
        proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
        if proxy not in self._managers:
            self._managers[proxy] = _manager(proxy)
        manager = self._managers[proxy]
        if self.thin and not proxy and "Range" in headers:
            at = parse_url(url)
            head = {"Host": at.netloc or "", "User-Agent": "python-urllib3", **headers}
            pool = manager.connection_from_url(url)
            return wire.send(pool, method, at.request_uri, head, limit_s=limit_s)
        return manager.urlopen(
            *(method, url),
            headers=headers,
            timeout=_silence(limit_s),
            redirect=False,
            retries=False,
            preload_content=False,
            decode_content=False,
        )

    def close(self) -> None:
        """Close all."""
        for manager in self._managers.values():
            manager.clear()


def _silence(limit_s: float) -> urllib3.Timeout:
    """Return the longest that a server may be silent; until an answer begins, `limit_s`."""
    read_s = limit_s or limits.READ_TIMEOUT_S
    return urllib3.Timeout(connect=limits.CONNECT_TIMEOUT_S, read=read_s)


def _manager(proxy: str) -> urllib3.PoolManager:
    """Return a pool of connections, directly or by a proxy; certificates are verified."""
    options: Any = {"maxsize": limits.CONNECTIONS_MAX, "timeout": _silence(0.0)}
    if not proxy:
        return urllib3.PoolManager(**options)
    login, _, host = urlsplit(proxy if "://" in proxy else f"http://{proxy}").netloc.rpartition("@")
    headers = urllib3.make_headers(proxy_basic_auth=unquote(login)) if login else {}
    scheme = proxy.partition("://")[0] if "://" in proxy else "http"
    return urllib3.ProxyManager(f"{scheme}://{host}", proxy_headers=headers, **options)


def _length(headers: Mapping[str, str]) -> int | None:
    said = headers.get("Content-Length", "")
    return int(said) if said.isdecimal() and len(said) < 20 else None


@contextmanager
def _in_time(what: str) -> Iterator[Arrived]:
    """Give a function that counts bytes as they arrive; errors of the connection name `what`."""
    try:
        yield in_time()
    except errors.CkptStoreError:
        raise
    except (exceptions.HTTPError, HTTPException, OSError) as error:
        why = str(error) if isinstance(error, TimeoutError) else type(error).__name__
        msg = f"{what}: the answer was cut short ({why})"
        raise errors.TransientStorageError(msg) from None


def _redirected(url: str, location: str, what: str) -> str:
    """Return where a redirect leads; refuse what may not be followed."""
    allowed = {"https"} if url.startswith("https:") else {"https", "http"}
    try:
        target = urljoin(url, location or "nowhere:")
        parts = urlsplit(target)
    except ValueError:
        target, parts = "", urlsplit("")
    if parts.scheme in allowed and parts.hostname and "@" not in parts.netloc:
        return target
    msg = f"{what}: the server redirects from {urlsplit(url).scheme} to {parts.scheme[:10]}"
    raise errors.StorageError(msg, hint="only http and https are followed, and never https to http")


def _check_answer(answer: Answer, what: str, accepted: set[int]) -> None:
    """Refuse an answer that cannot be the object."""
    status, headers = answer.status, answer.headers
    is_s3 = "x-amz-request-id" in headers or headers.get("Server", "") == "AmazonS3"
    if status == 410 or (status == 403 and is_s3):
        # S3 answers so for a missing object, too, to those who may not list the bucket.
        raise errors.ObjectNotFoundError(f"{what}: HTTP {status}")
    if status in {401, 403}:
        hint = f"may you read it? Credentials are storage options: {', '.join(_OPTIONS)}"
        raise errors.StoragePermissionError(f"{what}: HTTP {status}", hint=hint)
    if status not in accepted:
        raise error_for_answer(status, "", what, conditional=False)
    if headers.get("Content-Encoding", "identity") != "identity":
        msg = f"{what}: the server compresses the object, though it was asked not to"
        raise errors.StorageError(msg, hint="switch compression off for the store's files")
    if headers.get("Content-Type", "").lower().startswith("text/html"):
        msg = f"{what}: the server answers with a web page instead of the object"
        hint = "does it want a login, or answer missing names by a page?"
        raise errors.StorageError(msg, hint=hint)


def open_web(url: str, **options: object) -> WebBackend:
    """Return the backend of a web server's URL.

    Parameters
    ----------
    options
        ``username`` and ``password``, or ``token``, which is sent as a bearer.

    Raises
    ------
    InvalidUrlError
        It has credentials, a query or a fragment, which may be secrets and are not repeated; or no
        host.
    InvalidInputError
        An option is unknown, or not of its kind.
    """
    for name, value in options.items():
        if name not in _OPTIONS or not (isinstance(value, str) and _TEXT.match(value)):
            msg = f"the option {name[:40]!r} of a web server is unknown, or no printable ASCII text"
            raise errors.InvalidInputError(msg, hint=f"its options: {', '.join(_OPTIONS)}")
    try:
        parts = urlsplit(url)
        wrong = not parts.hostname or parts.port == 0 or not url.isprintable()
    except ValueError:
        wrong = True
    if wrong or "@" in parts.netloc or "?" in url or "#" in url:
        msg = "a URL of a web server without a host, or with credentials, a query or a fragment"
        hint = f"write https://host/path; storage options: {', '.join(_OPTIONS)}"
        raise errors.InvalidUrlError(msg, hint=hint)
    headers = {}
    if "username" in options:
        login = f"{options['username']}:{options.get('password', '')}"
        headers = urllib3.make_headers(basic_auth=login)
    elif "token" in options:
        headers = {"Authorization": f"Bearer {options['token']}"}
    return WebBackend(url.rstrip("/").removesuffix("/index.html"), headers)
