"""S3 through botocore alone: the calling thread moves the bytes between its memory and a socket.

The processor that runs the training spends little more on each byte of a pack than the kernel's
copy: a body is sent from the pack's buffer, and an answer is received into the caller's buffers.
Measured against other clients: docs/design/0014-s3-clients.md.
"""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from typing import Any

import botocore.loaders
import botocore.session
from botocore import UNSIGNED, awsrequest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, IncompleteReadError, NoCredentialsError

from ckptstore import limits
from ckptstore.backends import wire
from ckptstore.backends.base import Buffers
from ckptstore.backends.bucket import Foreign
from ckptstore.backends.receiving import receive_into
from ckptstore.backends.s3_calls import Accept, Request, Settings
from ckptstore.backends.s3_thin import ThinCalls, crc32, protection
from ckptstore.backends.width import moved


class DirectCalls:
    """Calls of a botocore client. It has no thread and no loop, so that a fork is safe.

    Parameters
    ----------
    client
        Of botocore, for S3.
    request
        Parameters of every request.
    thin
        Sends large bodies and receives ranges; without it, or where it cannot, the client does.
    """

    def __init__(self, client: Foreign, request: Request, thin: ThinCalls | None = None) -> None:
        self._client = client
        self._request = request
        self._thin = thin

    def call(self, method: str, request: Request) -> Foreign:
        """Return the answer of a call."""
        return getattr(self._client, method)(**self._request, **request)

    def send(self, method: str, request: Request, body: Buffers) -> Foreign:
        """Send a body: a small one signed with its SHA-256, a large one as by ``_seal``."""
        if _size(body) < limits.SIGNED_BODY_BYTES_MAX:
            return self.call(method, request | {"Body": b"".join(body)})
        answer = self._send_thin(method, request, body)
        if answer is not None:
            answer.content()
            return {"ETag": answer.headers.get("ETag", "")}
        sending = _Sending(body)
        try:
            return self.call(method, request | {"Body": sending})
        finally:
            sending.release()  # an error's traceback may keep a reference to it

    def read(self, request: Request, accept: Accept) -> bytes:
        """Return the body of an object."""
        answer = self.call("get_object", request)
        body = answer["Body"]
        try:
            accept(answer)
            data: bytes = body.read()
        finally:
            body.close()
        return data

    def read_into(
        self, request: Request, buffers: Buffers, accept: Accept, patience_s: float = 0.0
    ) -> int:
        """Receive the body into buffers, without a copy in between."""
        thin = self._send_thin("get_object", request, limit_s=patience_s)
        if thin is not None:
            stream: Foreign = thin
            said = thin.headers.get("Content-Range", "")
            head = {"ContentLength": thin.content_length, "ContentRange": said}
        else:
            _here.patience_s = patience_s
            try:
                head = self.call("get_object", request)
            finally:
                _here.patience_s = 0.0
            stream = head["Body"]._raw_stream
        with closing(stream):
            accept(head)
            return receive_into(stream, buffers)

    def _send_thin(
        self, method: str, request: Request, body: Buffers = (), limit_s: float = 0.0
    ) -> wire.HttpAnswer | None:
        """Return the answer to a request, or None if the client has to send it."""
        if self._thin is None:
            return None
        return self._thin.send(method, self._request | request, body, limit_s)

    def close(self) -> None:
        """Close the connections."""
        if self._thin is not None:
            self._thin.close()
        self._client.close()


def direct_client(settings: Settings) -> DirectCalls:
    """Return a new client of botocore.

    Credentials, region and endpoint come from where botocore finds them: options, environment,
    profile, single sign-on, container or instance.
    """
    config = dict(settings.config)
    if settings.anonymous:
        config["signature_version"] = UNSIGNED
    session = botocore.session.Session(profile=settings.profile)
    loader = _shared_loader(session.get_config_variable("data_path"))
    session.register_component("data_loader", loader)
    client = session.create_client("s3", **settings.client, config=Config(**config))
    unsigned = client.meta.config.signature_version is UNSIGNED
    if client._request_signer._credentials is None and not unsigned:
        raise NoCredentialsError  # who made them may be busy: the next request looks again
    acknowledge_at_once(client)
    chosen = config.get("s3") or {}
    sealed = not settings.anonymous and "payload_signing_enabled" not in chosen
    if sealed:
        for name in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-call.s3.{name}", _seal)
    client.meta.events.register("before-parse.s3", _hold_whole)
    return DirectCalls(client, dict(settings.request), ThinCalls(client, sealed=sealed))


@cache
def _shared_loader(data_path: str | None) -> Foreign:
    """Return botocore's reader of API descriptions, shared: making one takes 0.1 s."""
    return botocore.loaders.create_loader(data_path)


