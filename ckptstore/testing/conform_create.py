"""Conformance of put-if-absent, the basis of every promise to concurrent writers."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue

import pytest

from ckptstore.backends.base import Backend
from ckptstore.errors import AmbiguousWriteError, ObjectExistsError, ObjectNotFoundError
from ckptstore.testing.side_door import SideDoor, pattern

THREADS = 8
ROUNDS = 8
CHILD_S = 60.0


def create_all(backend: Backend, who: int, rounds: int, won: Queue[tuple[int, int]]) -> None:
    """Try to create one key a round, and report the rounds won; runs in a child process."""
    for turn in range(rounds):
        try:
            backend.put_if_absent(f"race/{turn}", pattern(2000, who))
        except (ObjectExistsError, AmbiguousWriteError):
            continue
        won.put((turn, who))
    won.put((-1, who))


def use(backend: Backend, answer: Queue[bytes]) -> None:
    """Read and write in a child."""
    backend.put("from/child", backend.get("from/parent", bytes_max=100) + b" and child")
    answer.put(b",".join(info.key.encode() for info in backend.list("from/")))
    backend.close()


class CreateConformance(SideDoor):
    """Inherit only if the storage creates names atomically; the probe must agree."""

    def test_create(self, backend: Backend) -> None:
        """A name that is free is created with exactly these bytes, and nothing beside it."""
        backend.put_if_absent("commits/1.json", pattern(5000))
        assert self.raw_read("commits/1.json") == pattern(5000)
        assert self.raw_keys() == {"commits/1.json"}

    def test_second_create_is_told(self, backend: Backend) -> None:
        """A taken name keeps its content, and the caller gets an error, even the first creator."""
        backend.put_if_absent("a", b"first")
        self.raw_write("b", b"other")
        for key in ("a", "b"):
            with pytest.raises(ObjectExistsError):
                backend.put_if_absent(key, b"second")
        assert (self.raw_read("a"), self.raw_read("b")) == (b"first", b"other")
        assert self.raw_keys() == {"a", "b"}

    def test_same_bytes_are_no_excuse(self, backend: Backend) -> None:
        """Even the same content loses: exactly one caller must know that it was first."""
        backend.put_if_absent("a", b"same")
        with pytest.raises(ObjectExistsError):
            backend.put_if_absent("a", b"same")

    def test_create_empty(self, backend: Backend) -> None:
        """An empty object can be created, once."""
        backend.put_if_absent("a", b"")
        with pytest.raises(ObjectExistsError):
            backend.put_if_absent("a", b"")
        assert self.raw_read("a") == b""

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
                except ObjectNotFoundError:
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
            except ObjectExistsError:
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
