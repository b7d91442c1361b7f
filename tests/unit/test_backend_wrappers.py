"""Each wrapper changes one thing and passes the rest on."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator

import pytest
from metered import MeteredBackend

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.backends.throttled import ThrottledBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import SystemEnvironment
from ckptstore.testing.faulty import CALLS, WRITES, Fault, FaultyBackend, When


class Clock(SystemEnvironment):
    """A clock that only sleeping moves."""

    def __init__(self, jitter: float = 1.0) -> None:
        self.slept: list[float] = []
        self.now = 100.0
        self._jitter = jitter

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def jitter(self) -> float:
        return self._jitter


def transient() -> Exception:
    """Make the error that is worth a retry."""
    return errors.TransientStorageError("busy")


@pytest.fixture
def memory() -> MemoryBackend:
    """Return an empty memory backend with one object."""
    backend = MemoryBackend(uuid.uuid4().hex)
    backend.put("a/1", b"one")
    return backend


def use_all(backend: Backend) -> dict[str, Callable[[], object]]:
    """Return one call of each kind, by its name."""

    def write() -> None:
        with backend.open_writer("w/1") as writer:
            writer.write(b"123")
            writer.commit()

    return {
        "put": lambda: backend.put("p/1", b"12"),
        "put_if_absent": lambda: backend.put_if_absent("c/1", b"1"),
        "writer.commit": write,
        "get": lambda: backend.get("a/1", bytes_max=9),
        "read_into": lambda: backend.read_into("a/1", 0, [memoryview(bytearray(3))]),
        "list": lambda: list(backend.list("")),
        "stat": lambda: backend.stat("a/1"),
        "delete": lambda: backend.delete("d/1"),
    }


# --- retry ------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", sorted(CALLS - {"writer.write", "open_writer"}))
def test_retry_gets_over_transient_failures(memory: MemoryBackend, call: str) -> None:
    """Every kind of call is tried again until it works."""
    fault = Fault(calls=frozenset({call}), times=3, error=transient)
    clock = Clock()
    use_all(RetryingBackend(FaultyBackend(memory, fault), environment=clock))[call]()
    assert fault.hits == 3
    assert clock.slept == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("call", sorted(CALLS - {"writer.write", "open_writer"}))
def test_retry_gives_up(memory: MemoryBackend, call: str) -> None:
    """A failure that stays is raised after the allowed tries, waiting longer up to the cap."""
    fault = Fault(calls=frozenset({call}), times=0, error=transient)
    clock = Clock()
    backend = RetryingBackend(FaultyBackend(memory, fault), environment=clock, cap_s=1.0)
    with pytest.raises(errors.TransientStorageError, match="tried 8 times"):
        use_all(backend)[call]()
    assert fault.hits == limits.RETRY_TRIES
    assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "error",
    [
        errors.StorageError("x"), errors.AmbiguousWriteError("x"), errors.ObjectExistsError("x"),
        errors.ObjectNotFoundError("x"), ValueError("x"),
    ],
)  # fmt: skip
def test_only_transient_failures_are_retried(memory: MemoryBackend, error: Exception) -> None:
    """Anything else comes through at once, as it is."""
    fault = Fault(error=lambda: error)
    clock = Clock()
    backend = RetryingBackend(FaultyBackend(memory, fault), environment=clock)
    with pytest.raises(type(error)) as caught:
        backend.put_if_absent("c/1", b"x")
    assert caught.value is error
    assert (fault.hits, clock.slept) == (1, [])


def test_waits_are_jittered(memory: MemoryBackend) -> None:
    """A wait is a random part of its bound, so that many clients do not come back at once."""
    fault = Fault(calls=frozenset({"get"}), times=2, error=transient)
    clock = Clock(jitter=0.25)
    RetryingBackend(FaultyBackend(memory, fault), environment=clock).get("a/1", bytes_max=9)
    assert clock.slept == [0.025, 0.05]


def test_create_that_finds_its_own_object(memory: MemoryBackend) -> None:
    """A create that was done, but failed transiently, is told that the name exists."""
    fault = Fault(calls=frozenset({"put_if_absent"}), when=When.AFTER, error=transient)
    backend = RetryingBackend(FaultyBackend(memory, fault), environment=Clock())
    with pytest.raises(errors.ObjectExistsError):
        backend.put_if_absent("c/1", b"mine")
    assert memory.get("c/1", bytes_max=9) == b"mine"


class BreaksEvery(WrapperBackend):
    """Lists three objects and breaks, again and again."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for count, info in enumerate(self.inner.list(prefix, after=after)):
            if count == 3:
                raise errors.TransientStorageError("the connection broke")
            yield info


def test_listing_goes_on_where_it_broke(memory: MemoryBackend) -> None:
    """A listing that breaks is continued after what was yielded: nothing twice, nothing missed."""
    keys = [f"b/{index:02}" for index in range(20)]
    for key in keys:
        memory.put(key, b"x")
    backend = RetryingBackend(BreaksEvery(memory), environment=Clock())
    assert [info.key for info in backend.list("b/")] == keys


