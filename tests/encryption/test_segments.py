"""Segments against a plain model: sizes, ranges, writes; the bytes by primitives alone."""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given
from hypothesis import strategies as st
from simulated_environment import SimulatedEnvironment

from ckptstore import limits
from ckptstore.backends.base import ObjectInfo
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.scatter import Scatter
from ckptstore.backends.sealing import DataKey, Sealer, UserKey
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import CorruptObjectError
from ckptstore.format.segments import HEADER_BYTES, TAG_BYTES, SegmentLayout, nonce
from ckptstore.testing.side_door import pattern

SEGMENT = 4096
LAYOUT = SegmentLayout(segment_bytes=SEGMENT)
near_borders = st.one_of(
    st.integers(0, 5 * SEGMENT),
    st.builds(lambda k, d: max(0, k * SEGMENT + d), st.integers(0, 4), st.integers(-20, 20)),
)


class Asked(WrapperBackend):
    """Notes what is asked of the storage."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.ranges: list[tuple[int, int]] = []
        self.stats = 0

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.ranges.append((offset, sum(len(buffer) for buffer in buffers)))
        self.inner.read_into(key, offset, buffers)

    def stat(self, key: str) -> ObjectInfo:
        self.stats += 1
        return self.inner.stat(key)


def encrypted(segment_bytes: int = SEGMENT) -> tuple[EncryptedBackend, Asked]:
    """Return an encrypted backend on memory of its own, and what is below it."""
    below = Asked(MemoryBackend(uuid.uuid4().hex))
    return EncryptedBackend(below, DataKey(b"k" * 32), segment_bytes=segment_bytes), below


@given(size=near_borders, segment=st.sampled_from([4096, 5000, 65536]))
def test_sizes_go_there_and_back(size: int, segment: int) -> None:
    """The size without encryption follows from the size with it, exactly, for every size."""
    layout = SegmentLayout(segment_bytes=segment)
    sealed = layout.sealed_bytes(size)
    assert layout.plain_bytes(sealed) == layout.check(sealed, where="x") == size
    assert sealed == HEADER_BYTES + size + TAG_BYTES * max(1, -(-size // segment))


@given(sealed=st.integers(0, 6 * (SEGMENT + TAG_BYTES)))
def test_a_size_is_either_somebodys_or_refused(sealed: int) -> None:
    """Every size of a stored object is that of exactly one size without encryption, or of none."""
    fits = [
        n
        for n in range(LAYOUT.plain_bytes(sealed), LAYOUT.plain_bytes(sealed) + 2)
        if LAYOUT.sealed_bytes(n) == sealed
    ]
    if fits:
        assert LAYOUT.check(sealed, where="x") == fits[0]
    else:
        with pytest.raises(CorruptObjectError, match="cut off"):
            LAYOUT.check(sealed, where="x")
    assert 0 <= LAYOUT.plain_bytes(sealed) <= sealed


@given(sizes=st.lists(st.integers(0, 4 * (SEGMENT + TAG_BYTES)), min_size=2, max_size=2))
def test_more_bytes_are_never_listed_as_less(sizes: list[int]) -> None:
    """Sizes in a listing are in the order of what is stored, also of what was cut off."""
    small, large = sorted(sizes)
    assert LAYOUT.plain_bytes(small) <= LAYOUT.plain_bytes(large)


def test_nonces_of_an_object_differ() -> None:
    """Number and end are both in the nonce."""
    nonces = {nonce(index, last=last) for index in range(1000) for last in (False, True)}
    assert len(nonces) == 2000
    assert {len(one) for one in nonces} == {12}
    assert nonce(2**32, last=True) == (2**40 + 1).to_bytes(12, "big")


@given(
    size=near_borders,
    ranges=st.lists(st.tuples(near_borders, near_borders), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 3 * SEGMENT), max_size=4),
)
def test_ranges_are_those_of_a_plain_object(
    size: int, ranges: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Any range, into any buffers, is what a plain object gives; beyond its end, an error."""
    backend, _ = encrypted()
    data = pattern(size)
    backend.put("packs/ab/x.pack", data)
    for offset, count in ranges:
        edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
        buffers = [memoryview(bytearray(b - a)) for a, b in pairwise(edges)] or [
            memoryview(bytearray(0))
        ]
        if offset + count > size:
            with pytest.raises(CorruptObjectError):
                backend.read_into("packs/ab/x.pack", offset, buffers)
        else:
            backend.read_into("packs/ab/x.pack", offset, buffers)
            assert b"".join(buffers) == data[offset : offset + count]


