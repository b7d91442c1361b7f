"""Receives the body of an HTTP answer straight into memory of the caller."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Sequence
from typing import Any, Final

from ckptstore import limits
from ckptstore.backends.scatter import skip_bytes, wanted_bytes
from ckptstore.backends.width import moved

Foreign = Any
"""An answer of urllib3, below botocore and requests."""


def receive_into(answer: Foreign, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` from an answer's body; return the number of bytes that are missing.

    The connection serves further requests if the body was read to its end, and is closed if not.
    """
    whole = False
    try:
        readinto, at_end = _receiver(answer)
        rest = [buffer for buffer in buffers if buffer.nbytes]
        while rest and (count := readinto(rest[0][: limits.STREAM_BYTES])):
            skip_bytes(rest, count)
            moved(count)
        whole = at_end()
    finally:
        if whole:
            answer.release_conn()
        else:
            answer.close()
    return wanted_bytes(rest)


def wait_for_body(answer: Foreign) -> None:
    """Give the body of an answer the usual time, however little its beginning had."""
    sock = getattr(answer.connection, "sock", None)
    if sock is not None:  # with "Connection: close" the answer alone has it
        sock.settimeout(limits.READ_TIMEOUT_S)


def _receiver(answer: Foreign) -> tuple[Callable[[memoryview], int], Callable[[], bool]]:
    """Return a function that receives into memory, and one that checks for the end of the body.

    urllib3's own ``readinto`` makes two copies, that of Python's HTTP client below it none; if a
    later urllib3 keeps that elsewhere, urllib3's is used.
    """
    below: Final = getattr(answer, "_fp", None)
    if isinstance(below, http.client.HTTPResponse):
        return below.readinto, below.isclosed
    return answer.readinto, lambda: False
