"""One HTTP request with few steps, over a connection of urllib3's pools.

urllib3 and the clients above it take 0.5 to 2 ms of the interpreter for each request. Here the
pool gives a connection, made with its own settings of TLS; head and body are written to the socket
from the caller's memory, and ``http.client`` parses the answer. Nothing is retried or followed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any, Final

from urllib3 import HTTPHeaderDict
from urllib3.exceptions import HTTPError, ProtocolError, SSLError

from ckptstore import limits
from ckptstore.backends.base import Buffers
from ckptstore.backends.width import moved, served_thin

Foreign = Any
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
_MORE: Final[int] = getattr(socket, "MSG_MORE", 0)
_ERROR_BYTES_MAX: Final = limits.MIB
"""Of the body of an answer that is no object."""


class HttpAnswer:
    """Head of an answer, and its body as long as nobody took it.

    It has what :func:`ckptstore.backends.receiving.receive_into` uses of an answer of urllib3.
    """

    def __init__(self, pool: Foreign, connection: Foreign, below: HTTPResponse) -> None:
        self.status: int = below.status
        self.headers: HTTPHeaderDict = HTTPHeaderDict(below.headers.items())
        self.content_length: int | None = below.length
        self.closed: bool = below.isclosed()
        """Whether there is no body."""
        self.connection = connection
        self._pool: Foreign = pool
        self._fp = below

    def content(self) -> bytes:
        """Return the body of an answer that is no object; one that was cut is an error."""
        below, whole = self._fp, False
        try:
            bounded = below.length is not None and below.length <= _ERROR_BYTES_MAX
            data = below.read() if bounded else below.read(_ERROR_BYTES_MAX)
            whole = below.isclosed()
        except (OSError, HTTPException) as error:
            raise _broken(error) from error
        finally:
            (self.release_conn if whole else self.close)()
        return data

    def release_conn(self) -> None:
        """Give the connection, of whose answer nothing is left, to the next request."""
        self._give(closed=self._fp.will_close or self.status < 200)

    def close(self) -> None:
        """Close the connection, since a part of the body is still to come; it may be given back."""
        self._give(closed=True)

    def _give(self, *, closed: bool) -> None:
        """Give the connection back, once."""
        pool, self._pool = self._pool, None
        self._fp.close()
        if pool is not None:
            if closed:
                self.connection.close()
            pool._put_conn(self.connection)


def ask(sock: Foreign) -> None:
    """Acknowledge the next bytes received on a connection at once."""
    if sock is not None and _QUICKACK is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


def send(
    pool: Foreign,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Buffers = (),
    limit_s: float = 0.0,
) -> HttpAnswer:
    """Send one request; return its answer with the body still to be taken.

    Parameters
    ----------
    pool
        Of urllib3: connections to the server, by no proxy.
    target
        Path and query, quoted.
    headers
        All but ``Content-Length``.
    limit_s
        Seconds until the answer must begin; 0 for those of the pool.

    Raises
    ------
    HTTPError
        No answer came: of urllib3.
    ValueError
        A header has characters that would end it.
    """
    if not all(value.isprintable() for value in headers.values()):
        raise ValueError("a header has control characters")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {x}" for name, x in headers.items())]
    if body:
        lines.append(f"Content-Length: {sum(map(len, body))}")
    head = "\r\n".join((*lines, "\r\n")).encode("latin-1")
    connection: Foreign = None
    below: HTTPResponse | None = None
    try:
        connection = pool._get_conn()
        if connection.sock is None:
            connection.timeout = pool.timeout.connect_timeout
            connection.connect()
        sock = connection.sock
        usual_s = pool.timeout.read_timeout
        sock.settimeout(usual_s)
        unsent = True
        with suppress(ConnectionError):  # it may have answered before it had all, and closed
            _write(sock, head, body)
            unsent = False
        ask(sock)
        sock.settimeout(limit_s or usual_s)
        below = HTTPResponse(sock, method=method)
        below.begin()
        if unsent and below.status < 300:
            raise ConnectionError("a success before the whole request was sent")
        if limit_s:
            sock.settimeout(usual_s)
    except BaseException as error:
        if below is not None:
            below.close()
        if connection is not None:
            connection.close()
            pool._put_conn(connection)
        if isinstance(error, OSError | HTTPException):
            raise _broken(error) from error
        raise
    served_thin()
    return HttpAnswer(pool, connection, below)


def _write(sock: socket.socket, head: bytes, body: Buffers) -> None:
    """Write a request, its body in steps whose progress is told; short ones leave with the next."""
    more = _MORE if type(sock) is socket.socket else 0
    left = sum(map(len, body))
    sock.sendall(head, more if left else 0)
    for view in body:
        for at in range(0, len(view), limits.STREAM_BYTES):
            step = view[at : at + limits.STREAM_BYTES]
            size, left = len(step), left - len(step)
            while step:  # each gets the timeout anew; ``sendall`` gives all of a step the same
                step = step[sock.send(step, more if left else 0) :]
            moved(size)


def _broken(error: Exception) -> HTTPError:
    if isinstance(error, ssl.SSLError):
        return SSLError(error)
    return ProtocolError(f"no valid answer ({type(error).__name__})", error)
