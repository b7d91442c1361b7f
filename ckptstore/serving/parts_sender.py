"""Sends the body of a download from a thread, while another one reads its next part.

It writes to the socket itself: the event loop copies what a socket does not take at once.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor, wait
from contextlib import closing

from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect
from starlette.types import Message

from ckptstore.limits import KIB

EXTENSION = "ckptstore.parts"
"""In the scope of a request whose connection has a sender: its ``send``."""

Parts = Generator[memoryview, None, None]


def ahead(parts: Parts, readers: Executor) -> Parts:
    """Yield each part while the next is read in a thread; `parts` are closed at the end."""
    coming = readers.submit(next, parts, None)
    with closing(parts):
        try:
            while (part := coming.result()) is not None:
                coming = readers.submit(next, parts, None)
                yield part
        finally:
            wait([coming])


class PartsSender:
    """Sends through one connection; one body at a time. With TLS, the event loop sends.

    Parameters
    ----------
    transport
        The connection's; what was written to it must have been sent before a body is.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.sent = 0
        """Bytes that the socket took so far."""
        self.left = 0
        """Bytes of a part that it did not take yet."""
        self._stopped = False

    async def send(self, parts: Parts, send: Callable[[Message], Awaitable[None]]) -> None:
        """Send parts, each in memory that stays until the next but one is asked for.

        Raises
        ------
        ClientDisconnect
            The client left.
        CkptStoreError
            A part cannot be read; those before it were sent.
        """
        if self._transport.is_closing():
            raise ClientDisconnect
        message = {"type": "http.response.body", "more_body": True}
        if self._transport.get_extra_info("ssl_object") is not None:
            try:
                while (part := await run_sync(next, parts, None)) is not None:
                    # A transport with TLS counts what was sent by whole calls of this.
                    for at in range(0, len(part), 256 * KIB):
                        await send({**message, "body": part[at : at + 256 * KIB]})
                    if self._transport.is_closing():
                        raise ClientDisconnect
            finally:
                await run_sync(parts.close)
            return
        before, self._stopped = self.sent, False
        line = self._transport.get_extra_info("socket").dup()
        try:
            whole = await run_sync(self._run, parts, line, abandon_on_cancel=True)
        finally:
            self._stopped = True
            # Of this length, for those who count; the connection leaves it out.
            await send({**message, "body": range(self.sent - before)})
        if not whole:
            raise ClientDisconnect

    def _run(self, parts: Parts, line: socket.socket) -> bool:
        """Return whether all parts were sent."""
        with line, closing(parts):
            return all(self._take(part, line) for part in parts)

    def _take(self, part: memoryview, line: socket.socket) -> bool:
        poll = select.poll()
        poll.register(line, select.POLLOUT)
        self.left = len(part)
        while self.left and not self._stopped and not self._transport.is_closing():
            try:
                count = line.send(part[-self.left :])
            except BlockingIOError:
                poll.poll(1000)  # milliseconds until it looks whether to go on
                continue
            except OSError:
                break
            self.sent += count
            self.left -= count
        return not self.left
