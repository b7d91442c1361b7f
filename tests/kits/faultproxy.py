"""An HTTP proxy in front of a storage server that misbehaves exactly as a test says."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from enum import StrEnum
from typing import BinaryIO, Self

__all__ = ["Fault", "FaultProxy", "Kind"]

_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>a fault on purpose</Message></Error>"
_IDLE_S = 30.0
_IN_A_ROW_MAX = 3
"""Hits of one request in a row by a fault that leaves some out: three clients that try again in
turn would have the same one hit each time."""


class Kind(StrEnum):
    """Effect of a fault on a request."""

    RESET = "reset"
    """The connection is reset before the server hears of the request."""
    LOST = "lost"
    """The server carries it out; its answer is never passed on: the ambiguous outcome."""
    STATUS = "status"
    """The proxy answers ``Fault.status`` itself; the server hears of nothing."""
    STATUS_AFTER = "status after"
    """The server carries it out, and the proxy answers ``Fault.status`` all the same."""
    CUT = "cut"
    """Half of the answer's body is passed on, then the connection is closed."""
    DELAY = "delay"
    """The request is passed on ``Fault.seconds`` late."""
    HELD = "held"
    """The server carries it out; its answer is passed on ``Fault.seconds`` late."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A choice of requests, and the fault that hits them."""

    kind: Kind
    method: str = ""
    """Of HTTP; empty for any."""
    path: str = ""
    """A part of the path; empty for any."""
    header: str = ""
    """A header that the request has, in lower case; empty for any."""
    skip: int = 0
    """Number of matching requests that pass first."""
    times: int = 1
    """Number of requests hit after that; 0 for all."""
    every: int = 1
    """Only each so many-th of these."""
    status: int = 503
    code: str = "SlowDown"
    """S3's error code; GCS ignores it, since it knows only the status."""
    seconds: float = 0.0
    seen: int = 0
    hits: int = 0
    row: Counter[str] = field(default_factory=Counter)
    """Hits in a row, by method and path."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when a request waits for ``seconds``."""


@dataclass(slots=True)
class _Message:
    """A request or an answer: first line and headers as bytes, and the body."""

    start: str
    head: bytes
    headers: dict[str, str]
    body: bytes = b""
    close: bool = field(default=False)


class FaultProxy:
    """Listens on a free loopback port and passes whole requests and answers on.

    Faults may be set while it runs, from any thread. ``close`` ends it.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request)

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                """Print nothing: broken connections are normal here."""

        self._listener = Listener(("127.0.0.1", 0), Handler)
        self.port: int = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,))
        self._thread.start()

    def set(self, *faults: Fault) -> None:
        """Replace all faults; without any the proxy passes everything on."""
        with self._lock:
            self._faults = list(faults)

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hit(self, method: str, path: str, headers: Container[str]) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                asked = not fault.header or fault.header in headers
                if asked and fault.method in {"", method} and fault.path in path:
                    fault.seen += 1
                    late = fault.seen > fault.skip and not (fault.seen - fault.skip) % fault.every
                    one = f"{method} {path}"
                    fault.row[one] = fault.row[one] + 1 if late else 0
                    if fault.every > 1 and fault.row[one] > _IN_A_ROW_MAX:
                        late, fault.row[one] = False, 0
                    if late and (not fault.times or fault.hits < fault.times):
                        fault.hits += 1
                        return fault
        return None

    def _serve(self, client: socket.socket) -> None:
        """Serve one connection until either side closes it."""
        client.settimeout(_IDLE_S)
        with (
            socket.create_connection(("127.0.0.1", self.target_port)) as server,
            client.makefile("rb") as requests,
            server.makefile("rb") as answers,
        ):
            server.settimeout(_IDLE_S)
            while (request := _receive(requests, client)) is not None:
                method, path, _ = request.start.split(" ", 2)
                fault = self._hit(method, path, request.headers)
                if fault is not None and not _before(fault, client):
                    return
                server.sendall(request.head + request.body)
                answer = _receive(answers, None, bodiless=method == "HEAD")
                if answer is None:
                    return
                if fault is not None and not _after(fault, client, answer):
                    return
                client.sendall(answer.head + answer.body)
                if answer.close or request.close:
                    return


def _before(fault: Fault, client: socket.socket) -> bool:
    """Apply a fault before the server sees the request; return whether to go on."""
    if fault.kind is Kind.RESET:
        _reset(client)
        return False
    if fault.kind is Kind.STATUS:
        client.sendall(_answer(fault))
        return False
    if fault.kind is Kind.DELAY:
        fault.reached.set()
        time.sleep(fault.seconds)
    return True


def _after(fault: Fault, client: socket.socket, answer: _Message) -> bool:
    """Apply a fault after the server has answered; return whether to pass the answer on."""
    if fault.kind is Kind.LOST:
        _reset(client)
        return False
    if fault.kind is Kind.STATUS_AFTER:
        client.sendall(_answer(fault))
        return False
    if fault.kind is Kind.HELD:
        fault.reached.set()
        time.sleep(fault.seconds)
    if fault.kind is Kind.CUT:
        client.sendall(answer.head + answer.body[: len(answer.body) // 2])
        return False
    return True


def _answer(fault: Fault) -> bytes:
    body = _ERROR.format(fault.code).encode() if fault.code else b""
    head = f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _receive(
    stream: BinaryIO, client: socket.socket | None, *, bodiless: bool = False
) -> _Message | None:
    """Return one whole message, None at the end of the connection.

    A client that waits for permission to send its body (``Expect``) gets it from the proxy.
    """
    start = stream.readline()
    if not start:
        return None
    headers: dict[str, str] = {}
    kept = [start]
    while (line := stream.readline()) not in {b"\r\n", b""}:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if name.strip().lower() != "expect":
            kept.append(line)
    message = _Message(start.decode("latin-1").strip(), b"".join([*kept, b"\r\n"]), headers)
    message.close = headers.get("connection", "").lower() == "close"
    if client is not None and "expect" in headers:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        message.body = _chunked(stream)
    elif "content-length" in headers and not bodiless:
        message.body = stream.read(int(headers["content-length"]))
    return message


def _chunked(stream: BinaryIO) -> bytes:
    """Return a chunked body unchanged, framing included."""
    parts = []
    while True:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        parts += [line, stream.read(size + 2)]
        if not size:
            return b"".join(parts)
