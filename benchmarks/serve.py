"""``ckptstore serve`` against nginx, on loopback: one model, raw and compressed.

nginx sends the folder that ``export --pretrained`` wrote, with ``sendfile``; the server reads the
store and checks every byte. The same client fetches from both into memory that it uses again: the
file of weights in one connection, and in 16 connections that fetch a part each. All is warm.
"""

from __future__ import annotations

import http.client
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import ckptstore
from benchmarks.disk import Workspace, warm
from benchmarks.host import header
from benchmarks.measure import Measured, Result, say, settle
from ckptstore.integrations.pretrained import describe_model, export_pretrained

__all__ = ["run"]

_FILE: Final = "model.safetensors"
_CODECS: Final = ("raw", "planes")
_CLIENTS: Final = (1, 16)
_BLOCK: Final = 1 << 20
_START_S: Final = 60.0
_NGINX: Final = """
{user}
daemon off;
worker_processes auto;
pid {folder}/pid;
error_log stderr crit;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@dataclass(frozen=True)
class _Server:
    """A running server, and where it has the file of weights."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    path: str

    def processor_s(self) -> float:
        """Return the processor time of the process and of its children so far."""
        ticks = 0
        for one in self._pids():
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """Return the most memory that each of them had, in all."""
        texts = [Path(f"/proc/{one}/status").read_text() for one in self._pids()]
        return sum(int(text.partition("VmHWM:")[2].split()[0]) * 1024 for text in texts)

    def _pids(self) -> list[str]:
        pid = str(self.process.pid)
        return [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run(space: Workspace, *, bytes_min: int, rounds: int) -> Result:
    """Run everything; return a table for each number of clients.

    Parameters
    ----------
    bytes_min
        The model has at least this many bytes.
    rounds
        Counted rounds after one that is not, in which the cases alternate.
    """
    head = header(space.root)
    folder = space.fresh()
    state = _model(bytes_min)
    stores = {codec: folder / codec for codec in _CODECS}
    for codec, place in stores.items():
        with ckptstore.open(place, create=True, codec=codec) as store:
            store.run("gpt").save(state, step=1, roles={"pretrained": "weights"})
    with ckptstore.open(stores["raw"]) as store:
        export_pretrained(store, "gpt@1", folder / "exported")
    size = (folder / "exported" / _FILE).stat().st_size
    parameters = {"file_bytes": size, "rounds": rounds}
    result = Result(benchmark="serve", header=head, parameters=parameters)
    with ExitStack() as stack:
        servers = []
        missing = ""
        if shutil.which("nginx"):
            servers.append(stack.enter_context(_nginx(folder)))
        else:
            missing = "nginx is not installed (on Debian: nginx-light)"
        for codec, place in stores.items():
            servers.append(stack.enter_context(_served(f"serve {codec}", place)))
        for server in servers:
            _compare(server, folder / "exported" / _FILE)
        warm(folder)
        opened = {c: stack.enter_context(ckptstore.open(p)) for c, p in stores.items()}
        for count in _CLIENTS:
            rows = _measure(servers, opened, state, size, count, rounds)
            if missing:
                rows.insert(0, Measured(name="nginx", error=missing))
            result.tables[f"{count} client{'s' if count > 1 else ''}"] = rows
    return result


def _model(bytes_min: int) -> dict[str, Any]:
    """Return the state of a Llama in bfloat16 with random weights, and its description."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048 if bytes_min >= 256 * 10**6 else 64
    layer = 2 * (4 * width**2 + 3 * width * 3 * width)
    config = LlamaConfig(
        vocab_size=4 * width, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=-(-bytes_min // layer), num_attention_heads=width // 64,
        num_key_value_heads=width // 64, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.manual_seed(1)
    made = {
        name: torch.empty(one.shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, one in model.state_dict().items()
    }
    return {"model": made, "pretrained": describe_model(model)}


# --- servers ------------------------------------------------------------------------------------


@contextmanager
def _served(name: str, place: Path) -> Iterator[_Server]:
    port = _free_port()
    command = [sys.executable, "-m", "ckptstore", "serve", "--store", str(place), "--quiet"]
    path = f"/gpt/resolve/1/{_FILE}"
    with _running([*command, "--port", str(port)], port) as process:
        with _request(port, path) as answer:  # refs are redirected to their commits
            path = str(answer.headers["Location"])
        yield _Server(name, process, port, path)


@contextmanager
def _nginx(folder: Path) -> Iterator[_Server]:
    port = _free_port()
    place = folder / "nginx"
    place.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    text = _NGINX.format(user=user, folder=place, port=port, root=folder / "exported")
    (place / "nginx.conf").write_text(text)
    command = ["nginx", "-e", "stderr", "-p", str(place), "-c", str(place / "nginx.conf")]
    with _running(command, port) as process:
        yield _Server("nginx", process, port, f"/{_FILE}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; it answers when the block begins."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ends = time.monotonic() + _START_S
    try:
        while True:
            try:
                _request(port, "/healthz").close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > ends:
                    msg = f"{command[0]} does not start: {error}"
                    raise RuntimeError(msg) from error
                time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(30)


# --- the client ---------------------------------------------------------------------------------


def _request(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    line.request("GET", path, headers={"Connection": "close", **headers})
    return line.getresponse()


def _fetch(server: _Server, start: int, stop: int) -> float:
    """Fetch a range of the file; return the seconds until its first byte."""
    began = time.perf_counter()
    block = memoryview(bytearray(_BLOCK))
    with _request(server.port, server.path, Range=f"bytes={start}-{stop - 1}") as answer:
        arrived = answer.readinto(block[:1])
        first = time.perf_counter() - began
        while count := answer.readinto(block):
            arrived += count
    if arrived != stop - start:
        msg = f"{server.name} sent {arrived} bytes of {stop - start}"
        raise ValueError(msg)
    return first


def _compare(server: _Server, exported: Path) -> None:
    """Raise ValueError unless a server sends the bytes of the exported file."""
    with _request(server.port, server.path) as answer, exported.open("rb") as file:
        while block := file.read(_BLOCK):
            if answer.read(len(block)) != block:
                msg = f"{server.name} sends other bytes than were exported"
                raise ValueError(msg)


# --- the measurement ----------------------------------------------------------------------------


def _measure(
    servers: list[_Server],
    opened: dict[str, ckptstore.Store],
    state: dict[str, Any],
    size: int,
    count: int,
    rounds: int,
) -> list[Measured]:
    cases: dict[str, Callable[[], dict[str, float]]] = {}
    for server in servers:
        cases[server.name] = lambda server=server: _fetched(server, size, count)  # type: ignore[misc]
    if count == 1:
        for codec, store in opened.items():
            cases[f"load {codec}"] = lambda store=store: _loaded(store, state)  # type: ignore[misc]
    rows = {name: Measured(name=name, logical_bytes=size) for name in cases}
    spent: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in cases}
    for number in range(-1, rounds):
        shift = number % len(cases)
        for name in [*list(cases)[shift:], *list(cases)[:shift]]:
            settle(writes=False)
            found = cases[name]()
            if number < 0:
                continue
            rows[name].seconds.append(found.pop("seconds"))
            for key, value in found.items():
                spent[name][key].append(value)
        say(f"serve, {count} clients: round {number + 1} of {rounds}")
    for name, one in rows.items():
        one.numbers = {key: statistics.median(values) for key, values in spent[name].items()}
    return list(rows.values())


def _fetched(server: _Server, size: int, count: int) -> dict[str, float]:
    """Fetch the file in parts, all at once."""
    ends = [size * at // count for at in range(count + 1)]
    with ThreadPoolExecutor(count) as pool:
        busy, began = server.processor_s(), time.perf_counter()
        firsts = list(pool.map(lambda part: _fetch(server, *part), itertools.pairwise(ends)))
        seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "first_byte_s": statistics.median(firsts),
        "processor_s": server.processor_s() - busy,
        "peak_bytes": server.peak_bytes(),
    }


def _loaded(store: ckptstore.Store, state: dict[str, Any]) -> dict[str, float]:
    """Load the weights of a version into the tensors that it was saved from."""
    busy, began = time.process_time(), time.perf_counter()
    store.load("gpt@1", into={"model": state["model"]}, include=["model"])
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "processor_s": time.process_time() - busy}
