"""Answers of S3 are acknowledged at once, so that no server waits before it sends a small body."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from ckptstore.backends import s3_direct
from ckptstore.backends.s3_calls import read_settings
from ckptstore.backends.s3_direct import direct_client


class _Objects(BaseHTTPRequestHandler):
    """Answers each GET with three bytes, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, headers first."""
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"abc")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Return the URL of a server on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Objects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="an option of Linux")
def test_each_answer_is_acknowledged_at_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets it after an answer: it is asked before each, on one connection."""
    asked: list[int] = []
    ask = s3_direct._ask

    def note(connection: object) -> None:
        asked.append(id(connection))
        ask(connection)

    monkeypatch.setattr(s3_direct, "_ask", note)
    settings = read_settings({"key": "k", "secret": "s", "endpoint_url": endpoint})
    assert settings is not None
    calls = direct_client(settings)
    for _ in range(3):
        assert calls.read({"Bucket": "b", "Key": "k"}, lambda _: None) == b"abc"
    calls.close()

    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_a_client_of_another_make_is_left_alone() -> None:
    """A later botocore may keep its connections elsewhere: all works, slower."""
    for session in (None, SimpleNamespace(), SimpleNamespace(_manager=SimpleNamespace())):
        client = SimpleNamespace(_endpoint=SimpleNamespace(http_session=session))
        assert not s3_direct.acknowledge_at_once(client)
