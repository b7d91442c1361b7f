"""Conformance of single objects: write, read, stat, delete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.backends.base import Backend, Buffer, Capabilities, PutIfAbsent
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    InvalidKeyError,
    NotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from ckptstore.limits import MIB
from ckptstore.testing.side_door import SideDoor, pattern

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    ".tmp-1",
    "a/.hidden",
    "A",
    "a b",
    "a\n",
    "a\0b",
    "a\\b",
    "ä",
    "-a",
    "a" * 600,
]


class ObjectConformance(SideDoor):
    """Checks every effect of a write through the side door, and the reverse."""

    def test_put_stores_exactly_the_bytes(self, backend: Backend) -> None:
        """``put`` stores exactly its bytes, under the key and nothing beside it."""
        data = pattern(100_001)
        backend.put("packs/ab/one.pack", data)
        assert self.raw_read("packs/ab/one.pack") == data
        assert self.raw_keys() == {"packs/ab/one.pack"}

    def test_get_returns_what_is_stored(self, backend: Backend) -> None:
        """``get`` returns the stored bytes, whichever client stored them."""
        self.raw_write("a/b.json", b"from somewhere else")
        assert backend.get("a/b.json", bytes_max=100) == b"from somewhere else"

    def test_empty_object(self, backend: Backend) -> None:
        """An object may be empty."""
        backend.put("empty", b"")
        assert self.raw_read("empty") == b""
        assert backend.get("empty", bytes_max=0) == b""
        assert backend.stat("empty").size_bytes == 0

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_every_buffer(self, backend: Backend, kind: type) -> None:
        """Bytes, bytearrays and memoryviews are all taken."""
        data: Buffer = kind(pattern(1000))
        backend.put("a/put", data)
        backend.put_if_absent("a/create", data)
        assert self.raw_read("a/put") == self.raw_read("a/create") == pattern(1000)

    def test_put_again_is_no_error(self, backend: Backend) -> None:
        """A ``put`` that is repeated with the same bytes succeeds."""
        backend.put("a/b", b"same")
        backend.put("a/b", b"same")
        assert self.raw_read("a/b") == b"same"

    @pytest.mark.parametrize("other", [b"else", b"", b"longer than the first"])
    def test_put_of_other_content(self, backend: Backend, other: bytes) -> None:
        """A taken key is replaced whole, or stays and the caller gets an error; nothing between.

        So a caller without an error finds its own bytes.
        """
        backend.put("a/b", b"same")
        try:
            backend.put("a/b", other)
        except ObjectExistsError:
            expected = b"same"
        else:
            expected = other
        assert self.raw_read("a/b") == expected
        assert backend.get("a/b", bytes_max=100) == expected
        assert self.raw_keys() == {"a/b"}

    def test_missing_object_is_not_found(self, backend: Backend) -> None:
        """Every read of a missing object raises the one not-found error."""
        with pytest.raises(ObjectNotFoundError):
            backend.get("no/such", bytes_max=10)
        with pytest.raises(ObjectNotFoundError):
            backend.read_into("no/such", 0, [memoryview(bytearray(1))])
        with pytest.raises(ObjectNotFoundError):
            backend.stat("no/such")

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        """The beginning of a key is not an object."""
        backend.put("a/b/c", b"x")
        with pytest.raises(NotFoundError):
            backend.get("a/b", bytes_max=10)
        with pytest.raises(NotFoundError):
            backend.stat("a")

    def test_get_is_bounded(self, backend: Backend) -> None:
        """An object of exactly ``bytes_max`` is returned, a larger one refused."""
        self.raw_write("a", pattern(1000))
        assert len(backend.get("a", bytes_max=1000)) == 1000
        with pytest.raises(CorruptObjectError):
            backend.get("a", bytes_max=999)

    @pytest.mark.parametrize(
        ("offset", "sizes"),
        [
            (0, [5000]),
            (0, [1]),
            (4999, [1]),
            (1234, [100, 1, 0, 1000]),
            (10, [0, 0]),
            (1, [1] * 2500),
            (4000, [300, 700]),
        ],
    )
    def test_ranges(self, backend: Backend, offset: int, sizes: list[int]) -> None:
        """Buffers are filled one after another from the offset on, in any number."""
        data = pattern(5000)
        self.raw_write("a/b", data)
        buffers = [memoryview(bytearray(size)) for size in sizes]
        backend.read_into("a/b", offset, buffers)
        assert b"".join(buffers) == data[offset : offset + sum(sizes)]

    @pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (99, 2), (5000, 10)])
    def test_truncated_object(self, backend: Backend, offset: int, size: int) -> None:
        """A range beyond the object's end is damage, not a short read."""
        self.raw_write("a/b", pattern(100))
        with pytest.raises(CorruptObjectError):
            backend.read_into("a/b", offset, [memoryview(bytearray(size))])

    def test_large_object(self, backend: Backend) -> None:
        """A large object comes back whole and in parts."""
        data = pattern(20 * MIB + 17)
        with backend.open_writer("packs/aa/large.pack") as writer:
            view = memoryview(data)
            for start in range(0, len(data), 3 * MIB):
                writer.write(view[start : start + 3 * MIB])
            writer.commit()
        assert self.raw_read("packs/aa/large.pack") == data
        assert backend.get("packs/aa/large.pack", bytes_max=len(data)) == data
        part = bytearray(7 * MIB)
        backend.read_into("packs/aa/large.pack", 11 * MIB + 3, [memoryview(part)])
        assert part == data[11 * MIB + 3 : 18 * MIB + 3]

    def test_stat(self, backend: Backend) -> None:
        """Size and time are the stored object's, the time by a clock near this machine's."""
        backend.put("a/b", pattern(321))
        info = backend.stat("a/b")
        assert (info.key, info.size_bytes) == ("a/b", 321)
        assert abs(info.modified_at - time.time_ns() / 1e9) < self.clock_skew_s

    def test_delete(self, backend: Backend) -> None:
        """A deleted object is gone for readers and from the storage; others stay."""
        backend.put("a/b", b"1")
        backend.put("a/c", b"2")
        backend.delete("a/b")
        assert self.raw_keys() == {"a/c"}
        with pytest.raises(ObjectNotFoundError):
            backend.get("a/b", bytes_max=10)

    def test_delete_is_idempotent(self, backend: Backend) -> None:
        """Deleting a missing or deleted object is no error."""
        backend.delete("never/was")
        backend.put("a", b"1")
        backend.delete("a")
        backend.delete("a")
        assert self.raw_keys() == set()

    def test_writer_takes_lists_and_reused_buffers(self, backend: Backend) -> None:
        """Parts are written in order; a buffer may be changed once ``write`` has returned."""
        buffer = bytearray(b"one")
        with backend.open_writer("a/b") as writer:
            writer.write(buffer)
            buffer[:] = b"two"
            writer.write([buffer, b"", memoryview(b"three")])
            buffer[:] = b"xxx"
            writer.commit()
        assert self.raw_read("a/b") == b"onetwothree"
        assert self.raw_keys() == {"a/b"}

    def test_writer_without_bytes(self, backend: Backend) -> None:
        """A writer without any bytes makes an empty object."""
        with backend.open_writer("a/b") as writer:
            writer.commit()
        assert self.raw_read("a/b") == b""

    def test_object_appears_at_commit(self, backend: Backend) -> None:
        """Before its commit an object is absent, for reads and in listings."""
        with backend.open_writer("a/b") as writer:
            writer.write(pattern(MIB))
            assert self.raw_read("a/b") is None
            assert list(backend.list("")) == []
            with pytest.raises(ObjectNotFoundError):
                backend.stat("a/b")
            writer.commit()
        assert [info.key for info in backend.list("")] == ["a/b"]

    def test_abort_leaves_nothing(self, backend: Backend) -> None:
        """After an abort, or a block without a commit, not even a temporary name is left."""
        writer = backend.open_writer("a/b")
        writer.write(pattern(MIB))
        writer.abort()
        writer.abort()
        with backend.open_writer("a/c") as second:
            second.write(b"x")
        assert self.raw_keys() == set()

    def test_writers_do_not_mix(self, backend: Backend) -> None:
        """Two open writers keep their bytes apart."""
        with backend.open_writer("a/1") as one, backend.open_writer("a/2") as two:
            for index in range(5):
                one.write(b"%d" % index)
                two.write(b"-%d" % index)
            one.commit()
            two.commit()
        assert (self.raw_read("a/1"), self.raw_read("a/2")) == (b"01234", b"-0-1-2-3-4")

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, backend: Backend, key: str) -> None:
        """Every method refuses a key that breaks the rules, and does nothing."""
        calls: list[Callable[[], object]] = [
            lambda: backend.put(key, b"x"),
            lambda: backend.put_if_absent(key, b"x"),
            lambda: backend.open_writer(key),
            lambda: backend.get(key, bytes_max=1),
            lambda: backend.read_into(key, 0, [memoryview(bytearray(1))]),
            lambda: backend.stat(key),
            lambda: backend.delete(key),
        ]
        for call in calls:
            with pytest.raises(InvalidKeyError):
                call()
        assert self.raw_keys() == set()

    def test_threads(self, backend: Backend) -> None:
        """Eight threads at once each read back their own bytes."""
        gate = threading.Barrier(8)

        def work(seed: int) -> bool:
            """Write and read back some objects; return whether all came back right."""
            gate.wait(30)
            good = True
            for index in range(4):
                key, data = f"packs/{seed:02}/{index}", pattern(10_000, seed * 10 + index)
                backend.put(key, data)
                part = bytearray(100)
                backend.read_into(key, 5000, [memoryview(part)])
                good &= part == data[5000:5100] and backend.get(key, bytes_max=10_000) == data
            return good

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        assert len(self.raw_keys()) == 32

    def test_it_tells_what_it_is(self, backend: Backend) -> None:
        """Name and capabilities are declared, and make sense."""
        assert backend.name == self.backend_name
        found = backend.capabilities
        assert isinstance(found, Capabilities)
        assert found.put_if_absent in {PutIfAbsent.ATOMIC, PutIfAbsent.UNKNOWN}
        assert found.pack_bytes >= MIB
        assert found.read_bytes_max >= MIB
        assert found.concurrency >= 1

    def test_no_credentials_show(self, backend: Backend) -> None:
        """Neither URL nor repr nor errors repeat the credentials."""
        texts = [backend.url, repr(backend), str(backend)]
        try:
            backend.get("no/such", bytes_max=1)
        except CkptStoreError as error:
            texts += [str(error), repr(error)]
        assert len(texts) == 5
        for secret in self.secrets:
            assert not any(secret in text for text in texts)

    def test_close_is_idempotent(self, backend: Backend) -> None:
        """A backend may be closed twice, used or not."""
        backend.put("a", b"1")
        backend.close()
        backend.close()
        assert self.raw_read("a") == b"1"
