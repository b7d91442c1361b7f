"""Receives the body of an HTTP answer straight into memory of the caller."""

from __future__ import annotations

import http.client
import io
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ckptstore import limits
from ckptstore.backends.scatter import skip_bytes, wanted_bytes
from ckptstore.backends.width import moved
from ckptstore.config import SYSTEM

Arrived = Callable[[int], None]
"""Takes the number of bytes that came."""
Foreign = Any
"""An answer of urllib3, below botocore and requests, or of :mod:`ckptstore.backends.wire`."""


def in_time() -> Arrived:
    """Return a function that counts bytes as they arrive, and refuses a body that takes too long.

    It raises TimeoutError.
    """
    began, done = SYSTEM.monotonic(), 0

    def arrived(count: int) -> None:
        """Count bytes of the body."""
        nonlocal done
        moved(count)
        done += count
        spent_s = SYSTEM.monotonic() - began
        if spent_s > limits.READ_TIMEOUT_S + done / limits.READ_BYTES_PER_S_MIN:
            raise TimeoutError(f"{done} bytes in {spent_s:.0f} s, the server is too slow")

    return arrived


def receive_into(
    answer: Foreign, buffers: Sequence[memoryview], arrived: Arrived | None = None
) -> int:
    """Fill `buffers` from an answer's body; return the number of bytes that are missing.

    The connection serves further requests if the body was read to its end, and is closed if not.
    Raises TimeoutError if the body comes too slowly.

    Parameters
    ----------
    arrived
        Called after each step with its bytes; if given, a step takes what is there, or no longer
        than a silence may last, however little a server sends at a time.
    """
    each, whole = arrived is not None, False
    arrived = arrived or in_time()
    rest = [buffer for buffer in buffers if buffer.nbytes]
    try:
        below, sock = getattr(answer, "_fp", None), _socket(answer)
        known = isinstance(below, http.client.HTTPResponse) and below.length and not below.chunked
        if known and type(sock) is socket.socket:
            whole = _from_socket(below, sock, rest, arrived)
        else:
            readinto, at_end = _receiver(answer)
            if each and isinstance(below, http.client.HTTPResponse):
                readinto = partial(_read_once, below)
            while rest and (count := readinto(rest[0][: limits.STREAM_BYTES // 4])):
                skip_bytes(rest, count)
                arrived(count)
            whole = at_end()
    finally:
        if whole:
            answer.release_conn()
        else:
            answer.close()
    return wanted_bytes(rest)


def _from_socket(
    below: Foreign, sock: socket.socket, rest: list[memoryview], arrived: Arrived
) -> bool:
    """Fill `rest` from a connection without TLS; return whether all of the body was received.

    One call of the system waits for a whole step: a socket of Python's that has a timeout takes
    the interpreter for each packet twice.
    """
    left: int = below.length
    first = memoryview(below.fp.read1(io.DEFAULT_BUFFER_SIZE))  # what came with the head
    arrived(len(first))
    overlong = len(first) > left
    left -= len(first)
    while rest and first:
        count = min(len(first), rest[0].nbytes)
        rest[0][:count] = first[:count]
        first = first[count:]
        skip_bytes(rest, count)
    before = sock.gettimeout()
    silence = struct.pack("ll", *divmod(int((before or 0) * 1_000_000), 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
    sock.settimeout(None)
    while rest and left > 0:
        count = sock.recv_into(rest[0][: min(left, limits.STREAM_BYTES)], 0, socket.MSG_WAITALL)
        if not count:
            break
        left -= count
        skip_bytes(rest, count)
        arrived(count)
    sock.settimeout(before)
    below.close()
    return not left and not overlong


def _read_once(below: Foreign, memory: memoryview) -> int:
    """Receive what is there of a body into `memory`; return the number of bytes, 0 at the end."""
    if below.length and not below.chunked:
        count: int = below.fp.readinto1(memory[: below.length])
        below.length -= count
        if not below.length:
            below.close()
        return count
    data = below.read1(len(memory))
    memory[: len(data)] = data
    return len(data)


def wait_for_body(answer: Foreign) -> None:
    """Give the body of an answer the usual time, however little its beginning had."""
    sock = _socket(answer)
    if sock is not None:  # with "Connection: close" the answer alone has it
        sock.settimeout(limits.READ_TIMEOUT_S)


def _socket(answer: Foreign) -> Any:  # noqa: ANN401 - of Python or of a library
    """Return the socket below an answer, or None."""
    return getattr(getattr(answer, "connection", None), "sock", None)


def _receiver(answer: Foreign) -> tuple[Callable[[memoryview], int], Callable[[], bool]]:
    """Return a function that receives into memory, and one that checks for the end of the body.

    urllib3's own ``readinto`` makes two copies, that of Python's HTTP client below it none; if a
    later urllib3 keeps that elsewhere, urllib3's is used.
    """
    below: Final = getattr(answer, "_fp", None)
    if isinstance(below, http.client.HTTPResponse):
        return below.readinto, below.isclosed
    return answer.readinto, lambda: False
