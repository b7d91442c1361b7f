"""Hostile clients and damaged stores: none gets in, takes the server down, or gets a wrong byte."""

from __future__ import annotations

import asyncio
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import uvicorn
from ports import LOOPBACK
from safetensors.torch import save as save_file
from servekit import Server, served, settle
from shortening import examples, is_short
from starlette.requests import ClientDisconnect

import ckptstore
from ckptstore.objects.joining import Growing
from ckptstore.serving import app as app_module
from ckptstore.serving import serving_limits as limits
from ckptstore.serving.app import ServeApp
from ckptstore.serving.http_server import _Connection
from ckptstore.serving.parts_sender import PartsSender, read_ahead
from ckptstore.serving.versions import ServedVersions

_TOKEN = "correct-horse-battery"  # noqa: S105 - of these tests
_PATH = "/big/resolve/1/model.safetensors"


def _connect(server: Server) -> socket.socket:
    found = socket.create_connection((LOOPBACK, int(server.url.rpartition(":")[2])), 120)
    found.settimeout(120)
    return found


def _until_it_refuses(server: Server) -> None:
    while True:
        try:
            _connect(server).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)


def _fetch(server: Server, path: str) -> tuple[bytes, int]:
    """Return what arrives of a file, and the length that was promised."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        promised = int(answer.headers["Content-Length"])
        arrived = b""
        try:
            while part := answer.read(1 << 20):
                arrived += part
        except (http.client.HTTPException, OSError) as error:
            arrived += getattr(error, "partial", b"")
        return arrived, promised
    finally:
        connection.close()


def test_only_the_token_opens_and_it_is_never_logged(place: Path, tmp_path: Path) -> None:
    """Bearer and basic credentials open; anything else gets 401; the log holds no secret."""
    given = {"CKPTSTORE_SERVE_TOKEN": _TOKEN}
    with served(str(place), tmp_path, environment=given) as server:
        assert server.get("/healthz")[0] == 200
        paths = ("/api/models/gpt", "/metrics", "/", "/gpt/resolve/main/config.json")
        bearers = (f"Bearer {word}" for word in ("x", _TOKEN + "x", _TOKEN[:-1]))
        for wrong in ("", *bearers, "Basic \xff", _TOKEN):
            for path in paths:
                headers = {"Authorization": wrong} if wrong else {}
                assert server.get(path, **headers)[0] == 401, (wrong, path)
        bearer = {"Authorization": f"Bearer {_TOKEN}"}
        assert server.get("/api/models/gpt", **bearer)[0] == 200
        basic = "Basic Y2twdDpjb3JyZWN0LWhvcnNlLWJhdHRlcnk="
        assert server.get("/metrics", Authorization=basic)[0] == 200
        # A browser asks for the password, and sends it with the requests of the page.
        for path in ("/", f"/?token={_TOKEN}"):
            status, asked, _ = server.get(path)
            assert (status, asked["www-authenticate"][:5]) == (401, "Basic")
        for path in ("/", "/page/page.js", "/page/overview.json"):
            assert server.get(path, Authorization=basic)[0] == 200
        server.get(f"/gpt?token={_TOKEN}&X-Amz-Signature={_TOKEN}", **bearer)
        server.stop()
        log = server.log.read_text()
    assert "GET /api/models/gpt 200" in log
    assert _TOKEN not in log
    assert "Y2twd" not in log


@pytest.mark.short(sample=2)
@pytest.mark.parametrize(
    ("options", "environment", "word"),
    [
        (("--host", "0.0.0.0"), {}, "no token"),  # noqa: S104 - it is refused
        ((), {"CKPTSTORE_SERVE_TOKEN": "short"}, "less than"),
        (("--tls-cert", "x.pem"), {}, "needs its key"),
        (("--token-file", "absent"), {}, "absent"),
    ],
)
def test_unsafe_settings_are_refused(
    place: Path, options: tuple[str, ...], environment: dict[str, str], word: str
) -> None:
    """An open address without a token, a short token, half a certificate: nothing is served."""
    command = [sys.executable, "-m", "ckptstore", "serve", "-s", str(place), "--port", "0"]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode not in {0, 1}
    assert word in done.stderr


def test_a_name_of_another_site_is_refused(server: Server) -> None:
    """Without a token, a page of another site that reaches loopback by its name gets nothing."""
    for host in ("evil.example:8765", "127.0.0.1.evil.example", "::1", "[::1", "10.0.0.1"):
        assert server.get("/api/models/gpt", Host=host)[0] == 421, host
    for host in ("localhost:8765", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8765"):
        assert server.get("/api/models/gpt", Host=host)[0] == 200, host


def test_bombs_of_headers_and_bodies_are_cut(server: Server) -> None:
    """A request with headers or a body beyond the limits is refused, and the next is answered."""
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(40))
    with _connect(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + lines)
        assert b" 400 " in client.recv(100)
    with _connect(server) as client:
        client.sendall(b"GET /" + b"a" * 2 * limits.HEADER_BYTES_MAX)
        assert b" 400 " in client.recv(100)
    with _connect(server) as client:
        head = b"POST /api/models/gpt/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
        client.sendall(head + b"Content-Length: 100000000\r\n\r\n" + b"a" * 200_000)
        assert b" 413 " in client.recv(100)
    for line in (b"\x00\xff\r\n\r\n", b"GET  HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        with _connect(server) as client:
            client.sendall(line)
            assert b" 400 " in client.recv(100)
    assert server.get("/healthz")[0] == 200


def test_a_line_of_the_log_cannot_be_forged(server: Server) -> None:
    """Control characters of a path are quoted."""
    server.get("/x%0a127.0.0.1%20GET%20/forged%20200%1b[31m")
    log = server.logged("%0A127.0.0.1")
    assert "\n127.0.0.1 GET /forged" not in log
    assert "\x1b" not in log


@pytest.mark.slow
@pytest.mark.parametrize("many", [4000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_idle_connections_take_nothing_down(many: int, place: Path, tmp_path: Path) -> None:
    """More idle connections than are kept: new clients are answered; idle ones are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(examples(many), hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    with served(str(place), tmp_path) as server:
        idle = []
        try:
            for _ in range(count):
                idle.append(_connect(server))
                idle[-1].sendall(b"GET / HTTP/1.1\r\n")  # never finished
            assert server.get("/api/models/gpt")[0] == 200
            idle[0].settimeout(30)
            assert idle[0].recv(1) == b""
        except ConnectionResetError:
            assert server.get("/api/models/gpt")[0] == 200
        finally:
            for client in idle:
                client.close()
        assert server.get("/healthz")[0] == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_slow_reader_is_dropped(place: Path, tmp_path: Path) -> None:
    """A client that takes nothing for two looks loses its connection, and its turn."""
    with served(str(place), tmp_path) as server:
        location = server.get(_PATH)[1]["location"]
        with _connect(server) as client:
            client.sendall(f"GET {location} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert client.recv(10) == b"HTTP/1.1 2"
            while b"ckptstore_serve_requests_active 1\n" not in server.get("/metrics")[2]:
                time.sleep(0.1)
            rest = b""
            try:
                while part := client.recv(1 << 20):
                    rest += part
            except ConnectionResetError:
                rest += b""
        assert len(rest) < 20_000_000


def _peak_kb(server: Server) -> int:
    """Return the most memory that the server had, in KiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.timeout(900)
def test_flipped_bits_never_arrive(tmp_path: Path) -> None:
    """Whatever bit of a pack is flipped, what arrives is right, and too short if it is damaged."""
    place = tmp_path / "store"
    with ckptstore.open(place, create=True) as store:
        store.run("big").save({"model": {"w": torch.randn(3_000_000)}}, step=1)
    (pack,) = (place / "packs").rglob("*.pack")
    data = bytearray(pack.read_bytes())
    pack.chmod(0o644)
    rng = np.random.default_rng(1)
    cut = 0
    with served(str(place), tmp_path) as server:
        location = server.get(_PATH)[1]["location"]
        whole, length = _fetch(server, location)
        assert len(whole) == length
        for _ in range(50 if is_short() else 1000):
            at, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
            with pack.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ bit]))
            arrived, promised = _fetch(server, location)
            with pack.open("r+b") as file:
                file.seek(at)
                file.write(data[at : at + 1])
            assert promised == length
            assert whole.startswith(arrived)
            cut += len(arrived) < length
        assert cut > 0
        os.truncate(pack, len(data) // 2)
        assert whole.startswith(_fetch(server, location)[0])
        pack.write_bytes(data)
        assert _fetch(server, location)[0] == whole
        assert server.logged("cut: ")
        assert _peak_kb(server) < 300 * 1024, "what was cut stays in memory"


def test_downloads_beside_saves_rollbacks_and_collections(tmp_path: Path) -> None:
    """Each of eight downloads ends whole, as one version, or with an error."""
    place = tmp_path / "store"
    with ckptstore.open(place, create=True) as store, served(str(place), tmp_path) as server:
        made: dict[str, bytes] = {}
        run = store.run("big")

        def save(step: int) -> None:
            version = run.save({"model": {"w": torch.full((2_000_000,), float(step))}}, step=step)
            settle()
            commit = server.get("/big/resolve/main/model.safetensors")[1]["x-repo-commit"]
            weights = {"w": torch.full((2_000_000,), float(step))}
            made[commit] = save_file(weights, metadata={"format": "pt"})
            assert commit.startswith(version.id)

        save(1)
        with ThreadPoolExecutor(8) as pool:
            futures = []
            for step in range(2, examples(16)):
                location = server.get("/big/resolve/main/model.safetensors")[1]["location"]
                futures += [(location, pool.submit(_fetch, server, location)) for _ in range(8)]
                save(step)
                if step % 3 == 0:
                    run.rollback(step - 1)
                if step > 2:
                    store.remove([f"big@{step - 2}"], force=True)
                store.gc(grace_s=0)
            wholes = 0
            for location, future in futures:
                arrived, promised = future.result(120)
                if promised == len(made[location.split("/")[3]]):
                    assert made[location.split("/")[3]].startswith(arrived)
                    wholes += len(arrived) == promised
            assert wholes > 0


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_a_download_finish(place: Path, tmp_path: Path, by: signal.Signals) -> None:
    """A download that is under way arrives whole; then the server ends with status 0."""
    with served(str(place), tmp_path) as server:
        location = server.get(_PATH)[1]["location"]
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("GET", location)
        answer = connection.getresponse()
        begun = answer.read(1000)
        server.process.send_signal(by)
        _until_it_refuses(server)
        rest = answer.read()
        assert len(begun) + len(rest) == int(answer.headers["Content-Length"])
        connection.close()
        assert server.process.wait(120) == 0


@pytest.mark.slow
def test_sixteen_clients_fit_into_the_memory(place: Path, tmp_path: Path) -> None:
    """Sixteen downloads at once get the same bytes; the server stays below 300 MiB."""
    with served(str(place), tmp_path) as server:
        location = server.get(_PATH)[1]["location"]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: _fetch(server, location), range(32)))
        peak = _peak_kb(server)
    assert len({arrived for arrived, _ in found}) == 1
    assert all(len(arrived) == promised for arrived, promised in found)
    assert peak < 300 * 1024, peak


def test_tls(tmp_path: Path, place: Path) -> None:
    """With a certificate the server speaks https; answers and a file arrive without a stall."""
    import ssl
    import urllib.request

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
         "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(cert))
    with served(
        str(place), tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), wait=False
    ) as server:
        end = time.monotonic() + 120
        status = 0
        while not status:
            try:
                url = server.url.replace("http:", "https:") + "/api/models/gpt"
                with urllib.request.urlopen(url, context=context, timeout=120) as answer:  # noqa: S310
                    status = answer.status
            except OSError:
                assert time.monotonic() < end, server.log.read_text()
                time.sleep(0.1)
        assert status == 200
        where = server.url.rpartition("/")[2]
        listing = http.client.HTTPSConnection(where, context=context, timeout=120)
        for _ in range(20):
            listing.request("GET", "/api/models/gpt")
            assert listing.getresponse().read()
        listing.request("GET", "/gpt/resolve/best:val_loss/model.safetensors")
        moved = listing.getresponse()
        moved.read()
        listing.request("GET", str(moved.headers["Location"]))
        answer = listing.getresponse()
        assert (moved.status, answer.status) == (307, 200)
        assert len(answer.read()) == int(answer.headers["content-length"])
        listing.close()


class Ended:
    """A transport, with TLS or closed already, unless it has a socket; keeps what it is given."""

    def __init__(self, *, closing: bool, line: socket.socket | None = None) -> None:
        self.is_closing = lambda: closing
        self.bodies: list[bytes] = []
        self._line = line

    def get_extra_info(self, name: str) -> object:
        """Return the socket, or something for TLS."""
        return self._line if name == "socket" else None if self._line else self

    async def send(self, message: Any) -> None:  # noqa: ANN401 - ASGI
        """Keep a body."""
        self.bodies.append(b"" if isinstance(message["body"], range) else bytes(message["body"]))


def test_a_client_that_left_while_it_waited_gets_nothing() -> None:
    """No part is read for it."""
    transport = Ended(closing=True)
    with pytest.raises(ClientDisconnect):
        asyncio.run(PartsSender(cast("Any", transport)).send(_parts(), transport.send))
    assert transport.bodies == []


def test_with_tls_a_part_is_sent_in_slices() -> None:
    """A slow reader is seen to take some of it; the bytes are the same, in order."""
    transport = Ended(closing=False)
    asyncio.run(PartsSender(cast("Any", transport)).send(_parts(), transport.send))
    assert max(map(len, transport.bodies)) <= 256 << 10
    assert b"".join(transport.bodies) == b"".join(_PARTS)


def test_a_body_that_does_not_come_is_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that begin a body and send no more would take all places from others."""
    monkeypatch.setattr(app_module, "CONNECTION_CHECK_S", 0.01)
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not received:
            received.append(True)
            return {"type": "http.request", "body": b"paths", "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:  # noqa: ANN401 - ASGI
        messages.append(message)

    received: list[bool] = []
    path = "/api/models/gpt/paths-info/main"
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "scheme": "http",
        "query_string": b"", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1),
        "server": ("localhost", 80), "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    with ckptstore.open(place, read_only=True) as store:
        app = ServeApp(ServedVersions(store), token="", log=lambda _: None)
        asyncio.run(app(scope, receive, send))
    assert messages[0]["status"] == 408


_PARTS = [memoryview(bytes([value]) * ((1 << 20) + value)) for value in range(3)]


async def _parts() -> AsyncGenerator[memoryview, None]:
    for part in _PARTS:
        yield part


def test_a_stalled_client_holds_no_thread() -> None:
    """A send to a client that reads nothing waits in the event loop; when it leaves, it ends."""
    ours, theirs = socket.socketpair()
    transport, before = Ended(closing=False, line=ours), threading.active_count()
    sender = PartsSender(cast("Any", transport))

    async def stalled() -> None:
        sending = asyncio.create_task(sender.send(_parts(), transport.send))
        while not sender.sent:
            await asyncio.sleep(0)
        assert sender.left
        assert threading.active_count() == before
        sender.free.set()
        with pytest.raises(ClientDisconnect):
            await sending

    ours.setblocking(False)
    with ours, theirs:
        asyncio.run(stalled())


@pytest.mark.parametrize("most", [2, 3])
def test_a_part_stays_until_the_next_is_asked_for(most: int) -> None:
    """The next windows are read into other memory than that of the part that is being sent."""

    def read(value: int, room: Growing) -> list[memoryview]:
        room(1)[0] = value
        return [room(1)]

    stream = SimpleNamespace(windows=lambda *at: (partial(read, value) for value in range(*at)))

    async def found() -> list[int]:
        with ThreadPoolExecutor(1) as pool:
            parts = read_ahead(cast("Any", stream), 0, 9, pool, lambda: most)
            # Before a part is looked at, all that can be read by then is read.
            return [part[pool.submit(int).result()] async for part in parts]

    assert asyncio.run(found()) == list(range(9))


def test_a_part_waits_until_all_before_it_are_sent() -> None:
    """The memory of a part can then be used again: nothing refers to what was not sent yet."""
    held: list[int] = []

    class Watched(_Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            write = transport.write

            def watched(data: Any) -> None:  # noqa: ANN401 - any buffer
                held.append(transport.get_write_buffer_size())
                write(data)

            transport.write = watched  # type: ignore[method-assign]

    part = bytes(1 << 20)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        length = str(20 * len(part)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(20):
            await send({"type": "http.response.body", "body": memoryview(part), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answered() -> bytes:
        listening = socket.create_server((LOOPBACK, 0))
        config = uvicorn.Config(app, http=Watched, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = await reader.read()
        writer.close()
        server.should_exit = True
        await running
        return found

    assert asyncio.run(answered()).endswith(part * 20)
    assert len(held) > 20
    assert set(held) == {0}
