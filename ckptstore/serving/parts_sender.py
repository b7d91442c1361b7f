"""Sends the body of a download, while threads read its next windows.

It writes to the socket itself, as soon as that takes bytes: the event loop copies, or keeps, what a
socket does not take at once. So no thread waits for a client, and memory is free for the next
window once its bytes are sent.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from itertools import count
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Message

from ckptstore.integrations.safetensors_stream import FileStream, Window
from ckptstore.limits import KIB
from ckptstore.objects.joining import Growing

SENDER: Final = "ckptstore.sender"
"""In the state of a request's scope: the sender of its connection."""

Parts = AsyncGenerator[memoryview, None]
_MORE: Final = {"type": "http.response.body", "more_body": True}
_SLICE_BYTES: Final = 256 * KIB


async def read_ahead(
    stream: FileStream, start: int, stop: int, readers: Executor, most: Callable[[], int]
) -> Parts:
    """Yield the parts of a range while threads read the next windows.

    The memory of a part is used again once the next part is asked for.

    Parameters
    ----------
    most
        Returns how many windows may be in memory: the one that is sent, and others that are read.
    """
    loop = asyncio.get_running_loop()
    numbers, rooms = count(), list[Growing]()
    numbered, planned = enumerate(stream.windows(start, stop)), dict[int, Window]()
    planning = threading.Lock()
    coming = deque[asyncio.Future[tuple[Sequence[memoryview], Growing] | None]]()

    def read(number: int, room: Growing) -> tuple[Sequence[memoryview], Growing] | None:
        """Read a window into memory; return its parts and the memory, None after the last."""
        with planning:  # threads come in any order
            while number not in planned and (following := next(numbered, None)):
                planned.update([following])
            window = planned.pop(number, None)
        return None if window is None else (window(room), room)

    try:
        while True:
            while len(coming) < most():
                room = rooms.pop() if rooms else Growing()
                coming.append(loop.run_in_executor(readers, read, next(numbers), room))
            if (found := await coming[0]) is None:
                break
            coming.popleft()
            for part in found[0]:
                yield part
            rooms = [found[1]]
        await asyncio.gather(*coming)  # one may have failed for a window before its own
    finally:
        await asyncio.gather(*coming, return_exceptions=True)
        coming.clear()  # an error refers to this frame: it would keep itself, and the memory


class PartsSender:
    """Sends through one connection; one body at a time. With TLS, the event loop sends.

    Parameters
    ----------
    transport
        The connection's; each message waits until all before it was sent.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.sent = 0
        """Bytes that the socket took so far."""
        self.left = memoryview(b"")
        """What it did not take yet of a part."""
        self.free = asyncio.Event()
        """Set when it took all, or the connection is lost."""

    async def send(self, parts: Parts, send: Callable[[Message], Awaitable[None]]) -> None:
        """Send parts, each in memory that stays until the next is asked for.

        Raises
        ------
        ClientDisconnect
            The client left.
        CkptStoreError
            A part cannot be read; those before it were sent.
        """
        if self._transport.is_closing():
            raise ClientDisconnect
        await send({**_MORE, "body": b""})  # the headers are sent then
        about = self._transport.get_extra_info
        line = None if about("ssl_object") else about("socket").dup()
        before = self.sent
        try:
            async with aclosing(parts):
                async for part in parts:
                    await (self._take(part, line) if line else self._encrypt(part, send))
        finally:
            if line:
                line.close()
                # Of this length, for those who count; the connection leaves it out.
                await send({**_MORE, "body": range(self.sent - before)})

    async def _encrypt(self, part: memoryview, send: Callable[[Message], Awaitable[None]]) -> None:
        """Send a part in slices, since a transport with TLS counts whole calls as sent or not."""
        for at in range(0, len(part) + _SLICE_BYTES, _SLICE_BYTES):  # the last is empty, and waits
            await send({**_MORE, "body": part[at : at + _SLICE_BYTES]})
        if self._transport.is_closing():
            raise ClientDisconnect

    async def _take(self, part: memoryview, line: socket.socket) -> None:
        """Return once the socket took all of a part."""
        if self._transport.is_closing():
            raise ClientDisconnect
        loop = asyncio.get_running_loop()
        self.left = part
        self.free.clear()
        loop.add_writer(line, self._push, line)
        try:
            await self.free.wait()
            if self.left:
                raise ClientDisconnect
        finally:
            loop.remove_writer(line)
            self.left = memoryview(b"")

    def _push(self, line: socket.socket) -> None:
        """Give the socket what it takes now."""
        try:
            count = line.send(self.left)
        except BlockingIOError:
            return
        except OSError:  # the client left: nothing more is taken
            count = 0
        self.sent += count
        self.left = self.left[count:]
        if not count or not self.left:
            self.free.set()