class _Sending(io.RawIOBase):
    """A large body, read in place.

    HTTP libraries ask for 16 KiB at a time, which would cost thousands of system calls: they get
    more than they ask for, which they pass on to the socket as it is.
    """

    def __init__(self, body: Buffers) -> None:
        super().__init__()
        self.body = body
        self._at = 0
        self._passed = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next megabyte, as a view."""
        moved(self._passed)  # what was read before has gone out
        part, at = memoryview(b""), self._at
        for view in self.body:
            if at < len(view):
                part = view[at : at + limits.STREAM_BYTES]
                break
            at -= len(view)
        self._at += len(part)
        self._passed = len(part)
        return part  # type: ignore[return-value]  # bytes by all that is done with it

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move: botocore measures the length, and may send again after a redirect."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: _size(self.body)}[whence]
        self._at = base + offset
        return self._at

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Release the memory; later reads fail."""
        self.body = ()


def _size(body: Buffers) -> int:
    return sum(map(len, body))


def _seal(params: dict[str, Any], model: Foreign, **_: object) -> None:
    """Choose, before the client signs a request, the protection of its body in transit."""
    body = params["body"]
    if not isinstance(body, _Sending):
        return
    signed, checked = protection(params["url"], model.name)
    if checked:
        params["headers"]["x-amz-checksum-crc32"] = crc32(body.body)
    context = params["context"]
    config = context["client_config"]
    chosen = {**(config.s3 or {}), "payload_signing_enabled": signed}
    context["client_config"] = config.merge(Config(s3=chosen))


def _hold_whole(operation_model: Foreign, response_dict: Mapping[str, Any], **_: object) -> None:
    """Refuse an answer whose body was truncated.

    Where botocore cannot parse the body of an error it uses the status alone, and so mistakes a
    pack that is cold, or a server that is too busy, for missing rights.
    """
    body, status = response_dict["body"], response_dict["status_code"]
    if status < 200:  # Python's client skips 100 alone of those that another answer follows
        raise ConnectionClosedError(endpoint_url="")
    if not isinstance(body, bytes) or operation_model.http.get("method") == "HEAD":
        return  # it is received elsewhere, or empty
    said = response_dict["headers"].get("content-length", "")
    if status not in {204, 304} and said.isdigit() and len(body) < int(said):
        raise IncompleteReadError(actual_bytes=len(body), expected_bytes=int(said))


def acknowledge_at_once(client: Foreign) -> bool:
    """Make a botocore client acknowledge answers at once; call it before the first request.

    A server that leaves Nagle's algorithm on (RFC 896; Ceph's gateway does, unless
    ``tcp_nodelay=1``) holds the body of a small answer back until its headers are acknowledged, and
    a client that delays acknowledgements (RFC 1122, 4.2.3.2) sends that 40 ms later: each listing,
    and each read of a commit, takes 45 ms instead of 5. Linux can be told not to delay, once for
    each answer.

    Returns
    -------
    bool
        Whether that worked: not on systems other than Linux, nor if a later botocore keeps its
        connections elsewhere. The client works without, slower.
    """
    manager = getattr(getattr(client._endpoint, "http_session", None), "_manager", None)
    kinds = getattr(manager, "pool_classes_by_scheme", None)
    ours = {"http": _Pool, "https": _TlsPool}
    theirs = {"http": awsrequest.AWSHTTPConnectionPool, "https": awsrequest.AWSHTTPSConnectionPool}
    if not hasattr(socket, "TCP_QUICKACK") or manager is None or kinds != theirs:
        return False
    manager.pool_classes_by_scheme = ours
    return True


class _Here(threading.local):
    """The request that this thread sends."""

    patience_s = 0.0
    """Seconds until its answer must begin; 0 for the connection's timeout."""


_here = _Here()


class _Prompt:
    """Part of a connection of urllib3: acknowledges at once, and waits as its thread says."""

    timeout: Any
    """Of reads; urllib3's."""

    def getresponse(self) -> Foreign:
        """Return the answer, whose beginning may have a limit of its own."""
        wire.ask(self.sock)  # type: ignore[attr-defined]  # of the connection
        if not _here.patience_s:
            return super().getresponse()  # type: ignore[misc]  # of the connection
        # Set on the socket by urllib3 at this call; of a connection that fails here it is not
        # restored, as urllib3 closes that.
        timeout, self.timeout = self.timeout, _here.patience_s
        sock = self.sock  # type: ignore[attr-defined]  # an answer may take it away
        answer = super().getresponse()  # type: ignore[misc]
        self.timeout = timeout
        sock.settimeout(timeout)
        return answer


class _Connection(_Prompt, awsrequest.AWSHTTPConnection):  # type: ignore[misc]  # no types
    pass


class _TlsConnection(_Prompt, awsrequest.AWSHTTPSConnection):  # type: ignore[misc]  # no types
    pass


class _Pool(awsrequest.AWSHTTPConnectionPool):  # type: ignore[misc]  # no types
    ConnectionCls = _Connection


class _TlsPool(awsrequest.AWSHTTPSConnectionPool):  # type: ignore[misc]  # no types
    ConnectionCls = _TlsConnection