@given(parts=st.lists(st.lists(st.integers(0, 2 * SEGMENT + 7), max_size=3), max_size=6))
def test_a_writer_writes_what_it_is_given(parts: list[list[int]]) -> None:
    """However an object is cut into writes, it is the object; its size is the plain one."""
    backend, _ = encrypted()
    data = pattern(sum(map(sum, parts)))
    at = 0
    with backend.open_writer("packs/ab/x.pack") as writer:
        for sizes in parts:
            buffers = []
            for count in sizes:
                buffers.append(bytearray(data[at : at + count]))
                at += count
            writer.write(buffers)
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))  # may be reused
        writer.commit()
    assert backend.get("packs/ab/x.pack", bytes_max=len(data)) == data
    (info,) = backend.list("")
    assert info.size_bytes == backend.stat(info.key).size_bytes == len(data)


def test_only_touched_segments_are_read() -> None:
    """A range costs its segments, and once an object its size and its salt."""
    backend, below = encrypted(limits.SEGMENT_BYTES_DEFAULT)
    segment = limits.SEGMENT_BYTES_DEFAULT
    backend.put("a", pattern(64 * segment))
    out = memoryview(bytearray(10))
    backend.read_into("a", 40 * segment + 5, [out])
    step = segment + TAG_BYTES
    assert below.stats == 1
    assert below.ranges == [(0, HEADER_BYTES), (HEADER_BYTES + 40 * step, step)]
    below.ranges.clear()
    backend.read_into("a", 41 * segment - 5, [out])
    assert below.stats == 1
    assert below.ranges == [(HEADER_BYTES + 40 * step, 2 * step)]


def test_the_beginning_of_an_object_comes_with_its_header() -> None:
    """Who begins near the front pays one request for size, and one for header and range."""
    backend, below = encrypted()
    backend.put("a", pattern(10 * SEGMENT))
    out = memoryview(bytearray(SEGMENT))
    backend.read_into("a", 64, [out])
    assert out == pattern(10 * SEGMENT)[64 : 64 + SEGMENT]
    assert below.ranges == [(0, HEADER_BYTES + 2 * (SEGMENT + TAG_BYTES))]
    assert below.stats == 1


def test_reads_larger_than_a_request_are_cut() -> None:
    """No request is larger than the storage's own limit and two segments."""
    backend, below = encrypted(limits.SEGMENT_BYTES_DEFAULT)
    size = 40 * limits.MIB
    data = pattern(size)
    backend.put("a", data)
    out = memoryview(bytearray(size - 17))
    backend.read_into("a", 17, [out[: 5 * limits.MIB], out[5 * limits.MIB :]])
    assert out == data[17:]
    most = below.capabilities.read_bytes_max + 3 * (limits.SEGMENT_BYTES_DEFAULT + TAG_BYTES)
    assert len(below.ranges) > 1
    assert all(count <= most for _, count in below.ranges)


class Gate(WrapperBackend):
    """Holds reads until so many are there as may be, and notes how much memory they have."""

    def __init__(self, inner: MemoryBackend, at_once: int) -> None:
        super().__init__(inner)
        self.at_once = at_once
        self.held = self.peak = self.most = 0
        self.reads = 0
        self.lock = threading.Condition()

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        size = sum(memoryview(buffer.obj).nbytes for buffer in buffers)
        with self.lock:
            self.reads += 1
            self.held += size
            self.peak = max(self.peak, self.held)
            self.most = max(self.most, self.reads)
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: self.most >= self.at_once, timeout=600)
        self.inner.read_into(key, offset, buffers)
        with self.lock:
            self.reads -= 1
            self.held -= size


