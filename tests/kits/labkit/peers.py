"""Programs of the lab that run beside the tests, here or in a guest, and obey lines of JSON.

A request is ``{"id": n, "do": name, ...}``. The program answers with one or more lines
``{"id": n, "event": name, ...}``; the last is ``done`` with ``result``, or ``failed`` with ``kind``
and ``message``.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.systems import LabSystem

__all__ = ["PROGRAMS", "Call", "Peer", "PeerError", "guest_peer", "local_peer"]

PROGRAMS = Path(__file__).parents[2] / "lab" / "programs"
Event = dict[str, Any]


class PeerError(Exception):
    """A request failed in the peer.

    Attributes
    ----------
    kind
        ``kind`` of the ckptstore error there, or the name of any other exception.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Call:
    """One request in progress; its events arrive while the peer works."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._events: queue.Queue[Event] = queue.Queue()
        self.events: list[Event] = []
        """Events that ``next`` and ``result`` have taken so far."""

    def put(self, event: Event) -> None:
        """Deliver an event; called by the thread that reads."""
        self._events.put(event)

    def next(self, timeout_s: float = 120) -> Event:
        """Wait for one more event and return it.

        Raises
        ------
        PeerError
            The request failed, or no event came in time, or the peer is gone.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            kind = "silence"
            raise PeerError(kind, f"{self._what}: nothing heard for {timeout_s} s") from None
        if event["event"] == "failed":
            raise PeerError(event["kind"], f"{self._what}: {event['message']}")
        self.events.append(event)
        return event

    def result(self, timeout_s: float = 120) -> Any:  # noqa: ANN401 - whatever JSON holds
        """Wait until it is done (at most `timeout_s` between two events); return the result."""
        while True:
            event = self.next(timeout_s)
            if event["event"] == "done":
                return event["result"]

    def heard(self) -> list[Event]:
        """Return all events that have arrived, of any kind, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.events.append(self._events.get_nowait())
        return self.events


class Peer:
    """A running program; owned by one thread, closed by ``close``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, do: str, **arguments: object) -> Call:
        """Make a request without waiting for it."""
        with self._lock:
            self._count += 1
            call = self._calls[self._count] = Call(do)
            line = json.dumps({"id": self._count, "do": do, **arguments}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        return call

    def ask(self, do: str, *, timeout_s: float = 120, **arguments: object) -> Any:  # noqa: ANN401
        """Make a request, wait, and return its result."""
        return self.send(do, **arguments).result(timeout_s)

    def close(self) -> None:
        """End the program; harmless when it is gone."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        noise: list[str] = []
        for line in self._process.stdout:
            if line.startswith(b"{"):
                event = json.loads(line)
                self._calls[event["id"]].put(event)
            else:
                noise.append(line.decode(errors="replace"))
        gone = {"event": "failed", "kind": "gone", "message": "it ended: " + "".join(noise[-30:])}
        with self._lock:
            for call in self._calls.values():
                call.put(gone)


def _command(program: str) -> list[str]:
    return [sys.executable, "-u", str(PROGRAMS / program)]


@contextlib.contextmanager
def local_peer(program: str) -> Iterator[Peer]:
    """Run a program of tests/lab/programs as a process of this machine."""
    peer = Peer(
        subprocess.Popen(
            _command(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    )
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def guest_peer(system: LabSystem, host: str, program: str) -> Iterator[Peer]:
    """Run a program of tests/lab/programs inside a guest."""
    peer = Peer(system.popen("attach", host, *_command(program)))
    try:
        yield peer
    finally:
        peer.close()
