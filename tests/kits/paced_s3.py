"""An S3 server in memory whose every connection has a fixed rate and latency.

Run as ``python paced_s3.py '{"port": 9000, "bytes_per_s": 10e6, "latency_s": 0.02}'``. It stands
for a network on which one connection is slow and many are fast, which no server on loopback shows.
The kernel paces what it sends (``SO_MAX_PACING_RATE``), and it reads no faster than the rate.

It knows PUT with ``If-None-Match``, copies, GET with ranges, HEAD, DELETE, ListObjectsV2 and
multipart uploads, with bodies as they are or framed (``aws-chunked``); addresses are
path-style, and no signature or checksum is checked. Of its own it has ``GET /-/counts``, which
returns what it has served, as JSON, ``POST /-/counts``, which begins the counts again, ``PUT
/-/pace``, which takes another pace as JSON, and ``DELETE /-/objects``, which empties all buckets.
"""

from __future__ import annotations

import itertools
import json
import mmap
import socket
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

_PACING: Final = 47  # SO_MAX_PACING_RATE of Linux, which Python does not name
_BLOCK: Final = 256 << 10
"""Bytes of a block of memory, and of a step of a paced body."""
_ARENA: Final = 64 << 30
"""Address space for bodies; memory is taken when it is first written."""
_NORESERVE: Final = 0x4000  # MAP_NORESERVE of Linux, which Python does not name
_POPULATE: Final = 23  # MADV_POPULATE_WRITE, likewise
HOLD_S: Final = 30.0
_HEAD_MOST: Final = 64 << 10
_DATE: Final = "Thu, 01 Jan 2026 00:00:00 GMT"
_ISO: Final = "2026-01-01T00:00:00.000Z"
_SPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Treatment of the clients."""

    port: int = 0
    bytes_per_s: float = 0.0
    """Of each connection and direction; 0 for no limit."""
    latency_s: float = 0.0
    """Between a request and its answer."""
    slow_every: int = 0
    """One of so many requests is answered `slow_s` later, the tenth first; 0 for none."""
    slow_s: float = 0.0
    busy_above: int = 0
    """Requests on their way above which one is answered 503 SlowDown; 0 for none."""
    ready_bytes: int = 0
    """Memory to take before the first connection; otherwise each new page costs its first body."""
    file: str = ""
    """Where bodies lie, for more of them than memory holds; empty for memory."""
    busy_rate: float = 0.0
    """Requests a second above which one is answered 503 SlowDown; 0 for none. A second's worth
    may come at once."""
    hold: dict[str, int] = field(default_factory=dict)
    """Method -> number of requests for packs that have to be on their way at once before the first
    of them is answered. The server gives up after `HOLD_S`, and holds none after that."""


@dataclass(slots=True)
class Counts:
    """Figures of what was served."""

    requests: dict[str, int] = field(default_factory=dict)
    """By method."""
    kinds: dict[str, int] = field(default_factory=dict)
    """By operation: get, put, part, list ..."""
    received: int = 0
    """Bytes of bodies, as they were sent, also of requests that were refused afterwards."""
    sent: int = 0
    busy: int = 0
    slow: int = 0
    connections: int = 0
    """On which a request came since the counts began."""
    at_once: int = 0
    """Most requests that were on their way at once."""


# --- bodies ---------------------------------------------------------------------------------------
class Arena:
    """Memory for bodies, in blocks that are used again: a new page costs more than its bytes."""

    def __init__(self, ready_bytes: int = 0, file: str = "") -> None:
        if file:
            with Path(file).open("w+b") as opened:
                opened.truncate(_ARENA)
                memory = mmap.mmap(opened.fileno(), _ARENA)
        else:
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            memory = mmap.mmap(-1, _ARENA, flags=kind)
            memory.madvise(mmap.MADV_HUGEPAGE)
        if ready_bytes:
            memory.madvise(_POPULATE, 0, ready_bytes)
        self.view = memoryview(memory)
        self._free: deque[int] = deque()  # its calls are atomic
        self._new = itertools.count(0, _BLOCK)

    def take(self) -> int:
        """Return the offset of a block that nothing uses."""
        try:
            return self._free.popleft()
        except IndexError:
            return next(self._new)

    def give(self, blocks: list[int]) -> None:
        """Take blocks back."""
        self._free.extend(blocks)


class Body:
    """Bytes in blocks of an arena, returned to it when the last reference is gone."""

    def __init__(self, arena: Arena) -> None:
        self.size = 0
        self._arena = arena
        self._blocks: list[int] = []

    def __del__(self) -> None:
        self._arena.give(self._blocks)

    def room(self, most: int) -> memoryview:
        """Return the memory behind the end, up to the end of a block; :meth:`grow` follows."""
        used = self.size % _BLOCK
        if not used:
            self._blocks.append(self._arena.take())
        at = self._blocks[-1] + used
        return self._arena.view[at : at + min(most, _BLOCK - used)]

    def grow(self, size: int) -> None:
        """Count bytes that were written into the room."""
        self.size += size

    def spans(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a range; adjacent blocks as one."""
        while begin < end:
            place, within = divmod(begin, _BLOCK)
            low = self._blocks[place] + within
            high, begin = low - within + _BLOCK, begin - within + _BLOCK
            while begin < end and self._blocks[begin // _BLOCK] == high:
                high, begin = high + _BLOCK, begin + _BLOCK
            yield self._arena.view[low : high - max(0, begin - end)]


class Object(NamedTuple):
    """A stored object: the bodies of its parts, in order."""

    bodies: tuple[Body, ...]
    size: int
    tag: str


class Reply(NamedTuple):
    """An answer: a text, or a range of an object."""

    status: int
    headers: dict[str, str]
    text: bytes = b""
    stored: Object | None = None
    begin: int = 0
    end: int = 0


@dataclass(slots=True)
class Request:
    """A request with its body."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Body

    @property
    def path(self) -> str:
        """Bucket and key."""
        return f"{self.bucket}/{self.key}"

    @property
    def kind(self) -> str:
        """Name of the operation."""
        if not self.key:
            return "list" if self.method == "GET" else f"bucket {self.method.lower()}"
        names = {"uploads": "create", "uploadId": "complete"} if self.method == "POST" else {}
        names |= {"uploadId": "part"} if self.method == "PUT" else {}
        names |= {"uploadId": "abort"} if self.method == "DELETE" else {}
        found = [name for word, name in names.items() if word in self.query]
        return found[0] if found else self.method.lower()


# --- one connection -------------------------------------------------------------------------------
class Line:
    """Bytes that come from a client, through a small buffer for everything but bodies."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._buffer = bytearray()

    def until(self, mark: bytes) -> bytes:
        """Return what comes before a mark, and drop the mark; raise when the client has left."""
        while (at := self._buffer.find(mark)) < 0:
            more = self._client.recv(_HEAD_MOST)
            if not more or len(self._buffer) > _HEAD_MOST:
                raise ConnectionError
            self._buffer += more
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    def fill(self, view: memoryview) -> None:
        """Fill a view."""
        ready = min(len(view), len(self._buffer))
        view[:ready] = self._buffer[:ready]
        del self._buffer[:ready]
        while ready < len(view):
            count = self._client.recv_into(view[ready:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError
            ready += count


class Clock:
    """Holds the reading of one body back to a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._began = time.monotonic()

    def wait(self, size: int) -> None:
        """Wait until so many bytes are due."""
        if self._rate:
            pause = self._began + size / self._rate - time.monotonic()
            if pause > 0:
                time.sleep(pause)


class Server:
    """The objects of all buckets, and the connections."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.arena = Arena(pace.ready_bytes, pace.file)
        self.objects: dict[str, Object] = {}
        self.parts: dict[str, dict[int, Body]] = {}
        self.counts = Counts()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.held: Counter[str] = Counter()
        self.busy = 0
        self.credit, self.credited = pace.busy_rate, time.monotonic()
        self.tags = itertools.count(1)

    def serve(self) -> None:
        """Accept connections for ever."""
        listener = socket.create_server(("127.0.0.1", self.pace.port), backlog=512)
        # Before accepting: the window is agreed on with the first packet. Two steps of a paced
        # body: the reader finds each one complete, and sleeps for the rest of its time.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _BLOCK)
        while True:
            client, _ = listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        line, rate, counted = Line(client), 0.0, None
        with client:
            while True:
                try:
                    head = line.until(b"\r\n\r\n").decode("latin-1")
                    if rate != self.pace.bytes_per_s:
                        rate = self.pace.bytes_per_s
                        client.setsockopt(socket.SOL_SOCKET, _PACING, int(rate) or 0xFFFFFFFF)
                    if head.split(" ", 2)[1].startswith("/-/"):
                        self._own(client, line, head)
                    else:
                        first, counted = counted is not self.counts, self.counts
                        if not self._one(client, line, head, first=first):
                            return
                except OSError:  # the client has left
                    return

    def _one(self, client: socket.socket, line: Line, head: str, *, first: bool) -> bool:
        """Serve one request; return whether the connection goes on."""
        request = self._parsed(head)
        slow, full = self._arrived(request, first=first)
        try:
            expects = "expect" in request.headers
            if expects and not full:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if not (expects and full):
                self._receive(line, request)
            time.sleep(self.pace.latency_s + (self.pace.slow_s if slow else 0.0))
            self._hold(request)
            reply = _error(503, "SlowDown") if full else self._answer(request)
            self._send(client, request.method, reply)
        finally:
            with self.lock:
                self.busy -= 1
        return request.headers.get("connection", "").lower() != "close"

    def _parsed(self, head: str) -> Request:
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        address = urlsplit(target)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        found = parse_qs(address.query, keep_blank_values=True)
        query = {name: values[0] for name, values in found.items()}
        return Request(method, bucket, key, query, headers, Body(self.arena))

    def _arrived(self, request: Request, *, first: bool) -> tuple[bool, bool]:
        """Count a request; return whether it is a slow one, and whether it is one too many."""
        pace, now = self.pace, time.monotonic()
        with self.lock:
            counts = self.counts
            for table, name in ((counts.requests, request.method), (counts.kinds, request.kind)):
                table[name] = table.get(name, 0) + 1
            counts.connections += first
            self.busy += 1
            counts.at_once = max(counts.at_once, self.busy)
            full = bool(pace.busy_above) and self.busy > pace.busy_above
            if pace.busy_rate:
                earned = (now - self.credited) * pace.busy_rate
                self.credit, self.credited = min(pace.busy_rate, self.credit + earned), now
                full = full or self.credit < 1
                self.credit -= not full
            number = sum(counts.requests.values())
            slow = bool(pace.slow_every) and number % pace.slow_every == min(
                10, pace.slow_every - 1
            )
            counts.busy += full
            counts.slow += slow
        return slow, full

    def _hold(self, request: Request) -> None:
        """Wait until as many requests for packs are on their way as the pace says."""
        with self.lock:
            pace, method = self.pace, request.method
            if method not in pace.hold or "/packs/" not in request.path:
                return
            self.held[method] += 1
            if self.held[method] >= pace.hold[method] or not self.changed.wait_for(
                lambda: method not in pace.hold, HOLD_S
            ):
                pace.hold.pop(method, None)
                self.changed.notify_all()
            self.held[method] -= 1

    def _receive(self, line: Line, request: Request) -> None:
        """Read the body, no faster than the rate."""
        headers, body = request.headers, request.body
        clock = Clock(self.pace.bytes_per_s)
        framed = "aws-chunked" in headers.get("content-encoding", "")
        if framed or "chunked" in headers.get("transfer-encoding", ""):
            while size := int(line.until(b"\r\n").split(b";")[0], 16):
                self._take(line, body, size, clock)
                line.until(b"\r\n")
            while line.until(b"\r\n"):
                pass  # a checksum behind the data
        else:
            self._take(line, body, int(headers.get("content-length", 0)), clock)
        with self.lock:
            self.counts.received += body.size

    def _take(self, line: Line, body: Body, size: int, clock: Clock) -> None:
        while size:
            view = body.room(size)
            line.fill(view)
            body.grow(len(view))
            size -= len(view)
            clock.wait(body.size)

    def _send(self, client: socket.socket, method: str, reply: Reply) -> None:
        size = reply.end - reply.begin if reply.stored else len(reply.text)
        lines = [f"HTTP/1.1 {reply.status} X", f"Date: {_DATE}", "x-amz-request-id: 1"]
        if reply.status != 204:
            lines.append(f"Content-Length: {size}")
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        text = b"" if method == "HEAD" else reply.text
        client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode() + text)
        if method == "HEAD" or reply.stored is None:
            return
        at = 0
        for body in reply.stored.bodies:
            low, high = max(reply.begin - at, 0), min(reply.end - at, body.size)
            for span in body.spans(low, high) if low < high else ():
                with self.lock:
                    self.counts.sent += len(span)  # before: who has received it may ask at once
                client.sendall(span)
            at += body.size

    # --- operations -------------------------------------------------------------------------------

    def _own(self, client: socket.socket, line: Line, head: str) -> None:
        """Serve a request of the server's own, which is neither paced nor counted."""
        request = self._parsed(head)
        body = bytearray(int(request.headers.get("content-length", 0)))
        line.fill(memoryview(body))
        with self.lock:
            told = json.dumps(asdict(self.counts)).encode()
            if request.key == "pace":
                self.pace = replace(Pace(**json.loads(body)), port=self.pace.port)
            if request.key == "pace" or request.method == "POST":
                self.counts = Counts()
                self.credit, self.credited = self.pace.busy_rate, time.monotonic()
            elif request.key == "objects":
                self.objects.clear()
                self.parts.clear()
        self._send(client, request.method, Reply(200, {}, told))

    def _answer(self, request: Request) -> Reply:
        if not request.key:
            return self._on_bucket(request)
        if request.method in {"GET", "HEAD"}:
            return self._get(request)
        if request.method == "PUT":
            return self._put(request)
        with self.lock:
            if request.method == "POST":
                return self._multipart(request)
            self.parts.pop(request.query.get("uploadId", ""), None)
            if "uploadId" not in request.query:
                self.objects.pop(request.path, None)
        return Reply(204, {})

    def _put(self, request: Request) -> Reply:
        query, body = request.query, request.body
        tag = f'"{next(self.tags):032x}"'
        with self.lock:
            if source := request.headers.get("x-amz-copy-source"):
                found = self.objects.get(unquote(source).lstrip("/"))
                if found is None:
                    return _error(404, "NoSuchKey")
                self.objects[request.path] = found._replace(tag=tag)
                times = f"<LastModified>{_ISO}</LastModified><ETag>{escape(tag)}</ETag>"
                return Reply(200, {}, _xml("CopyObjectResult", times))
            if "uploadId" in query:
                if query["uploadId"] not in self.parts:
                    return _error(404, "NoSuchUpload")
                self.parts[query["uploadId"]][int(query["partNumber"])] = body
            elif not self._may_put(request):
                return _error(412, "PreconditionFailed")
            else:
                self.objects[request.path] = Object((body,), body.size, tag)
        return Reply(200, {"ETag": tag})

    def _may_put(self, request: Request) -> bool:
        return request.headers.get("if-none-match") != "*" or request.path not in self.objects

    def _multipart(self, request: Request) -> Reply:
        """Begin or complete an upload, or delete many objects."""
        where = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        if "uploads" in request.query:
            name = uuid.uuid4().hex
            self.parts[name] = {}
            text = f"{where}<UploadId>{name}</UploadId>"
            return Reply(200, {}, _xml("InitiateMultipartUploadResult", text))
        parts = self.parts.get(request.query["uploadId"])
        if parts is None:
            return _error(404, "NoSuchUpload")
        if not self._may_put(request):
            return _error(412, "PreconditionFailed")
        named = [int(found.text or 0) for found in _found(request.body, "PartNumber")]
        if not named or not set(named) <= set(parts) or named != sorted(named):
            return _error(400, "InvalidPart")
        bodies = tuple(parts[number] for number in named)
        tag = f'"{next(self.tags):032x}-{len(bodies)}"'
        del self.parts[request.query["uploadId"]]
        self.objects[request.path] = Object(bodies, sum(body.size for body in bodies), tag)
        text = f"{where}<ETag>{escape(tag)}</ETag>"
        return Reply(200, {}, _xml("CompleteMultipartUploadResult", text))

    def _get(self, request: Request) -> Reply:
        with self.lock:
            found = self.objects.get(request.path)
        if found is None:
            return _error(404, "NoSuchKey")
        if request.headers.get("if-match", found.tag) not in {found.tag, "*"}:
            return _error(412, "PreconditionFailed")
        about = {"Last-Modified": _DATE, "ETag": found.tag, "Accept-Ranges": "bytes"}
        about["Content-Type"] = "binary/octet-stream"
        if not (span := request.headers.get("range", "")):
            return Reply(200, about, stored=found, end=found.size)
        low, _, high = span.removeprefix("bytes=").partition("-")
        begin = int(low) if low else max(0, found.size - int(high))
        end = min(found.size, int(high) + 1) if high and low else found.size
        if begin >= found.size:
            return _error(416, "InvalidRange")
        about["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        return Reply(206, about, stored=found, begin=begin, end=end)

    def _on_bucket(self, request: Request) -> Reply:
        if "location" in request.query:
            return Reply(200, {}, _xml("LocationConstraint", ""))
        if "delete" in request.query:
            names = [found.text or "" for found in _found(request.body, "Key")]
            with self.lock:
                for name in names:
                    self.objects.pop(f"{request.bucket}/{name}", None)
            text = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
            return Reply(200, {}, _xml("DeleteResult", text))
        if request.method == "GET":
            return self._listing(request)
        return Reply(204 if request.method == "DELETE" else 200, {})

    def _listing(self, request: Request) -> Reply:
        query, inside = request.query, f"{request.bucket}/"
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        most = int(query.get("max-keys", 1000))
        with self.lock:
            sizes = {
                name.removeprefix(inside): (found.size, found.tag)
                for name, found in self.objects.items()
                if name.startswith(inside + prefix)
            }
        names: dict[str, None] = {}
        for name in sorted(sizes):
            rest, mark, _ = name.removeprefix(prefix).partition(cut) if cut else (name, "", "")
            names[prefix + rest + mark if mark else name] = None
        found = [name for name in names if name > after]
        page, more = found[:most], len(found) > most
        text = f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
        text += f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{most}</MaxKeys>"
        text += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        text += "".join(_entry(name, sizes.get(name)) for name in page)
        return Reply(200, {"Content-Type": "application/xml"}, _xml("ListBucketResult", text))


def _entry(name: str, about: tuple[int, str] | None) -> str:
    if about is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    size, tag = about
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>{_ISO}</LastModified>"
        f"<ETag>{escape(tag)}</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _error(status: int, code: str) -> Reply:
    kind = {"Content-Type": "application/xml"}
    return Reply(
        status, kind, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    )


def _xml(name: str, text: str) -> bytes:
    return f'<?xml version="1.0"?><{name} xmlns="{_SPACE}">{text}</{name}>'.encode()


def _found(body: Body, name: str) -> list[Any]:
    """Return the elements of a name in a small body of XML."""
    text = b"".join(body.spans(0, body.size))
    return [one for one in ET.fromstring(text).iter() if one.tag.endswith(name)]  # noqa: S314 - a test's


if __name__ == "__main__":
    Server(Pace(**json.loads(sys.argv[1]))).serve()
