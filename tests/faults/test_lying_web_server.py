"""A web server that lies at random: a reader gets the saved bytes, or an error of the tree."""

from __future__ import annotations

import random  # noqa: TID251 - seeded, and not ckptstore's
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from faultkit.states import differences, state_of
from simulated_environment import SimulatedEnvironment
from webserver import Change, Reply, Request, WebServer

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.repo import open_repo
from ckptstore.store import Store

SEEDS = 60
STATE = state_of(11)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """Return a server of a published store of a few versions."""
    root = tmp_path_factory.mktemp("lying")
    with ckptstore.open(root / "store", create=True) as store:
        for step in (1, 2, 3, 4, 5):
            store.run("gpt").save({"w": [float(step)]}, step=step)
        store.run("gpt").save(STATE, step=6)
        store.publish()
    with WebServer(root) as made:
        yield made


def _lies(chance: random.Random, server: WebServer) -> Change:
    """Return a change that lies in some of the answers."""
    files = sorted(path for path in server.folder.rglob("*") if path.is_file())
    share = chance.choice([0.02, 0.1, 0.5])

    def flipped(_: Request, reply: Reply) -> Reply:
        body = bytearray(reply.body or b"x")
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        return replace(reply, body=bytes(body))

    def other(_: Request, reply: Reply) -> Reply:
        return replace(reply, body=chance.choice(files).read_bytes())

    def header(_: Request, reply: Reply) -> Reply:
        name = chance.choice(["Content-Length", "Content-Range", "Last-Modified", "Location"])
        text = chance.choice(["", "0", "-1", "9" * 30, "bytes 0-0/1", "x\x00y", "http://[", "٣"])
        return replace(reply, headers={**reply.headers, name: text}, cut=len(reply.body))

    def moved(_: Request, reply: Reply) -> Reply:
        place = chance.choice(["", "http://[", "//", "http://127.0.0.1:9/x", "/%00", "x" * 9000])
        return replace(reply, status=chance.choice([301, 302, 303, 307, 308])).having(
            Location=place
        )

    def status(_: Request, reply: Reply) -> Reply:
        found = chance.choice([200, 204, 206, 304, 302, 400, 403, 404, 410, 416, 429, 500, 599])
        return replace(reply, status=found)

    kinds: list[Callable[[Request, Reply], Reply]] = [
        *(flipped, other, header, status, moved),
        lambda _, reply: replace(reply, cut=chance.randrange(len(reply.body) + 1)),
        lambda _, reply: replace(reply, body=reply.body * 3),
        lambda _, reply: replace(reply, body=b""),
        lambda _, reply: reply.having(Content_Encoding="gzip"),
        lambda _, reply: reply.having(Transfer_Encoding="chunked"),
        lambda request, reply: reply.having(Location=request.path),
    ]
    return lambda request, reply: (
        chance.choice(kinds)(request, reply) if chance.random() < share else reply
    )


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.short(sample=12)
def test_a_server_that_lies(server: WebServer, seed: int) -> None:
    """Each read returns what was saved, or raises an error of the tree; then the truth is read."""
    server.requests.clear()
    server.change = _lies(random.Random(seed), server)
    environment = SimulatedEnvironment(seed)
    with (
        suppress(CkptStoreError),
        Store(open_repo(f"{server.url}/store", environment=environment)) as store,
    ):
        steps = [one.step for one in store.versions()]
        assert steps == [1, 2, 3, 4, 5, 6][: len(steps)]  # it may say that the last are not there
        for step in steps[:5]:
            assert store.load(f"gpt@{step}") == {"w": [float(step)]}
        if steps[5:]:
            assert not differences(store.load("gpt@6"), STATE)
    assert len(server.requests) < 1000
    server.change = lambda _, reply: reply
    with ckptstore.open(f"{server.url}/store") as store:
        assert not differences(store.load("gpt@6"), STATE)


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
RAW = {
    "nothing": b"", "noise": b"\x00\xff" * 1000, "no head": b"hello world",
    "a strange status": b"HTTP/9.9 999999 Hm\r\n\r\n", "many headers": _OK + b"X: y\r\n" * 100_000,
    "a long header": _OK + b"X: " + b"y" * 5_000_000,
    "two lengths": _OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "a cut body": _OK + b"Content-Length: 60000\r\n\r\nabc",
    "a body that does not end": _CHUNKED + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 100,
    "no chunk": _CHUNKED + b"zzzz\r\n", "a negative chunk": _CHUNKED + b"-5\r\nabc",
    "a huge chunk": _CHUNKED + b"ffffffffffffff\r\nabc",
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_http(name: str) -> None:
    """Bytes that are no answer raise an error of the tree after a few tries, in little memory."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """Answer any request by these bytes, and hang up."""
            self.request.recv(65536)
            with suppress(OSError):
                self.request.sendall(RAW[name])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        serving = threading.Thread(target=listening.serve_forever, args=(0.02,))
        serving.start()
        try:
            with pytest.raises(CkptStoreError) as caught:
                open_repo(
                    f"http://127.0.0.1:{listening.server_address[1]}",
                    environment=SimulatedEnvironment(),
                )
            assert caught.value.kind in {"storage_transient", "corrupt_object"}
        finally:
            listening.shutdown()
            serving.join()


@pytest.mark.parametrize("size", [0, 1, 70, 4096])
def test_every_object_is_noise(server: WebServer, tmp_path: Path, size: int) -> None:
    """A server of noise of any length raises an error of the tree."""
    noise = random.Random(size).randbytes(size)
    server.change = lambda _, reply: replace(reply, body=noise)
    with pytest.raises(CkptStoreError):
        ckptstore.open(f"{server.url}/store")
    server.change = lambda _, reply: reply
