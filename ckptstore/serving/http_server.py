"""Runs the application in uvicorn: connections are watched, signals stop it gracefully."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckptstore.backends.oserrors import translate
from ckptstore.errors import InvalidInputError, StorageError
from ckptstore.serving import serving_limits as limits
from ckptstore.serving.app import ServeApp, is_loopback
from ckptstore.serving.parts_sender import SENDER, PartsSender
from ckptstore.serving.versions import ServedVersions


def serve(
    versions: ServedVersions,
    host: str,
    port: int,
    *,
    token: str,
    tls: tuple[str, str] | None,
    log: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT; then downloads get ``STOP_S`` to finish.

    Parameters
    ----------
    token
        Clients must send it; may be empty on loopback.
    tls
        Files of a certificate and its key.
    log
        Gets the lines of the access log.
    ready
        Called with the URL once the server listens.

    Raises
    ------
    InvalidInputError
        The address is open to others and there is no token, or the token is short.
    StorageError
        The address cannot be listened at.
    """
    if token and len(token) < limits.TOKEN_CHARS_MIN:
        msg = f"the token has less than {limits.TOKEN_CHARS_MIN} characters"
        raise InvalidInputError(msg, hint="openssl rand -hex 24")
    if not token and not is_loopback(host):
        msg = f"{host} can be reached by others, and no token is set"
        raise InvalidInputError(msg, hint="set CKPTSTORE_SERVE_TOKEN, or give --token-file")
    config = uvicorn.Config(
        ServeApp(versions, token=token, log=log),
        http=_Connection, loop="asyncio", ws="none", lifespan="off", log_config=None,
        access_log=False, proxy_headers=False, server_header=False,
        h11_max_incomplete_event_size=limits.HEADER_BYTES_MAX,
        timeout_graceful_shutdown=int(limits.STOP_S),
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )  # fmt: skip
    try:
        config.load()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            msg = f"another program listens at {host}:{port}"
            raise StorageError(msg, hint="name another port: --port") from error
        raise translate(error, f"listening at {host}:{port}") from error
    with listening:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http{'s' if tls else ''}://{shown}:{listening.getsockname()[1]}")
        _Server(config).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Returns after a signal, instead of raising it again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop the server at SIGINT and SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


class _Connection(H11Protocol):
    """Closes itself when its client neither asks nor reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count what is written, and give the application a sender of parts."""
        super().connection_made(transport)
        # A body uses the memory of a part again, and asyncio (from Python 3.12 on) refers to what
        # it could not send yet: so a part waits until all before it are sent.
        # With a limit of 0, TLS would call a connection full that has nothing to send.
        self.tls = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=1 if self.tls else 0, low=0)
        self.written = self.taken = 0
        self.idle_looks = 0
        self.sender = PartsSender(transport)
        self.app_state = {SENDER: self.sender}
        write = transport.write

        def counted(data: Any) -> None:  # noqa: ANN401 - any buffer
            if not isinstance(data, range):  # it stands for what was sent already
                self.written += len(data)
                write(data)

        transport.write = counted  # type: ignore[method-assign]
        encode = self.conn.send_with_data_passthrough

        def uncopied(event: Any) -> Any:  # noqa: ANN401 - of h11
            parts = encode(event)
            return parts[0] if parts and len(parts) == 1 else b"".join(parts or ())

        self.conn.send = uncopied  # type: ignore[method-assign]
        if len(self.connections) > limits.CONNECTIONS_MAX:
            self._make_room()
        self.loop.call_later(limits.CONNECTION_CHECK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.sender.free.set()

    @property
    def busy(self) -> bool:
        """True while a request is answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _make_room(self) -> None:
        """Close the connection that has been idle the longest, or this one."""
        ours = (one for one in self.connections if isinstance(one, _Connection))
        others = (one for one in ours if not one.busy and not one.transport.is_closing())
        max(others, key=lambda one: (one is not self, one.idle_looks)).transport.abort()

    def _look(self) -> None:
        # asyncio itself bounds the time that TLS takes to close.
        if self.transport.is_closing() and (self.tls or not self.transport.get_write_buffer_size()):
            return
        left = self.transport.get_write_buffer_size()
        taken = self.written - left + self.sender.sent
        slow = left + len(self.sender.left) and taken - self.taken < limits.READER_BYTES_MIN
        self.taken = taken
        self.idle_looks = 0 if self.busy else self.idle_looks + 1
        if slow or self.idle_looks > 1:
            self.transport.abort()
        else:
            self.loop.call_later(limits.CONNECTION_CHECK_S, self._look)
