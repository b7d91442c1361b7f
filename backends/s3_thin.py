"""The two byte calls of S3 with few steps: a PUT of a large body, and a GET of a range.

botocore takes 1 to 2 ms of the interpreter for each call: checks of parameters, rules of endpoints,
events, a parser. Its client goes first; from the request that it signs this module learns where
the objects are, and how requests are signed. Further requests are built here, signed by botocore
with the client's credentials, and sent over its connections. A request with parameters that are not
known here, a proxy, another way to sign, and an answer that leads elsewhere are left to the client.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final
from urllib.parse import quote, urlsplit

from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.parsers import create_parser

from ckptstore.backends import wire
from ckptstore.backends.base import Buffers
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.s3_calls import Request
from ckptstore.backends.width import served_thin
from ckptstore.config import SYSTEM

_OPERATIONS: Final = {
    "get_object": "GetObject",
    "put_object": "PutObject",
    "upload_part": "UploadPart",
}
_OBJECT: Final = "ckptstore_object"
"""Entry of a request's context: its bucket and the name of its object."""
_HEADERS: Final = {
    "ContentType": "Content-Type",
    "Range": "Range",
    "RequestPayer": "x-amz-request-payer",
    "StorageClass": "x-amz-storage-class",
}
_QUERY: Final = {"PartNumber": "partNumber", "UploadId": "uploadId"}
_KNOWN: Final = {"Bucket", "Key", *_HEADERS, *_QUERY}
_ELSEWHERE: Final = {"AuthorizationHeaderMalformed", "PermanentRedirect"}
"""Codes of answers by which botocore finds the region of a bucket. Source: its redirector."""
_OF_SESSION: Final = ("_manager", "_proxy_config", "_setup_ssl_cert", "_verify")
"""Attributes of botocore's HTTP session that are used here."""
_SIGNING: Final = {"region", "signing_name", "disableDoubleEncoding"}
"""Entries of botocore's signing context that are understood here."""
_CALM_S: Final = 10.0
"""Seconds after a refusal in which the client sends bodies: it asks before it does (status 100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """Place of a bucket's objects, and the way to sign requests to it."""

    bucket: str
    origin: str
    """Scheme, host and port."""
    host: str
    """As in the header."""
    path: str
    """Ends before the name of the object."""
    signer: Foreign
    """Of botocore, for its credentials; None for requests without a signature."""
    signing: Mapping[str, str]
    agent: str
    pool: Foreign
    """The client's connections to the server."""