@pytest.mark.parametrize("threads", [3, 12])
def test_encrypted_bytes_in_flight_are_bounded(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """However many threads read: so many at once and no more, each with a request's memory."""
    monkeypatch.setattr(limits, "ENCRYPTED_READS_MAX", 4)
    memory = MemoryBackend(uuid.uuid4().hex)
    size = 5 * limits.MIB
    key = DataKey(b"k" * 32)
    EncryptedBackend(memory, key).put("a", pattern(size))
    gate = Gate(memory, min(threads, 4))
    backend = EncryptedBackend(gate, key)

    def read(_: int) -> bool:
        out = memoryview(bytearray(size))
        backend.read_into("a", 0, [out])
        return out == pattern(size)

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(read, range(threads)))
    assert gate.most == min(threads, 4)
    assert gate.peak <= backend.read_memory_bytes
    assert gate.peak <= 4 * (memory.capabilities.read_bytes_max + 2 * limits.MIB)


def test_what_is_kept_about_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ranges of many objects keeps no more than the limit of their heads."""
    monkeypatch.setattr(limits, "ENCRYPTED_HEADS_MAX", 3)
    backend, below = encrypted()
    for index in range(10):
        backend.put(f"a/{index}", b"x" * 10)
        backend.read_into(f"a/{index}", 0, [memoryview(bytearray(5))])
        assert len(backend._heads) <= 3
    assert below.stats == 10


def test_an_object_that_was_replaced_is_read_anew() -> None:
    """What is known of an object is dropped where it does not fit: a repair replaces commits."""
    backend, below = encrypted()
    out = memoryview(bytearray(4))
    backend.put("a", b"old bytes")
    backend.read_into("a", 0, [out])
    second = EncryptedBackend(below.inner, DataKey(b"k" * 32), segment_bytes=SEGMENT)
    second.put("a", b"new")
    second.put("a", b"newer bytes")
    backend.read_into("a", 0, [out])
    assert bytes(out) == b"newe"


def test_nothing_but_the_size_of_an_object_is_told_otherwise() -> None:
    """Class and time come from the storage; so do the classes of a storage that has some."""

    class Classed(WrapperBackend):
        def stat(self, key: str) -> ObjectInfo:
            return replace(self.inner.stat(key), storage_class="GLACIER", modified_at=5.0)

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            return (self.stat(info.key) for info in self.inner.list(prefix, after=after))

    below = Classed(MemoryBackend(uuid.uuid4().hex))
    backend = EncryptedBackend(below, DataKey(b"k" * 32), segment_bytes=SEGMENT)
    backend.put("packs/a", b"four")
    for told in (backend.stat("packs/a"), *backend.list("packs/")):
        assert told == replace(below.stat("packs/a"), size_bytes=4)
        assert told.storage_class == "GLACIER"


class Older:
    """AES-GCM as older versions of ``cryptography`` have it."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher

    def decrypt(self, nonce: bytes, data: memoryview, associated: None) -> bytes:
        """Return the bytes anew: there is no way to say where they are to go."""
        return self._cipher.decrypt(nonce, data, associated)


