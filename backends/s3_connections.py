"""Connections whose answers are acknowledged at once.

A server that leaves Nagle's algorithm on (RFC 896; Ceph's gateway does, unless ``tcp_nodelay=1``)
holds the body of a small answer back until its headers are acknowledged, and a client that delays
acknowledgements (RFC 1122, 4.2.3.2) sends that 40 ms later: each listing, and each read of a
commit, takes 45 ms instead of 5. Linux can be told not to delay, once for each answer.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)


def acknowledge_at_once(client: Any) -> bool:  # noqa: ANN401 - of botocore, which has no types
    """Make a botocore client acknowledge at once; call it before the client's first request.

    Returns
    -------
    bool
        Whether that worked: not on systems other than Linux, nor if a later botocore keeps its
        connections elsewhere. The client works without, slower.
    """
    manager = getattr(getattr(client._endpoint, "http_session", None), "_manager", None)
    kinds = getattr(manager, "pool_classes_by_scheme", None)
    ours = {"http": _Pool, "https": _TlsPool}
    theirs = {"http": AWSHTTPConnectionPool, "https": AWSHTTPSConnectionPool}
    if _QUICKACK is None or manager is None or kinds != theirs:
        return False
    manager.pool_classes_by_scheme = ours
    return True


def _ask(connection: Any) -> None:  # noqa: ANN401 - a connection of urllib3
    """Acknowledge the next bytes received on a connection at once."""
    sock = connection.sock
    if sock is not None and _QUICKACK is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


class _Connection(AWSHTTPConnection):  # type: ignore[misc]  # no types
    def getresponse(self) -> Any:  # noqa: ANN401 - of urllib3
        _ask(self)
        return super().getresponse()


class _TlsConnection(AWSHTTPSConnection):  # type: ignore[misc]  # no types
    def getresponse(self) -> Any:  # noqa: ANN401 - of urllib3
        _ask(self)
        return super().getresponse()


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]  # no types
    ConnectionCls = _Connection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]  # no types
    ConnectionCls = _TlsConnection
