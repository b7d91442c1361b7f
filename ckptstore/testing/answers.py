"""The tests of a backend that speaks HTTP: each answer becomes one error, and is not retried."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

import pytest

from ckptstore import errors
from ckptstore.backends.base import Backend
from ckptstore.testing.side_door import calls_of

__all__ = ["AnswerConformance"]

Kind = type[errors.CkptStoreError]

_BUSY: Final = (errors.TransientStorageError, errors.TransientStorageError)
_BROKEN: Final = (errors.AmbiguousWriteError, errors.TransientStorageError)
ANSWERS: Final[dict[int, tuple[Kind, Kind]]] = {
    # status: of put_if_absent, of all other calls
    400: (errors.StorageError, errors.StorageError),
    **dict.fromkeys((401, 403), (errors.StoragePermissionError, errors.StoragePermissionError)),
    **dict.fromkeys((409, 429, 503, 529), _BUSY),
    412: (errors.ObjectExistsError, errors.StorageError),
    **dict.fromkeys((500, 502, 504, 520, 524, 599), _BROKEN),
    501: (errors.UnsafeBackendError, errors.StorageError),
    507: (errors.StorageFullError, errors.StorageFullError),
}
"""Errors that an answer without a code of the storage stands for."""


class AnswerConformance:
    """For backends that send requests by HTTP: throttling, refusals and failures of the server.

    A subclass says how the backend is opened on a server of the suite, without retries::

        class TestMyAnswers(AnswerConformance):
            def backend_at(self, endpoint):
                return open_mine("mine://bucket/store", endpoint_url=endpoint)
    """

    def backend_at(self, endpoint: str) -> Backend:
        """Return a backend whose server is at `endpoint`, such as ``http://127.0.0.1:1234``."""
        raise NotImplementedError

    @pytest.mark.parametrize("status", ANSWERS)
    def test_an_answer_is_one_error(self, status: int) -> None:
        """Each call raises the error for the status, and repeats no request."""
        create, other = ANSWERS[status]
        with _server(status) as (endpoint, seen), closing(self.backend_at(endpoint)) as backend:
            for name, call in _calls(backend).items():
                seen.clear()
                with pytest.raises(errors.CkptStoreError) as caught:
                    call()
                assert type(caught.value) is (create if name == "put_if_absent" else other), name
                assert seen, f"{name} raised {caught.value!r} before it sent anything"
                assert len(seen) == len(set(seen)), f"{name} repeated a request: {seen}"

    @pytest.mark.parametrize("status", [301, 302, 303])
    def test_a_page_elsewhere_is_no_success(self, status: int) -> None:
        """A gateway may lead a write to a page of its own, which says 200: nothing was written."""
        with _server(status) as (endpoint, seen), closing(self.backend_at(endpoint)) as backend:
            calls = _calls(backend)
            for name in ("put", "put_if_absent", "open_writer"):
                with pytest.raises(errors.CkptStoreError):
                    calls[name]()
            assert len(seen) >= 3

    def test_a_server_that_is_away(self) -> None:
        """Where nothing listens, each call can be tried again: nothing can have been written."""
        with socket.socket() as taken:  # bound and not listening: a connection is refused
            taken.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with closing(self.backend_at(endpoint)) as backend:
                for call in _calls(backend).values():
                    with pytest.raises(errors.TransientStorageError):
                        call()


def _calls(backend: Backend) -> dict[str, Callable[[], object]]:
    """Return a call of each method, by its name."""
    return {**calls_of(backend, "a/b"), "list": lambda: list(backend.list("a/"))}


@contextmanager
def _server(status: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that answers every request so, and the requests it saw.

    It redirects to a page with the status 200.
    """
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            """Read the body, and answer without one."""
            seen.append(self.requestline)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200 if self.path == "/page" else status)
            if status in {301, 302, 303}:
                self.send_header("Location", "/page")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, format: str, *values: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = Thread(target=server.serve_forever, args=(0.02,))
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
