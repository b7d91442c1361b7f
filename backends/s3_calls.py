"""The calls that the S3 backend makes of a client library, and the body that a client sends.

Two clients serve it: ``s3_direct`` (botocore, without an event loop) and ``s3_fsspec`` (s3fs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Foreign = Any
"""A value of a client library, which ship no types."""
Request = dict[str, Any]
"""The parameters of one call of the S3 API, by their names there."""
Accept = Callable[[Mapping[str, Any]], None]
"""Looks at the head of an answer before its body is taken; raises to refuse it."""


class S3Calls(Protocol):
    """One client in one process; every method may be called from any thread.

    Each call sends one request, once, and raises its library's errors: ``s3_errors.translate``
    knows them all.
    """

    def call(self, method: str, request: Request) -> Foreign:
        """Return the answer of a call without a body; `method` is its name in snake case."""

    def put(self, request: Request, body: memoryview) -> None:
        """Send an object; `body` is free again when this returns or raises."""

    def read(self, request: Request, accept: Accept) -> bytes:
        """Return the body of an object."""

    def read_into(self, request: Request, buffers: Sequence[memoryview], accept: Accept) -> int:
        """Fill `buffers` from the body; return the number of bytes that are missing."""

    def close(self) -> None:
        """Close the connections."""
