"""Messages between a process and the child that saves for it: pickles and file descriptors.

Both ends are the same program of the same user, over a pair of sockets that nobody else has; a
pickle runs nothing here that the sender could not run itself. Nothing of it is ever stored.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
import threading
from typing import Any, Final

_HEAD: Final = struct.Struct("<QB")  # length of the pickle, and where it is
_INLINE, _IN_MEMORY = 0, 1
# A longer message goes as shared memory. Source: well below what Linux buffers for a socket
# (net.core.wmem_default, 208 KiB), so that to send never waits for the other end to read.
_INLINE_BYTES_MAX: Final = 16 * 1024


class Channel:
    """One end. Any thread may send; one thread receives.

    Parameters
    ----------
    peer
        A descriptor that becomes readable when the process at the other end is gone. A fork of it
        may hold its socket open, so that the end of the stream alone does not tell.
    """

    def __init__(self, end: socket.socket, *, peer: int = -1) -> None:
        self._socket = end
        self._waited = [end.fileno(), *([peer] if peer >= 0 else [])]
        self._sending = threading.Lock()

    def send(self, message: object, fd: int = -1) -> None:
        """Send a message, and a descriptor with it if the message is small.

        Raises
        ------
        OSError
            The other end is gone.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) <= _INLINE_BYTES_MAX:
            self._send(_HEAD.pack(len(data), _INLINE) + data, fd)
            return
        memory = os.memfd_create("ckptstore-message", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            self._send(_HEAD.pack(len(data), _IN_MEMORY), memory)
        finally:
            os.close(memory)

    def _send(self, data: bytes, fd: int) -> None:
        with self._sending:
            sent = socket.send_fds(self._socket, [data], [fd] if fd >= 0 else [])
            self._socket.sendall(data[sent:])

    def receive(self) -> tuple[Any, int] | None:
        """Wait for a message; return it with its descriptor, or -1. None: the other end is gone.

        What was sent before the other end went is received first. A descriptor is then owned by
        the caller.
        """
        try:
            if not self._readable():
                return None
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
            fd = fds[0] if fds else -1
            rest = self._exactly(_HEAD.size - len(head)) if head else b""
            if rest is None or not head:
                return None
            size, where = _HEAD.unpack(head + rest)
            if where == _IN_MEMORY:
                with mmap.mmap(fd, size) as memory:
                    os.close(fd)
                    return pickle.loads(memory), -1  # noqa: S301 - see the module
            data = self._exactly(size)
        except OSError:
            return None
        if data is None:  # it went in the middle of a message
            if fd >= 0:
                os.close(fd)
            return None
        return pickle.loads(data), fd  # noqa: S301 - see the module

    def close(self) -> None:
        """Close this end; a thread that waits in :meth:`receive` gets None."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _readable(self) -> bool:
        """Wait until there is something to read; False if there never will be."""
        if len(self._waited) == 1:
            return True
        poll = select.poll()
        for one in self._waited:
            poll.register(one, select.POLLIN)
        ready = {one for one, _ in poll.poll()}
        return self._waited[0] in ready

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        filled = 0
        while filled < size:
            count = self._socket.recv_into(view[filled:]) if self._readable() else 0
            if not count:
                return None
            filled += count
        return data
