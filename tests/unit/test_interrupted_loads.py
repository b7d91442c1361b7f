"""What goes on behind a load that was interrupted, and answers that come before their time."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import urllib3
from urllib3.exceptions import ProtocolError, SSLError

from ckptstore import errors, limits
from ckptstore.backends import wire
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.retrying import RetryingBackend, giving_up
from ckptstore.backends.scatter import Scatter
from ckptstore.backends.web import open_web
from ckptstore.errors import TransientStorageError as Transient
from ckptstore.objects.threads import in_threads


def test_no_thread_fills_memory_after_ctrl_c() -> None:
    """However often it comes, it is raised once, when the threads are done with what they took."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    taken: list[int] = []
    filled: list[int] = []
    together = threading.Barrier(2)

    def begin(_: int) -> Callable[[int], None]:
        def work(item: int) -> None:
            taken.append(item)
            if item < 2:
                together.wait()
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGINT)
                together.wait()
            filled.append(item)

        return work

    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(2, iter(range(1_000_000)), begin, name="test", fills=True)
        assert sorted(filled) == sorted(taken)
        assert len(filled) < 1_000_000
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_sent_again_where_nobody_waits_any_more() -> None:
    """A failure that passes ends the call then; in other contexts it is tried again."""

    class Away(MemoryBackend):
        tries = 0

        def get(self, key: str, *, bytes_max: int) -> bytes:
            self.tries += 1
            raise errors.TransientStorageError("away")

    away = Away("away")
    for stopped, tries in ((True, 1), (False, 1 + limits.RETRY_TRIES)):
        before = giving_up.set(partial(bool, stopped))
        with pytest.raises(errors.TransientStorageError):
            RetryingBackend(away, base_s=0.0).get("a", bytes_max=1)
        giving_up.reset(before)
        assert away.tries == tries


def test_a_closed_scatter_takes_nothing() -> None:
    """What an event loop receives after the caller has given up goes nowhere."""
    memory = bytearray(4)
    scatter = Scatter([memoryview(memory)])
    scatter.feed(b"ab")
    scatter.close()
    scatter.feed(b"cd")
    assert memory == b"ab\0\0"
    assert scatter.left == 0


@contextmanager
def _server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a server that does `answer` with its first connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_a_success_before_the_whole_body_was_sent_is_none() -> None:
    """The server cannot have it."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    body = memoryview(bytes(64 << 20))  # more than the buffers of two sockets
    with (
        _server(answer) as port,
        urllib3.HTTPConnectionPool("127.0.0.1", port) as pool,
        pytest.raises(ProtocolError),
    ):
        wire.send(pool, "PUT", "/key", {"Host": "here"}, [body])


def test_a_fault_of_tls_that_is_no_certificate_passes() -> None:
    """A server that goes away in the handshake is asked again."""
    backend = open_web("https://127.0.0.1:1/store")
    for reason in (ssl.SSLEOFError("the end"), ssl.SSLCertVerificationError("unknown")):
        error = SSLError(reason)
        error.__cause__ = reason
        passes = isinstance(backend._translate(error, "get", conditional=False), Transient)
        assert passes == (not isinstance(reason, ssl.SSLCertVerificationError))