class ThinCalls:
    """Requests built here and sent over the connections of a botocore client. Safe from any thread.

    Parameters
    ----------
    client
        Of botocore, for S3.
    sealed
        Whether bodies are protected by :func:`protection`; else as the client's settings say.
    """

    def __init__(self, client: Foreign, *, sealed: bool) -> None:
        self._client = client
        self._sealed = sealed
        self._endpoint: _Endpoint | None = None
        self._refused_at = -_CALM_S
        self._session: Foreign = getattr(getattr(client, "_endpoint", None), "http_session", None)
        config = client.meta.config
        self._sign_bodies = (config.s3 or {}).get("payload_signing_enabled")
        checksums = ("request_checksum_calculation", "response_checksum_validation")
        plain = all(getattr(config, name, None) in {None, "when_required"} for name in checksums)
        known = all(hasattr(self._session, name) for name in _OF_SESSION)
        if known and plain and not os.environ.get("BOTOCORE_EXPERIMENTAL__PLUGINS"):
            for name in _OPERATIONS.values():
                client.meta.events.register(f"before-parameter-build.s3.{name}", _note_object)
                client.meta.events.register(f"before-sign.s3.{name}", self._learn)

    def send(
        self, method: str, request: Request, body: Buffers = (), limit_s: float = 0.0
    ) -> wire.HttpAnswer | None:
        """Send one request; return the answer if it is a success, with the body of a GET unread.

        Parameters
        ----------
        limit_s
            Seconds until the answer must begin; 0 for the usual ones.

        Returns
        -------
        Answer or None
            None if the client has to send it: the request or its answer is not known here.

        Raises
        ------
        ClientError
            The answer is an error. Other errors are those of :func:`ckptstore.backends.wire.send`.
        """
        at, operation = self._endpoint, _OPERATIONS[method]
        if at is None or at.bucket != request["Bucket"] or not _KNOWN.issuperset(request):
            return None
        if body and SYSTEM.monotonic() < self._refused_at + _CALM_S:
            return None
        named = ((name, str(request[key])) for key, name in _QUERY.items() if key in request)
        query = "&".join(f"{name}={quote(value, safe='-._~')}" for name, value in named)
        path = at.path + quote(request["Key"], safe="/~")
        headers = {name: request[key] for key, name in _HEADERS.items() if key in request}
        verb = "PUT" if body else "GET"
        headers["Host"] = at.host
        target = f"{path}?{query}" if query else path
        if at.signer is not None:
            digest = self._digest(at, operation, headers, body)
            credentials = at.signer._credentials.get_frozen_credentials()
            auth = S3SigV4Auth(credentials, at.signing["signing_name"], at.signing["region_name"])
            auth.payload = lambda _: digest
            made = AWSRequest(verb, at.origin + target, headers)
            auth.add_auth(made)
            headers = dict(made.headers)
        headers["User-Agent"] = at.agent
        answer = wire.send(at.pool, verb, target, headers, body, limit_s)
        if answer.status in {200, 206}:
            return answer
        self._refuse(answer, operation)
        return None

    def _digest(self, at: _Endpoint, operation: str, headers: dict[str, str], body: Buffers) -> str:
        """Return the digest of a body in the signature's notation; add its checksum, if any."""
        signed = self._sign_bodies in {None, True}
        if body and self._sealed:
            signed, checked = protection(at.origin, operation)
            if checked:
                headers["x-amz-checksum-crc32"] = crc32(body)
        if not signed:
            return "UNSIGNED-PAYLOAD"
        return _sha256(body)

    def _refuse(self, answer: wire.HttpAnswer, operation: str) -> None:
        """Raise the client's error for an answer, or return if the client finds a way on."""
        found = {"status_code": answer.status, "headers": answer.headers, "body": answer.content()}
        if answer.status in {429, 503}:
            self._refused_at = SYSTEM.monotonic()
        parsed: dict[str, Any] = create_parser("rest-xml").parse(found, None)
        code = parsed.get("Error", {}).get("Code", "")
        if answer.status < 400 or code in _ELSEWHERE:
            served_thin(thin=False)
            return
        raise self._client.exceptions.from_code(code)(parsed, operation)

    def close(self) -> None:
        """Close the connections that are held here."""
        at, self._endpoint = self._endpoint, None
        if at is not None:
            at.pool.close()

    def _learn(
        self, request: Foreign, signature_version: Foreign, request_signer: Foreign, **_: object
    ) -> None:
        """Note, before botocore signs a request, where it goes and how it is signed."""
        self._endpoint = None
        bucket, key = request.context[_OBJECT]
        parts, signing = urlsplit(request.url), request.context.get("signing", {})
        name = quote(key, safe="/~")
        proxied = self._session._proxy_config.proxy_url_for(request.url)
        if proxied or not parts.path.endswith(f"/{name}") or not _SIGNING.issuperset(signing):
            return
        way = {
            "signing_name": signing.get("signing_name", request_signer.signing_name),
            "region_name": signing.get("region", request_signer.region_name),
            "signature_version": signature_version,
        }
        anonymous = signature_version == UNSIGNED
        if not anonymous and not _is_usual(type(request_signer.get_auth_instance(**way))):
            return
        port = parts.port if parts.port != {"http": 80, "https": 443}[parts.scheme] else None
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        host = f"{host}:{port}" if port else host
        origin = f"{parts.scheme}://{host}"
        pool = self._session._manager.connection_from_url(origin)
        self._session._setup_ssl_cert(pool, origin, self._session._verify)
        self._endpoint = _Endpoint(
            bucket=bucket,
            origin=origin,
            host=host,
            path=parts.path.removesuffix(name),
            signer=None if anonymous else request_signer,
            signing=way,
            pool=pool,
            agent=request.headers.get("User-Agent", ""),
        )


def protection(url: str, operation: str) -> tuple[bool, bool]:
    """Return whether a large body is signed, and whether it gets a checksum.

    Signing a body costs a SHA-256 here and another one at the server. A pack needs none where
    nothing can change it in transit: under TLS, which also gets a checksum that servers compare
    if they know it, and on the loopback interface, which is this machine's memory. The manifest
    holds digests of a pack's contents, and is small enough to be always signed.

    A part of an upload is signed under TLS: AWS takes a checksum of one only if the whole upload
    has them, which not every server knows.
    """
    parts = urlsplit(url)
    if parts.scheme != "https":
        return not _is_loopback(parts.hostname or ""), False
    is_part = operation == "UploadPart"
    return is_part, not is_part


def _sha256(body: Buffers) -> str:
    digest = hashlib.sha256()
    for view in body:
        digest.update(view)
    return digest.hexdigest()


def crc32(body: Buffers) -> str:
    """Return the checksum of a body in S3's notation."""
    checksum = reduce(lambda before, view: zlib.crc32(view, before), body, 0)
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _is_usual(kind: type) -> bool:
    """Return whether a class signs by version 4 for one region: botocore's own, or AWS's CRT."""
    crt = (kind.__module__, kind.__name__) == ("botocore.crt.auth", "CrtS3SigV4Auth")
    return crt or kind is S3SigV4Auth


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _note_object(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    """Note the object of a request where :meth:`ThinCalls._learn` finds it."""
    context[_OBJECT] = params["Bucket"], params["Key"]
