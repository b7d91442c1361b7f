"""The tests that a backend must pass; :mod:`ckptstore.testing.side_door` shows their use."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue

import pytest

from ckptstore import errors
from ckptstore.backends.base import Backend, Capabilities, PutIfAbsent
from ckptstore.limits import MIB
from ckptstore.testing.side_door import SideDoor, calls_of, pattern

__all__ = [
    "BackendConformance",
    "CreateConformance",
    "ListingConformance",
    "ObjectConformance",
    "ProcessConformance",
]

THREADS = 8
ROUNDS = 8
CHILD_S = 60.0

BAD_KEYS = [
    *("", "/", "/a", "a/", "a//b"),
    *("..", "../a", "a/../b", "a/./b", ".tmp-1", "a/.hidden"),
    *("A", "a b", "a\n", "a\0b", "a\\b", "ä", "-a"),
    "a" * 600,
]
# Names whose order as folders differs from their order as text: "-" and "." sort before "/".
KEYS = [
    *("a-b/x", "a.b", "a/x", "a/y.json", "a/z/1", "a0"),
    *("commits/000000/000000000001.json", "commits/000000/000000000002.json"),
    *("commits/000001/000000001000.json", "packs/aa/1.pack", "packs/ab/2.pack", "store.json"),
]


class ObjectConformance(SideDoor):
    """Checks every effect of a write through the side door, and the reverse."""

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_stores_exactly_the_bytes(self, backend: Backend, kind: type) -> None:
        """``put`` stores exactly its bytes, under the key and nothing beside it."""
        data = pattern(100_001)
        backend.put("packs/ab/one.pack", kind(data))
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

    @pytest.mark.parametrize("other", [b"same", b"else", b"", b"longer than the first"])
    def test_put_of_other_content(self, backend: Backend, other: bytes) -> None:
        """A taken key is replaced whole, or stays and the caller gets an error; nothing between.

        So a caller without an error finds its own bytes, and one that repeats them has no error.
        """
        backend.put("a/b", b"same")
        try:
            backend.put("a/b", other)
        except errors.ObjectExistsError:
            expected = b"same"
            assert other != expected
        else:
            expected = other
        assert self.raw_read("a/b") == expected
        assert backend.get("a/b", bytes_max=100) == expected
        assert self.raw_keys() == {"a/b"}

    def test_missing_object_is_not_found(self, backend: Backend) -> None:
        """Every read of a missing object raises the one not-found error."""
        calls = calls_of(backend, "no/such")
        for name in ("get", "read_into", "stat"):
            with pytest.raises(errors.ObjectNotFoundError):
                calls[name]()

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        """The beginning of a key is not an object."""
        backend.put("a/b/c", b"x")
        with pytest.raises(errors.NotFoundError):
            backend.get("a/b", bytes_max=10)
        with pytest.raises(errors.NotFoundError):
            backend.stat("a")

    def test_get_is_bounded(self, backend: Backend) -> None:
        """An object of exactly ``bytes_max`` is returned, a larger one refused."""
        self.raw_write("a", pattern(1000))
        assert len(backend.get("a", bytes_max=1000)) == 1000
        with pytest.raises(errors.CorruptObjectError):
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
        with pytest.raises(errors.CorruptObjectError):
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
        with pytest.raises(errors.ObjectNotFoundError):
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
            with pytest.raises(errors.ObjectNotFoundError):
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
        for call in calls_of(backend, key).values():
            with pytest.raises(errors.InvalidKeyError):
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
        except errors.CkptStoreError as error:
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


class ListingConformance(SideDoor):
    """Compares listings with the objects that the side door stored."""

    def test_all_in_order(self, backend: Backend) -> None:
        """Everything is listed once, in the order of the whole keys, with its size."""
        for index, key in enumerate(reversed(KEYS)):
            self.raw_write(key, bytes(index))
        infos = list(backend.list(""))
        assert [info.key for info in infos] == sorted(KEYS)
        assert [info.size_bytes for info in infos] == list(range(len(KEYS)))[::-1]

    @pytest.mark.parametrize(
        "prefix", ["", "a", "a/", "a/z", "a/z/", "c", "commits/00000", "packs/a", "store.json", "z"]
    )
    def test_prefix_and_after(self, backend: Backend, prefix: str) -> None:
        """For each position to continue from, exactly the later keys of the prefix are listed."""
        for key in KEYS:
            self.raw_write(key, b"x")
        cuts = ["", *KEYS, "a/", "a/y", "b", "commits/0", "commits/000000/9", "packs/aa/0", "zz"]
        for after in cuts:
            found = [info.key for info in backend.list(prefix, after=after)]
            assert found == [key for key in KEYS if key.startswith(prefix) and key > after], after

    def test_nothing_there(self, backend: Backend) -> None:
        """A missing folder and an empty store are empty listings."""
        assert list(backend.list("")) == []
        assert list(backend.list("no/such/")) == []
        self.raw_write("a/b", b"x")
        assert list(backend.list("a/b/c")) == []

    def test_write_shows_at_once(self, backend: Backend) -> None:
        """A listing shows every object written, created or deleted before it, by any client."""
        for index in range(5):
            assert len(list(backend.list("a/"))) == 2 * index
            backend.put(f"a/{index}", b"x")
            assert len(list(backend.list("a/"))) == 2 * index + 1
            self.raw_write(f"a/{index}.other", b"x")
        backend.delete("a/0")
        listed = [info.key for info in backend.list("a/", after="a/3")]
        assert listed == ["a/3.other", "a/4", "a/4.other"]
        assert "a/0" not in {info.key for info in backend.list("a/")}

    def test_foreign_names_are_left_out(self, backend: Backend) -> None:
        """Temporary files and names that break the key rules are not listed."""
        for name in (".tmp-123", "a/.tmp-456", "a/B", "a/with space", ".hidden/x", "a/good"):
            self.raw_write(name, b"x")
        assert [info.key for info in backend.list("")] == ["a/good"]
        assert [info.key for info in backend.list("a/")] == ["a/good"]

    def test_listing_agrees_with_stat(self, backend: Backend) -> None:
        """Size and time in a listing are those of ``stat``."""
        backend.put("a/b", b"12345")
        (listed,) = backend.list("a/")
        looked = backend.stat("a/b")
        assert (listed.key, listed.size_bytes) == (looked.key, looked.size_bytes)
        assert abs(listed.modified_at - looked.modified_at) < 2

    @pytest.mark.parametrize("prefix", ["/", "a//", "..", ".tmp", "A", "a/../b", "a b"])
    def test_bad_prefixes_are_refused(self, backend: Backend, prefix: str) -> None:
        """A prefix that no key can begin with is refused."""
        with pytest.raises(errors.InvalidKeyError):
            list(backend.list(prefix))

    def test_listing_while_deleting(self, backend: Backend) -> None:
        """Objects may be deleted while they are listed."""
        for key in KEYS:
            backend.put(key, b"x")
        for info in backend.list(""):
            backend.delete(info.key)
        assert list(backend.list("")) == []


class CreateConformance(SideDoor):
    """Inherit only if the storage creates names atomically; the probe must agree."""

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_create(self, backend: Backend, kind: type) -> None:
        """A name that is free is created with exactly these bytes, and nothing beside it."""
        backend.put_if_absent("commits/1.json", kind(pattern(5000)))
        assert self.raw_read("commits/1.json") == pattern(5000)
        assert self.raw_keys() == {"commits/1.json"}

    def test_second_create_is_told(self, backend: Backend) -> None:
        """A taken name keeps its content, and the caller gets an error, even the first creator."""
        backend.put_if_absent("a", b"first")
        self.raw_write("b", b"other")
        for key in ("a", "b"):
            with pytest.raises(errors.ObjectExistsError):
                backend.put_if_absent(key, b"second")
        assert (self.raw_read("a"), self.raw_read("b")) == (b"first", b"other")
        assert self.raw_keys() == {"a", "b"}

    @pytest.mark.parametrize("data", [b"same", b""])
    def test_same_bytes_are_no_excuse(self, backend: Backend, data: bytes) -> None:
        """Even the same content loses, or none: exactly one caller must know that it was first."""
        backend.put_if_absent("a", data)
        with pytest.raises(errors.ObjectExistsError):
            backend.put_if_absent("a", data)
        assert self.raw_read("a") == data

    def test_create_after_delete(self, backend: Backend) -> None:
        """A deleted name is free again."""
        backend.put_if_absent("a", b"first")
        backend.delete("a")
        backend.put_if_absent("a", b"second")
        assert self.raw_read("a") == b"second"

    def test_create_is_seen_whole(self, backend: Backend) -> None:
        """A reader that reads all the time sees the whole object or none."""
        data = pattern(300_000)
        seen: list[bytes] = []
        done = threading.Event()

        def watch() -> None:
            """Read the object over and over."""
            while not done.is_set():
                try:
                    seen.append(backend.get("a", bytes_max=len(data)))
                except errors.ObjectNotFoundError:
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            backend.put_if_absent("a", data)
            backend.get("a", bytes_max=len(data))
        finally:
            done.set()
            watcher.join(CHILD_S)
        assert all(found == data for found in seen)
        assert not watcher.is_alive()

    def test_race_of_threads(self, backend: Backend) -> None:
        """Of many threads that create one name at once, exactly one wins, and its bytes stand."""
        gate = threading.Barrier(THREADS)

        def create(who: int, key: str) -> bool:
            """Create the object once all are ready; return whether it won."""
            gate.wait(CHILD_S)
            try:
                backend.put_if_absent(key, pattern(3000, who))
            except errors.ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(THREADS) as pool:
            for turn in range(ROUNDS):
                key = f"race/{turn}"
                calls = [pool.submit(create, who, key) for who in range(THREADS)]
                winners = [who for who, call in enumerate(calls) if call.result(CHILD_S)]
                assert len(winners) == 1
                assert self.raw_read(key) == pattern(3000, winners[0])
        assert len(self.raw_keys()) == ROUNDS


def create_all(backend: Backend, who: int, rounds: int, won: Queue[tuple[int, int]]) -> None:
    """Try to create one key a round, and report the rounds won; runs in a child process."""
    signal.alarm(int(CHILD_S))  # a child that hangs ends, whatever became of its parent
    for turn in range(rounds):
        try:
            backend.put_if_absent(f"race/{turn}", pattern(2000, who))
        except (errors.ObjectExistsError, errors.AmbiguousWriteError):
            continue
        won.put((turn, who))
    won.put((-1, who))


def use(backend: Backend, answer: Queue[bytes]) -> None:
    """Read and write in a child."""
    signal.alarm(int(CHILD_S))
    backend.put("from/child", backend.get("from/parent", bytes_max=100) + b" and child")
    answer.put(b",".join(info.key.encode() for info in backend.list("from/")))
    backend.close()


class ProcessConformance(SideDoor):
    """For backends whose objects other processes can see."""

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_used_in_a_child(self, backend: Backend, method: str) -> None:
        """A backend that the parent has used works in a forked and in a spawned child."""
        backend.put("from/parent", b"parent")
        context = multiprocessing.get_context(method)
        answer: Queue[bytes] = context.Queue()
        child = context.Process(target=use, args=(backend, answer))  # type: ignore[attr-defined]
        child.start()
        try:
            assert answer.get(timeout=CHILD_S) == b"from/child,from/parent"
            child.join(CHILD_S)
            assert child.exitcode == 0
        finally:
            child.kill()
        assert backend.get("from/child", bytes_max=100) == b"parent and child"

    def test_race_of_processes(self, backend: Backend) -> None:
        """Of several processes that create the same names, exactly one wins each."""
        backend.put("race/warm", b"")
        context = multiprocessing.get_context("fork")
        won: Queue[tuple[int, int]] = context.Queue()
        children = [
            context.Process(target=create_all, args=(backend, who, ROUNDS, won)) for who in range(4)
        ]
        for child in children:
            child.start()
        winners: dict[int, list[int]] = {}
        for _ in range(ROUNDS + len(children)):
            turn, who = won.get(timeout=CHILD_S)
            winners.setdefault(turn, []).append(who)
        for child in children:
            child.join(CHILD_S)
            assert child.exitcode == 0
        assert sorted(winners.pop(-1)) == [0, 1, 2, 3]
        assert sorted(winners) == list(range(ROUNDS))
        for turn, names in winners.items():
            assert len(names) == 1
            assert self.raw_read(f"race/{turn}") == pattern(2000, names[0])


class BackendConformance(
    ObjectConformance, ListingConformance, CreateConformance, ProcessConformance
):
    """All requirements of a store for many writers on a backend.

    For storage that promises less, inherit the parts: without ``CreateConformance`` a store may
    only have a single writer, without ``ProcessConformance`` it is limited to one process.
    """