def test_older_versions_of_cryptography_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library cannot decrypt into memory that is given, the bytes are copied there."""
    backend, _ = encrypted()
    data = pattern(5 * SEGMENT + 3)
    backend.put("a", data)
    make = DataKey.sealer

    def sealer(self: DataKey, key: str, salt: bytes) -> Sealer:
        made = make(self, key, salt)
        made._cipher = cast("AESGCM", Older(made._cipher))
        return made

    monkeypatch.setattr(DataKey, "sealer", sealer)
    out = memoryview(bytearray(5 * SEGMENT))
    backend.read_into("a", 2, [out])
    assert out == data[2 : 5 * SEGMENT + 2]
    raw = backend.inner.get("a", bytes_max=10**6)
    backend.inner.put("a", raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptObjectError, match="does not decrypt"):
        backend.read_into("a", 3, [out])


@given(
    sizes=st.lists(st.integers(0, 9), max_size=6),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=12),
)
def test_bytes_come_where_they_would_be_fed(
    sizes: list[int], steps: list[tuple[bool, int]]
) -> None:
    """To take a place and fill it is the same as to feed, for any buffers."""
    ours = [memoryview(bytearray(size)) for size in sizes]
    theirs = [memoryview(bytearray(size)) for size in sizes]
    one, two = Scatter(ours), Scatter(theirs)
    number = 0
    for take, count in steps:
        data = bytes((number + i) % 251 + 1 for i in range(count))
        number += count
        place = one.take(count) if take else None
        if place is None:
            one.feed(data)
        else:
            place[:] = data
        two.feed(data)
        assert one.left == two.left
        assert b"".join(ours) == b"".join(theirs)


STORE_ID = "0123456789abcdef0123456789abcdef"


def hkdf(material: bytes, salt: bytes, info: bytes, count: int) -> bytes:
    """Return what RFC 5869 says, from HMAC-SHA256 alone; `count` at most 32."""
    extract = HMAC(salt or bytes(32), SHA256())
    extract.update(material)
    expand = HMAC(extract.finalize(), SHA256())
    expand.update(info + b"\x01")
    return expand.finalize()[:count]


def test_derivation_has_known_answers() -> None:
    """What follows from keys of fixed bytes is fixed for good: literals, and RFC 5869 by hand."""
    user, data = bytes(range(32)), bytes(range(32, 64))
    assert UserKey(user).id == hkdf(user, b"", b"ckptstore key id v1", 8).hex()
    assert UserKey(user).id == "f2df2c14f043681a"
    check = hkdf(data, bytes.fromhex(STORE_ID), b"ckptstore key check v1", 16).hex()
    assert DataKey(data).check(STORE_ID) == check == "39bd43a574b825b37190a36435073528"


def sealed_by_hand(data_key: bytes, key: str, salt: bytes, plain: bytes, segment: int) -> bytes:
    """Return an object as docs/reference/format-v1.md says it lies."""
    cipher = AESGCM(hkdf(data_key, salt, b"ckptstore object v1\n" + key.encode(), 32))
    cuts = [plain[at : at + segment] for at in range(0, len(plain), segment)] or [b""]
    sealed = b"CKPTENC1" + salt
    for index, part in enumerate(cuts):
        last = index + 1 == len(cuts)
        number = struct.pack(">IQ", 0, index * 256 + last)
        sealed += cipher.encrypt(number, part, None)
    return sealed


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8192, 10_000])
def test_objects_are_these_bytes(size: int) -> None:
    """An object is what the page says, byte for byte, put whole or written in parts."""
    data_key, key, plain = (
        bytes(range(32, 64)),
        "packs/ab/x.pack",
        bytes(i % 253 for i in range(size)),
    )
    environment = SimulatedEnvironment(7)
    salt = bytes.fromhex(SimulatedEnvironment(7).random_hex(32))
    wanted = sealed_by_hand(data_key, key, salt, plain, 4096)
    memory = MemoryBackend(f"known-answers-{size}")
    backend = EncryptedBackend(
        memory, DataKey(data_key), segment_bytes=4096, environment=environment
    )
    backend.put(key, plain)
    assert memory.objects[key].data == wanted
    memory.objects[key] = memory.objects[key]._replace(data=b"")
    backend = EncryptedBackend(
        memory, DataKey(data_key), segment_bytes=4096, environment=SimulatedEnvironment(7)
    )
    with backend.open_writer(key) as writer:
        for at in range(0, size, 999):
            writer.write(plain[at : at + 999])
        writer.commit()
    assert memory.objects[key].data == wanted
    assert backend.get(key, bytes_max=size) == plain
