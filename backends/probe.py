"""Tests a storage by using it, and measures its speed: never trust a claim of put-if-absent.

All objects have names ``probe/<random>-...`` and are removed again, as far as the storage
allows that. A store is created only on
these results, and ``ckptstore doctor`` prints them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Self

import msgspec

from ckptstore import errors, limits
from ckptstore.backends.base import Backend, PutIfAbsent
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.backends.transfers import start_thread
from ckptstore.config import SYSTEM, Environment
from ckptstore.events import Progress, ProgressCallback, silent

__all__ = ["Check", "ProbeReport", "failed_check", "offset_text", "probe"]

_BODY_BYTES: Final = 64 * limits.KIB
_RACER_S: Final = 120.0
_OF_CREATING: Final = frozenset({"create twice", "race"})
"""Checks of put-if-absent alone, which a single writer can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One test and its outcome."""

    name: str
    passed: bool
    detail: str
    """Observation, for display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Results of probing a storage; stored in the superblock as JSON."""

    backend: str
    """``Backend.name`` of the probed backend."""
    put_if_absent: PutIfAbsent
    """``atomic`` only if everything else passed too: a log needs fresh listings as well."""
    checks: tuple[Check, ...]
    clock_offset_s: float
    """The storage's clock minus ours, in seconds."""
    latencies_ms: Mapping[str, float]
    """Median time of each operation on a small object, in milliseconds."""

    @property
    def passed(self) -> bool:
        """True if a store with many writers is safe here."""
        return self.put_if_absent is PutIfAbsent.ATOMIC

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report that ``to_dict`` wrote.

        Raises
        ------
        FormatError
            `values` is no such report.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise errors.FormatError(f"not a probe report: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Throughput of one process."""

    bytes_moved: int
    """Written once and read once, in bytes."""
    write_bytes_per_s: float
    """One pack, durable."""
    read_bytes_per_s: float
    """The same pack in ranges, as many at once as the backend likes best; caches may help."""


def probe(
    backend: Backend, *, environment: Environment = SYSTEM, progress: ProgressCallback = silent
) -> ProbeReport:
    """Test a storage by some tens of small objects, written, read and deleted again.

    It takes about a hundred requests, and a few more where creating a name has no clear answer.

    Parameters
    ----------
    backend
        With its retry wrapper, so that a busy moment does not count as a result.

    Raises
    ------
    StorageError
        Nothing is known of the storage: it is away, it is full, or nothing can be written
        (permissions, no such bucket). Any other failure is the result of a check.
    """
    run = _Probe(backend, environment, progress)
    answer: Future[ProbeReport] = Future()

    def work() -> None:
        """Run the checks; remove what they leave."""
        try:
            try:
                report = run.report()
            finally:
                left = run.clean()
            if left:
                report = _with_left(report, left)
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            answer.set_exception(error)
        else:
            answer.set_result(report)

    # In a thread that may be left behind: a client library may wait for ever.
    start_thread(work, "ckptstore-probe")
    while True:
        before = run.steps
        wait([answer], limits.PROBE_SILENCE_S)
        if answer.done() and isinstance(answer.exception(), RuntimeError):
            msg = f"{backend.url} cannot be probed without threads: {answer.exception()}"
            raise errors.LimitError(msg, hint="create stores before the interpreter ends")
        if answer.done():
            return answer.result()
        if run.steps == before:
            msg = f"{backend.url} gave no answer for {limits.PROBE_SILENCE_S:.0f} s: {run.last}"
            hint = "is the server alive, and its client library made for several threads?"
            raise errors.TransientStorageError(msg, hint=hint)


def measure(
    backend: Backend,
    *,
    environment: Environment = SYSTEM,
    size_bytes: int = limits.MEASURE_BYTES,
    progress: ProgressCallback = silent,
) -> Speed:
    """Write and read an object of `size_bytes` incompressible bytes, remove it, return the speeds.

    Raises
    ------
    InvalidInputError
        `size_bytes` is more than ``MEASURE_BYTES_MAX``.
    StorageError
        The storage failed.
    """
    if size_bytes > limits.MEASURE_BYTES_MAX:
        msg = f"at most {limits.MEASURE_BYTES_MAX} bytes are written to measure, not {size_bytes}"
        raise errors.InvalidInputError(msg, hint="64 MiB, the default, tells most; 1 GiB the rest")
    key = f"probe/{environment.random_hex(8)}-speed.pack"
    block = bytes.fromhex(environment.random_hex(limits.MIB))
    count = max(1, size_bytes // limits.MIB)
    try:
        start = environment.monotonic()
        with backend.open_writer(key) as writer:
            for index in range(count):
                writer.write(block)
                progress(Progress(stage="write", done=index * limits.MIB, total=size_bytes))
            writer.commit()
        write_s = environment.monotonic() - start
        start = environment.monotonic()
        total, step = count * limits.MIB, 8 * limits.MIB

        def read(offset: int) -> None:
            backend.read_into(key, offset, [memoryview(bytearray(min(step, total - offset)))])

        with ThreadPoolExecutor(backend.capabilities.concurrency) as pool:
            list(pool.map(read, range(0, total, step)))
        read_s = environment.monotonic() - start
    finally:
        backend.delete(key)
    return Speed(
        bytes_moved=total,
        write_bytes_per_s=total / max(write_s, 1e-9),
        read_bytes_per_s=total / max(read_s, 1e-9),
    )


def failed_check(report: Mapping[str, Any]) -> str:
    """Return the name and the detail of a failed check that every store needs; empty if none.

    Parameters
    ----------
    report
        As :meth:`ProbeReport.to_dict` gives it.
    """
    for check in report["checks"]:
        if not check["passed"] and check["name"] not in _OF_CREATING:
            return f"{check['name']} ({check['detail']})"
    return ""


def offset_text(seconds: float) -> str:
    """Return the offset of a clock to a tenth of a second; zero has no sign."""
    text = f"{seconds:+.1f} s"
    return "0.0 s" if text in {"+0.0 s", "-0.0 s"} else text


def _with_left(report: ProbeReport, count: int) -> ProbeReport:
    """Return a report whose check of deleting tells how many test objects stay."""
    note = f"; {count} test objects stay below probe/"
    checks = (
        replace(check, detail=check.detail + note) if check.name == "delete" else check
        for check in report.checks
    )
    return replace(report, checks=tuple(checks))


class _Probe:
    """A running probe."""

    def __init__(
        self, backend: Backend, environment: Environment, progress: ProgressCallback
    ) -> None:
        self._backend = backend
        self._environment = environment
        self._progress = progress
        self._root = f"probe/{environment.random_hex(8)}-"
        self._body = bytes(i * 37 % 251 for i in range(_BODY_BYTES))
        self._checks: list[Check] = []
        self._seconds: dict[str, list[float]] = {}
        self._offset = 0.0
        self._keys: list[str] = []

    @property
    def steps(self) -> int:
        """Number of calls that have begun or ended so far, roughly."""
        return len(self._keys) + sum(len(seconds) for seconds in self._seconds.values())

    @property
    def last(self) -> str:
        """The last check that ended, for a message."""
        names = [check.name for check in self._checks]
        return f"the last check that ended was {names[-1]!r}" if names else "not even the first"

    def report(self) -> ProbeReport:
        """Run all checks in order."""
        steps: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
            ("read after write", self._read_after_write),
            ("ranged read", self._ranged_read),
            ("list after write", self._list_after_write),
            ("storage clock", self._clock),
            ("delete", self._delete),
        ]
        verdict = self._create_twice()
        if verdict is PutIfAbsent.ATOMIC:
            verdict = self._race()
        for name, step in steps:
            try:
                passed, detail = step()
            except (errors.TransientStorageError, errors.StorageFullError):
                raise  # nothing is known of the storage yet
            except errors.CkptStoreError as error:
                passed, detail = False, error.message
            self._note(name, detail, passed=passed)
            if not passed and verdict is PutIfAbsent.ATOMIC:
                verdict = PutIfAbsent.UNKNOWN
        return ProbeReport(
            backend=self._backend.name,
            put_if_absent=verdict,
            checks=tuple(self._checks),
            clock_offset_s=round(self._offset, 3),
            latencies_ms={
                name: round(median(seconds) * 1000, 3) for name, seconds in self._seconds.items()
            },
        )

    def clean(self) -> int:
        """Remove all probe objects; return how many a failing storage keeps, as far as it tells."""

        def delete(key: str) -> int:
            """Return 1 if an object stays."""
            try:
                self._backend.delete(key)
            except errors.StorageError:  # the check of deleting tells it, or what failed before
                return 1
            return 0

        with ThreadPoolExecutor(limits.PROBE_CREATORS) as pool:
            failed = sum(pool.map(delete, self._keys))
        if failed:
            with suppress(errors.StorageError):  # some names may be of objects that are not there
                failed = sum(1 for _ in self._backend.list(self._root))
        return failed

    def _key(self, name: str) -> str:
        """Return the key of an object that is removed at the end."""
        self._keys.append(f"{self._root}{name}")
        return self._keys[-1]

    def _create_twice(self) -> PutIfAbsent:
        key = self._key("twice")
        try:
            with self._timed("create"):
                self._backend.put_if_absent(key, b"first")
        except errors.AmbiguousWriteError as error:
            self._note("create twice", f"no clear answer: {error.message}", passed=False)
            return PutIfAbsent.UNKNOWN
        except errors.TransientStorageError:
            raise
        except (errors.UnsafeBackendError, errors.StorageError) as error:
            why = error.message
            try:
                self._backend.put(key, b"first")
            except errors.StorageError as unwritten:
                unsafe = isinstance(error, errors.UnsafeBackendError)
                if not unsafe or isinstance(unwritten, errors.StoragePermissionError):
                    raise  # nothing at all can be written here
                why = unwritten.message
            self._note("create twice", f"refused: {why}", passed=False)
            return PutIfAbsent.REFUSED
        told = False
        try:
            self._backend.put_if_absent(key, b"second")
        except errors.ObjectExistsError:
            told = True
        except (errors.TransientStorageError, errors.StorageFullError):
            raise
        except (errors.UnsafeBackendError, errors.StorageError) as error:
            self._note("create twice", f"no clear answer: {error.message}", passed=False)
            return PutIfAbsent.UNKNOWN
        try:
            kept = self._backend.get(key, bytes_max=100) == b"first"
        except (errors.ObjectNotFoundError, errors.CorruptObjectError):
            kept = False
        answer = "told" if told else "not told"
        fate = "stands" if kept else "is lost"
        detail = f"the second was {answer}, the first {fate}"
        self._note("create twice", detail, passed=told and kept)
        return PutIfAbsent.ATOMIC if told and kept else PutIfAbsent.IGNORED

    def _race(self) -> PutIfAbsent:
        """Let several threads create one name at once, over and over.

        Storage that makes no claim is raced for longer: one that checks first and then writes
        gets most rounds right.
        """
        creators, rounds, unclear = limits.PROBE_CREATORS, 0, 0
        once = self._backend
        if isinstance(once, RetryingBackend):  # S3 answers most creators of a race by "try again"
            once = once.inner
        claimed = self._backend.capabilities.put_if_absent is PutIfAbsent.ATOMIC
        end = self._environment.monotonic() + (0.0 if claimed else limits.PROBE_RACE_S)
        with ThreadPoolExecutor(creators) as pool:
            while rounds < limits.PROBE_ROUNDS or (
                rounds < limits.PROBE_ROUNDS_MAX and self._environment.monotonic() < end
            ):
                winners, owner = self._round(pool, once, self._key(f"race-{rounds}"))
                if owner is None:
                    key = self._key(f"race-{rounds}-again")
                    winners, owner = self._round(pool, self._backend, key)
                rounds += 1
                if owner is None:
                    unclear += 1
                elif winners != {owner}:
                    detail = (
                        f"{len(winners)} of {creators} creators were told that they won"
                        f" in round {rounds}"
                    )
                    self._note("race", detail, passed=False)
                    return PutIfAbsent.IGNORED
        detail = f"one winner in {rounds - unclear} of {rounds} rounds of {creators} creators"
        self._note("race", detail, passed=not unclear)
        return PutIfAbsent.UNKNOWN if unclear else PutIfAbsent.ATOMIC

    def _round(
        self, pool: ThreadPoolExecutor, backend: Backend, key: str
    ) -> tuple[set[int], int | None]:
        """Return the creators that won or may have won, and the one whose bytes stand, or None."""
        creators = limits.PROBE_CREATORS
        gate = threading.Barrier(creators)

        def create(who: int) -> bool | None:
            """Create the object once all are ready; return whether it won, or None if unclear."""
            gate.wait(_RACER_S)
            try:
                backend.put_if_absent(key, self._racer_body(who))
            except errors.ObjectExistsError:
                return False
            except errors.StorageError:
                return None
            return True

        told = list(pool.map(create, range(creators)))
        try:
            body = self._backend.get(key, bytes_max=_BODY_BYTES)
        except errors.ObjectNotFoundError:
            return set(), None
        owners = [who for who in range(creators) if body == self._racer_body(who)]
        winners = {who for who, answer in enumerate(told) if answer}
        if not owners:
            return winners, None
        # A creator that got no answer, or "exists" for its own second try, may have won.
        return winners or {owners[0]}, owners[0]

    def _racer_body(self, who: int) -> bytes:
        return f"racer {who} ".encode() * 200

    def _read_after_write(self) -> tuple[bool, str]:
        for index in reversed(range(limits.PROBE_OBJECTS)):  # an order of time is none of names
            key = self._key(f"read-{index}")
            with self._timed("put"):
                self._backend.put(key, self._body)
            try:
                with self._timed("get"):
                    found = self._backend.get(key, bytes_max=_BODY_BYTES)
            except errors.ObjectNotFoundError:
                return False, "a written object was not found"
            if found != self._body:
                return False, "a written object came back changed"
        return True, f"{limits.PROBE_OBJECTS} objects were there at once"

    def _ranged_read(self) -> tuple[bool, str]:
        key = f"{self._root}read-0"
        parts = [memoryview(bytearray(size)) for size in (1000, 1, 3000)]
        try:
            with self._timed("ranged get"):
                self._backend.read_into(key, 12345, parts)
        except (errors.CorruptObjectError, errors.ObjectNotFoundError) as error:
            return False, error.message
        if b"".join(parts) != self._body[12345 : 12345 + 4001]:
            return False, "other bytes came back"
        try:
            self._backend.read_into(key, _BODY_BYTES - 1, [memoryview(bytearray(2))])
        except errors.CorruptObjectError:
            return True, "ranges are exact, and an end of the object is noticed"
        return False, "a read beyond the end was not noticed"

    def _list_after_write(self) -> tuple[bool, str]:
        expected = [f"{self._root}read-{index}" for index in range(limits.PROBE_OBJECTS)]
        with self._timed("list"):
            found = [info.key for info in self._backend.list(f"{self._root}read-")]
        after = f"{self._root}race-0"
        rest = [info.key for info in self._backend.list(self._root, after=after)]
        if set(found) != set(expected) or not rest:
            return False, f"{len(found)} of {len(expected)} new objects were listed"
        if found != expected or rest != sorted(rest) or rest[0] <= after:
            return False, "names are not listed in order, or not only those after another one"
        return True, f"all {len(expected)} new objects were listed at once and in order"

    def _clock(self) -> tuple[bool, str]:
        key = self._key("clock")
        self._backend.put(key, b"")
        now = self._environment.now_ms() / 1000
        with self._timed("stat"):
            info = self._backend.stat(key)
        self._offset = info.modified_at - now
        return True, f"{offset_text(self._offset)} from ours"

    def _delete(self) -> tuple[bool, str]:
        key = f"{self._root}read-1"
        try:
            with self._timed("delete"):
                self._backend.delete(key)
        except errors.StoragePermissionError as error:
            return False, f"the credentials lack the right to delete: {error.message}"
        try:
            self._backend.get(key, bytes_max=_BODY_BYTES)
        except errors.ObjectNotFoundError:
            listed = key in {info.key for info in self._backend.list(self._root)}
            return not listed, "it is still listed" if listed else "gone at once"
        return False, "a deleted object could still be read"

    def _note(self, name: str, detail: str, *, passed: bool) -> None:
        self._checks.append(Check(name=name, passed=passed, detail=detail))
        step = Progress(stage="probe", done=len(self._checks), total=7, unit="checks", detail=name)
        self._progress(step)

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        start = self._environment.monotonic()
        yield
        self._seconds.setdefault(operation, []).append(self._environment.monotonic() - start)
