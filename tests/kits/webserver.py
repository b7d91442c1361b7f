"""A web server on loopback that serves a folder with ranges, and misbehaves as a test says."""

from __future__ import annotations

import datetime as dt
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Headers", "Reply", "Request", "WebServer", "certificate", "serving"]

_RANGE: Final = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class Headers(HTTPMessage):
    """The headers of a request, which its ``repr`` shows."""

    __repr__ = HTTPMessage.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer of the server."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    """Bytes of the body after which the connection is closed."""
    drip: bytes = b""
    """Sent again and again after the body, until the server is closed."""

    def having(self, **headers: str) -> Reply:
        """Return the reply with more headers; ``_`` in a name stands for ``-``."""
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **more})


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP on loopback by a class of handlers, and give the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


Change = Callable[[Request, Reply], Reply]


class WebServer:
    """Serves a folder until it is closed.

    Parameters
    ----------
    tls
        File with a certificate and its key; see :func:`certificate`.
    port
        Port to listen at; any if 0.
    """

    def __init__(self, folder: Path, *, tls: Path | None = None, port: int = 0) -> None:
        self.folder = folder
        self.requests: list[Request] = []
        self.change: Change = lambda _, reply: reply
        """Makes the answer from the request and from what an honest server would answer."""
        self.closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def paths(self, method: str = "") -> list[str]:
        """Return the paths that were asked for, by one method or any."""
        return [one.path for one in self.requests if method in {"", one.method}]

    def honest(self, request: Request) -> Reply:
        """Return the answer of a server without faults."""
        path = self.folder / unquote(request.path).lstrip("/")
        if ".." in path.parts or not path.is_file():
            return Reply(status=404)
        data = path.read_bytes()
        reply = Reply(status=200, body=data)
        reply = reply.having(Last_Modified=formatdate(path.stat().st_mtime, usegmt=True))
        headers = request.headers
        wanted = _RANGE.fullmatch(headers.get("Range") or headers.get("x-ms-range") or "")
        if wanted is None:
            return reply
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        if first > last:
            return Reply(status=416)
        span = f"bytes {first}-{last}/{len(data)}"
        return replace(reply, status=206, body=data[first : last + 1]).having(Content_Range=span)

    def close(self) -> None:
        """End it."""
        self.closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _handler(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        MessageClass = Headers
        headers: Headers

        def answer(self) -> None:
            """Note the request, and send the answer that the test wants."""
            method, body = self.command, self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(method=method, path=self.path, headers=self.headers, body=body)
            server.requests.append(request)
            reply = server.change(request, server.honest(request))
            self.send_response_only(reply.status)  # without the server's name
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if method != "HEAD":
                self.wfile.write(reply.body[: reply.cut])
            with suppress(OSError):  # the client is gone
                while reply.drip and not server.closed.wait(0.01):
                    self.wfile.write(reply.drip)
            self.close_connection = self.close_connection or reply.cut is not None

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, format: str, *values: object) -> None:
            """Print nothing."""

    return Handler


def certificate(folder: Path) -> Path:
    """Write a certificate for 127.0.0.1 and its key to a file; return the file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    day = dt.timedelta(days=1)
    now = dt.datetime.now(dt.UTC)
    names: Any = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    file = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file
