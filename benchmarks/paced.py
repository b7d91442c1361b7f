"""A paced S3 server as a process, and the fastest that a plain loop moves.

There are two servers with the same requests and settings: ``slow_s3.c`` takes little processor
time, ``tests/kits/paced_s3.py`` needs no compiler.

The plain loop is threads of http.client that send and fetch objects of 8 MiB from and into memory
that is used again: no client of S3 on this machine, in this language, does with less.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from paced_s3 import Pace

from benchmarks.native import compiled

__all__ = ["Paced", "fastest", "paced_server"]

_PROGRAM: Final = Path(__file__).resolve().parent.parent / "tests/kits/paced_s3.py"
_PART: Final = 8 << 20
_START_S: Final = 60.0


class Paced:
    """A running server, told by its own requests."""

    def __init__(self, port: int, name: str = "") -> None:
        self.port = port
        self.name = name
        """Of its source."""

    @classmethod
    def of_environment(cls) -> Paced:
        """Return the server that ``AWS_ENDPOINT_URL`` names."""
        port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
        assert port is not None  # noqa: S101 - the suite has set it
        return cls(port)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def pace(self, pace: Pace) -> None:
        """Change the pace; the counts begin again."""
        self._own("PUT", "pace", json.dumps(asdict(pace)))

    def begin(self) -> None:
        """Begin the counts again, and the second's worth of requests that may come at once."""
        self._own("POST", "counts")

    def counts(self) -> dict[str, Any]:
        """Return what was served."""
        return self._own("GET", "counts")

    def empty(self) -> None:
        """Delete all objects."""
        self._own("DELETE", "objects")

    def _own(self, method: str, name: str, body: str | None = None) -> dict[str, Any]:
        line = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            line.request(method, f"/-/{name}", body=body)
            told: dict[str, Any] = json.loads(line.getresponse().read())
        finally:
            line.close()
        return told


@contextmanager
def paced_server(pace: Pace, *, native: bool = False) -> Iterator[Paced]:
    """Run a server in a process of its own, at a free port.

    Parameters
    ----------
    native
        The server in C; without a compiler it is the other one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    told = json.dumps({**asdict(pace), "port": port})
    program = compiled("slow_s3.c") if native else None
    command = [sys.executable, str(_PROGRAM)] if program is None else [str(program)]
    process = subprocess.Popen([*command, told])
    server = Paced(port, _PROGRAM.name if program is None else "slow_s3.c")
    try:
        _await(process, server)
        yield server
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], server: Paced) -> None:
    ends = time.monotonic() + _START_S
    while True:
        try:
            server.counts()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > ends:
                msg = f"the server does not start: {error}"
                raise RuntimeError(msg) from error
            time.sleep(0.02)
        else:
            return


def fastest(
    server: Paced, size: int, *, threads: Sequence[int] = (2, 8, 64)
) -> dict[str, dict[int, float]]:
    """Return the bytes a second of PUTs and of GETs, by the number of threads.

    Parameters
    ----------
    size
        Bytes to move each time.
    """
    found: dict[str, dict[int, float]] = {"save": {}, "load": {}}
    for count in threads:
        found["save"][count] = size / _run(server, size, count, _put)
        found["load"][count] = size / _run(server, size, count, _get)
    server.empty()
    return found


def _run(
    server: Paced,
    size: int,
    threads: int,
    work: Callable[[http.client.HTTPConnection, int, memoryview], None],
) -> float:
    numbers = iter(range(-(-size // _PART)))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def loop() -> None:
        line = http.client.HTTPConnection("127.0.0.1", server.port)
        memory = memoryview(bytearray(b"\x01") * _PART)
        try:
            while (number := _next(numbers, lock)) is not None:
                work(line, number, memory)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            failed.append(error)
        finally:
            line.close()

    pool = [threading.Thread(target=loop) for _ in range(threads)]
    began = time.perf_counter()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def _next(numbers: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(itertools.islice(numbers, 1), None)


def _put(line: http.client.HTTPConnection, number: int, memory: memoryview) -> None:
    line.request("PUT", f"/plain/{number}", body=memory)
    answer = line.getresponse()
    answer.read()
    assert answer.status == 200, answer.status  # noqa: S101 - a bound that did nothing is none


def _get(line: http.client.HTTPConnection, number: int, memory: memoryview) -> None:
    line.request("GET", f"/plain/{number}")
    answer = line.getresponse()
    at = 0
    while at < len(memory):
        count = answer.readinto(memory[at:])
        assert count, "the body ends early"  # noqa: S101 - as above
        at += count
    answer.read()
