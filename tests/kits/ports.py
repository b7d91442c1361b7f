"""Ports of loopback for the servers of the tests."""

from __future__ import annotations

import secrets
import socket

__all__ = ["LOOPBACK", "free_port"]

LOOPBACK = "127.0.0.1"
# Below the ports that kernels give to outgoing connections (32768 and up on Linux): between the
# choice of a port and its server's start, no connection of another test takes it.
_PORTS = range(15_000, 32_000)
_given: set[int] = set()


def free_port(*offsets: int) -> int:
    """Return a port that is free, as are those `offsets` above it; never the same one twice.

    Two servers that are told their ports before either listens must not be told the same.
    """
    while True:
        port = secrets.choice(_PORTS)
        block = {port} | {port + offset for offset in offsets}
        if _given.isdisjoint(block) and all(_is_free(number) for number in block):
            _given.update(block)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