# --- metered ----------------------------------------------------------------------------------
def test_meters(memory: MemoryBackend) -> None:
    """Calls, failures and bytes of every operation are counted."""
    backend = MeteredBackend(memory)
    for call in use_all(backend).values():
        call()
    with pytest.raises(errors.ObjectNotFoundError):
        backend.get("no/such", bytes_max=1)
    found = backend.snapshot()
    assert {name: (m.calls, m.failures, m.bytes_moved) for name, m in found.items()} == {
        "put": (1, 0, 2), "put_if_absent": (1, 0, 1), "open_writer": (1, 0, 0),
        "writer.write": (1, 0, 3), "writer.commit": (1, 0, 0), "get": (2, 1, 3),
        "read_into": (1, 0, 3), "list": (1, 0, 0), "stat": (1, 0, 0), "delete": (1, 0, 0),
    }  # fmt: skip
    assert all(meter.seconds >= 0 for meter in found.values())


def test_meter_of_a_listing(memory: MemoryBackend) -> None:
    """A listing that is left early counts as a call; one that breaks counts as a failure."""
    backend = MeteredBackend(memory)
    next(iter(backend.list("")))
    broken = MeteredBackend(FaultyBackend(memory, Fault(calls=frozenset({"list"}))))
    with pytest.raises(errors.StorageError):
        list(broken.list(""))
    assert broken.snapshot()["list"].failures == 1
    assert list(backend.list("a/")) != []
    assert backend.snapshot()["list"].calls == 2
    assert backend.snapshot()["list"].failures == 0


# --- throttled --------------------------------------------------------------------------------
def test_bandwidth(memory: MemoryBackend) -> None:
    """Bytes in both directions wait until the bandwidth allows them."""
    clock = Clock()
    backend = ThrottledBackend(memory, bytes_per_s=100, environment=clock)
    backend.put("x", bytes(50))
    backend.get("x", bytes_max=50)
    with backend.open_writer("y") as writer:
        writer.write([bytes(100), bytes(100)])
        writer.commit()
    assert clock.now - 100 == pytest.approx(3.0)
    list(backend.list(""))
    assert clock.now - 100 == pytest.approx(3.0)


def test_bandwidth_is_not_negative(memory: MemoryBackend) -> None:
    """A negative number is refused."""
    with pytest.raises(errors.InvalidInputError):
        ThrottledBackend(memory, bytes_per_s=-1)


# --- all --------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [RetryingBackend, MeteredBackend, ThrottledBackend, FaultyBackend])
def test_wrappers_pass_on_and_pickle(
    memory: MemoryBackend, wrap: Callable[[Backend], WrapperBackend]
) -> None:
    """A wrapper looks like what it wraps, reads through it, and survives a pickle."""
    backend = wrap(memory)
    assert (backend.url, backend.name) == (memory.url, memory.name)
    assert backend.capabilities == memory.capabilities
    copy = pickle.loads(pickle.dumps(backend))  # noqa: S301 - made right here
    for one in (backend, copy):
        assert one.get("a/1", bytes_max=9) == b"one"
        assert [info.key for info in one.list("")] == ["a/1"]
        assert one.stat("a/1").size_bytes == 3
        assert memory.url in repr(one)
        one.close()


# --- the backend that fails on purpose --------------------------------------------------------
@pytest.mark.parametrize("call", sorted(CALLS - {"writer.write", "open_writer"}))
def test_faults_hit_the_call_that_was_named(memory: MemoryBackend, call: str) -> None:
    """The n-th call of a name fails, before or after its work; the others do not."""
    for when, done in ((When.BEFORE, False), (When.AFTER, True)):
        fault = Fault(calls=frozenset({call}), at=1, when=when)
        calls = use_all(FaultyBackend(memory, fault))
        with pytest.raises(errors.StorageError, match="injected"):
            calls[call]()
        created = memory.objects.pop("c/1", None) is not None
        assert created is (done and call == "put_if_absent")
        calls[call]()
        assert (fault.seen, fault.hits) == (2, 1)
        memory.delete("c/1")


def test_truncation_and_callback(memory: MemoryBackend) -> None:
    """A truncated read or write handles half; a callback is called and the work is done."""
    half = FaultyBackend(memory, Fault(calls=frozenset({"get"}), when=When.TRUNCATED))
    assert half.get("a/1", bytes_max=9) == b"o"
    torn = FaultyBackend(memory, Fault(calls=frozenset({"put"}), when=When.TRUNCATED))
    with pytest.raises(errors.StorageError):
        torn.put("t", b"1234")
    assert memory.get("t", bytes_max=9) == b"12"
    heard: list[tuple[str, str]] = []
    fault = Fault(when=When.CALLBACK, callback=lambda call, key: heard.append((call, key)))
    FaultyBackend(memory, fault).put("u", b"1")
    assert heard == [("put", "u")]
    assert memory.get("u", bytes_max=9) == b"1"


def test_faults_for_good_and_unknown_names(memory: MemoryBackend) -> None:
    """``times=0`` fails for good; a name that is no call is a mistake of the test."""
    backend = FaultyBackend(memory, Fault(calls=WRITES, at=2, times=0))
    backend.put("x", b"1")
    for _ in range(3):
        with pytest.raises(errors.StorageError):
            backend.put("x", b"1")
    with pytest.raises(ValueError, match="no such calls"):
        Fault(calls=frozenset({"putt"}))
