"""Messages between a process and the child that saves for it."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.config import Options
from ckptstore.format.superblock import Superblock
from ckptstore.model import Version
from ckptstore.saver.arena import Digests

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
        return self._waited[0] in {one for one, _ in poll.poll()}

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            count = self._socket.recv_into(view[filled:]) if self._readable() else 0
            if not count:
                return None
            filled += count
        return data


class Setup(NamedTuple):
    """To the child, first: where to save to."""

    backend: Backend
    superblock: Superblock
    put_if_absent: PutIfAbsent
    """What is known about the storage, so that the child need not probe it."""
    options: Options


class Lend(NamedTuple):
    """To the child: an arena, whose descriptor comes with the message."""

    arena: int
    size_bytes: int


class Forget(NamedTuple):
    """To the child: an arena that was given up."""

    arena: int


class Compare(NamedTuple):
    """To the child: the digests of a job, which it waits for as long as the parent lives."""

    number: int
    digests: Digests


class Cancel(NamedTuple):
    """To the child: cancel a job, and answer."""

    number: int


class Close(NamedTuple):
    """To the child: finish, and exit."""


class Ready(NamedTuple):
    """From the child, first: it has understood the setup; or it has not."""

    problem: str = ""


class Wrote(NamedTuple):
    """From the child: how far a job is."""

    number: int
    done: int
    total: int


class Done(NamedTuple):
    """From the child: a version is durable."""

    number: int
    version: Version
    receipt: Mapping[str, float]


class Failed(NamedTuple):
    """From the child: a job came to nothing."""

    number: int
    error: BaseException


Report: TypeAlias = Wrote | Done | Failed
"""What becomes of a job: an engine in this process tells it too."""


class Answer(NamedTuple):
    """From the child: whether a job was cancelled."""

    number: int
    cancelled: bool
