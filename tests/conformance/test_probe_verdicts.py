"""The probe tells storage that keeps put-if-absent from storage that does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from buckets import AzureBucket, GcsBucket, S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.base import Backend, Buffer, PutIfAbsent
from ckptstore.backends.fsspec_backend import open_fsspec
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.probe import ProbeReport, measure, probe
from ckptstore.backends.registry import open_backend
from ckptstore.backends.s3 import S3Backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.cli.doctor_cmd import advice
from ckptstore.config import Options
from ckptstore.events import Progress
from ckptstore.repo import create_on
from ckptstore.testing.faulty import CALLS, FaultyBackend, When
from ckptstore.testing.faulty import Fault as BackendFault


def names(report: ProbeReport) -> dict[str, bool]:
    """Return which checks passed."""
    return {check.name: check.passed for check in report.checks}


def test_memory_is_atomic() -> None:
    """A good storage passes everything, and nothing is left behind."""
    backend = MemoryBackend("probe-good")
    seen: list[Progress] = []
    report = probe(backend, progress=seen.append)
    assert report.put_if_absent is PutIfAbsent.ATOMIC
    assert report.passed
    assert all(names(report).values())
    assert backend.objects == {}
    assert [item.done for item in seen] == list(range(1, 8))
    assert set(report.latencies_ms) >= {"create", "put", "get", "list", "delete"}


def test_disk_is_atomic(tmp_path: Path) -> None:
    """So does a disk."""
    report = probe(open_backend(tmp_path))
    assert report.passed
    assert list(tmp_path.rglob("*")) == [tmp_path / "probe"]


@pytest.mark.parametrize("server", ["s3_bucket", "gcs_bucket", "azure_bucket"])
def test_servers_that_keep_the_condition(server: str, request: pytest.FixtureRequest) -> None:
    """``If-None-Match`` and ``ifGenerationMatch=0`` are found atomic; nothing is left behind."""
    bucket: S3Bucket | GcsBucket | AzureBucket = request.getfixturevalue(server)
    report = probe(open_backend(bucket.url, **bucket.options()))
    assert report.put_if_absent is PutIfAbsent.ATOMIC
    assert bucket.keys() == set()


def test_careless_server_is_found_out(careless_bucket: S3Bucket) -> None:
    """A server that silently ignores the condition is found out, and nothing is left behind."""
    report = probe(open_backend(careless_bucket.url, **careless_bucket.options()))
    assert report.put_if_absent is PutIfAbsent.IGNORED
    assert not report.passed
    assert names(report)["create twice"] is False
    assert careless_bucket.keys() == set()


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_condition_that_is_refused_is_told_from_a_lack_of_permission(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, status: int
) -> None:
    """A plain write of the same name works: a single writer may have a store here."""
    conditional = Fault(
        kind=Kind.STATUS,
        method="PUT",
        header="if-none-match",
        status=status,
        code="InvalidRequest",
        times=0,
    )
    s3_proxy.set(conditional)
    options = s3_bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    report = probe(open_backend(s3_bucket.url, **options))
    assert report.put_if_absent is PutIfAbsent.REFUSED
    assert [check.name for check in report.checks if not check.passed] == ["create twice"]
    with ckptstore.open(s3_bucket.url, create=True, single_writer=True, **options) as store:
        store.run("r").save({"w": b"1"}, step=1)
        assert store.load("r") == {"w": b"1"}


class Broken(WrapperBackend):
    """Refuses some listings, and gives other bytes than those of the range."""

    def list(self, prefix: str, *, after: str = "") -> object:  # type: ignore[override]
        """Refuse."""
        if not prefix.startswith("probe/"):
            return self.inner.list(prefix, after=after)
        msg = "list: AccessDenied"
        raise errors.StoragePermissionError(msg, hint="ask for s3:ListBucket")

    def read_into(self, key: str, offset: int, parts: Sequence[memoryview]) -> None:
        """Read from the beginning."""
        self.inner.read_into(key, 0, parts)


def test_every_check_runs_whatever_failed_before() -> None:
    """Each defect is in the report, and the next step with the first; nothing is left behind."""
    memory = MemoryBackend("probe-broken")
    report = probe(Broken(memory))
    failed = {check.name: check.detail for check in report.checks if not check.passed}
    assert len(report.checks) == 7
    assert failed.keys() == {"ranged read", "list after write", "delete"}
    assert "AccessDenied" in failed["list after write"]
    assert report.put_if_absent is PutIfAbsent.UNKNOWN
    assert memory.objects == {}
    with pytest.raises(errors.StorageError, match="not even for a single writer: ranged read"):
        create_on(Broken(memory), options=Options(single_writer=True))


class Hasty(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Looks first and writes then, and claims to create."""

    protocol = "hasty"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write as fsspec's base class does."""
        super().pipe_file(path, value, mode=mode)


def test_look_then_write_is_found_out(tmp_path: Path) -> None:
    """A file system that looks first and writes then is caught by the race."""
    fsspec.register_implementation("hasty", Hasty, clobber=True)
    for _ in range(10):  # a machine with one slow processor may run a whole race in turns
        report = probe(open_fsspec(f"hasty://{tmp_path}"))
        assert names(report)["create twice"] is True
        if report.put_if_absent is PutIfAbsent.IGNORED:
            break
    assert report.put_if_absent is PutIfAbsent.IGNORED
    assert names(report)["race"] is False


class Swallowing(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Takes any option of a write, and does nothing with it."""

    protocol = "swallowing"

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        """Write."""
        super().pipe_file(path, value)


@pytest.mark.parametrize("url", ["local://{}", "swallowing://{}"])
def test_no_condition_is_sent_in_vain(tmp_path: Path, url: str) -> None:
    """Where fsspec's own code looks first, or swallows the mode, no race is needed to know it."""
    fsspec.register_implementation("swallowing", Swallowing, clobber=True)
    report = probe(open_fsspec(url.format(tmp_path)))
    assert report.put_if_absent is PutIfAbsent.REFUSED
    assert [name for name, passed in names(report).items() if not passed] == ["create twice"]


class Hanging(WrapperBackend):
    """Never comes back from a listing."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.let_go = threading.Event()

    def list(self, prefix: str, *, after: str = "") -> object:  # type: ignore[override]
        """Wait."""
        self.let_go.wait()
        return self.inner.list(prefix, after=after)


def test_a_probe_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that hangs is told from a slow storage, with the last check that ended."""
    monkeypatch.setattr(limits, "PROBE_SILENCE_S", 0.5)
    backend = Hanging(MemoryBackend("probe-hanging"))
    try:
        with pytest.raises(errors.TransientStorageError, match=r"no answer .* 'ranged read'"):
            probe(backend)
    finally:
        backend.let_go.set()


class Overwriting(WrapperBackend):
    """Tells the second creator that the name is taken, and overwrites all the same."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Tell the truth too late."""
        try:
            self.inner.put_if_absent(key, data)
        finally:
            self.inner.put(key, data)


def test_overwriting_creator_is_found_out() -> None:
    """That the loser is told is not enough: the winner's bytes must stand."""
    report = probe(Overwriting(MemoryBackend("probe-overwriting")))
    assert report.put_if_absent is PutIfAbsent.IGNORED


ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "backwards": lambda names: names[::-1],
    "every second": lambda names: names[1::2] + names[::2],
    "last first": lambda names: names[-1:] + names[:-1],
}
"""Orders of a listing that are not those of the names; directory buckets of S3 have none."""


class Unsorted(WrapperBackend):
    """Lists in another order than that of the names."""

    def __init__(self, inner: Backend, turned: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__(inner)
        self._turned = turned

    def list(self, prefix: str, *, after: str = "") -> object:  # type: ignore[override]
        """List in another order."""
        return iter(self._turned(list(self.inner.list(prefix, after=after))))


class UnsortedFolders(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Lists each folder backwards, as some file systems do."""

    protocol = "unsorted"

    def ls(self, path: str, detail: bool = True, **options: object) -> list[Any]:
        """List a folder."""
        return list(super().ls(path, detail=detail, **options))[::-1]


@pytest.mark.parametrize("order", ORDERS)
def test_a_listing_out_of_order_is_found_out(order: str) -> None:
    """The log relies on the order of names: no store is made there, not for one writer either."""
    backend = Unsorted(MemoryBackend(f"probe-unsorted-{order}"), ORDERS[order])
    assert names(probe(backend))["list after write"] is False
    for single in (False, True):
        with pytest.raises(errors.CkptStoreError, match=r"list after write .*in order"):
            create_on(backend, options=Options(single_writer=single))


@pytest.mark.short(sample=1)
@pytest.mark.parametrize("order", ORDERS)
def test_an_s3_server_that_lists_out_of_order_is_found_out(
    order: str, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a server; a store that is there already is not read in a wrong order."""
    options = s3_bucket.options()
    with ckptstore.open(s3_bucket.url, create=True, single_writer=True, **options) as store:
        for step in range(3):
            store.run("r").save({"w": step}, step=step)
    page = S3Backend._page
    turned = lambda *given: (ORDERS[order](page(*given)[0]), "")  # noqa: E731
    monkeypatch.setattr(S3Backend, "_page", turned)
    assert names(probe(open_backend(s3_bucket.url, **options)))["list after write"] is False
    with pytest.raises(errors.StorageError, match="does not list in order -- docs"):
        ckptstore.open(s3_bucket.url, **options).versions("r")


def test_folders_are_sorted_by_us() -> None:
    """File systems of fsspec promise no order; their listings are sorted folder by folder."""
    fsspec.register_implementation("unsorted", UnsortedFolders, clobber=True)
    assert names(probe(open_fsspec("unsorted://probe")))["list after write"] is True
    with ckptstore.open("unsorted://store", create=True, single_writer=True) as store:
        for step in range(12):
            store.run("r").save({"w": step}, step=step)
        assert [version.step for version in store.versions("r")] == list(range(12))


class StaleListing(WrapperBackend):
    """Lists what was there some time ago: nothing."""

    name = "stale"

    def list(self, prefix: str, *, after: str = "") -> object:  # type: ignore[override]
        """List nothing while the probe looks at its objects."""
        return iter([]) if "read-" in prefix else self.inner.list(prefix, after=after)


def test_stale_listing_is_no_atomic_storage() -> None:
    """Without fresh listings a log cannot be read: the verdict falls."""
    report = probe(StaleListing(MemoryBackend("probe-stale")))
    assert names(report)["list after write"] is False
    assert report.put_if_absent is PutIfAbsent.UNKNOWN
    said = "not even for a single writer: list after write (0 of 4 new objects were listed) failed"
    assert said in advice(report.to_dict())


@pytest.mark.parametrize(
    ("at", "times", "when", "failed"),
    [
        (1, 1, When.BEFORE, {"create twice"}),
        (2, 1, When.BEFORE, {"create twice"}),
        (3, 0, When.BEFORE, {"race"}),  # no round has an owner
        (3, 2 * limits.PROBE_CREATORS, When.BEFORE, {"race"}),  # nor the first, also when repeated
        (3, limits.PROBE_CREATORS, When.BEFORE, set()),  # repeated, it has one
        (3, 0, When.AFTER, set()),  # the stored bytes tell who won
    ],
)
def test_unclear_answers_are_no_verdict(at: int, times: int, when: When, failed: set[str]) -> None:
    """Creators without a clear answer, and rounds without an owner, leave the verdict open."""
    fault = BackendFault(
        calls=frozenset({"put_if_absent"}),
        at=at,
        times=times,
        when=when,
        error=lambda: errors.AmbiguousWriteError("lost"),
    )
    report = probe(FaultyBackend(MemoryBackend(f"unclear/{at}/{times}/{when}"), fault))
    assert {name for name, passed in names(report).items() if not passed} == failed
    assert report.put_if_absent is (PutIfAbsent.UNKNOWN if failed else PutIfAbsent.ATOMIC)


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_every_failing_call(when: When) -> None:
    """Whatever call fails, the probe raises an error of our tree, or its check has failed."""
    counting = BackendFault(at=0)
    probe(FaultyBackend(MemoryBackend("probe-count"), counting))
    told = 0
    for at in range(1, counting.seen + 1, 7):
        backend = FaultyBackend(MemoryBackend(f"probe-{when}-{at}"), BackendFault(at=at, when=when))
        try:
            told += not all(names(probe(backend)).values())
        except errors.CkptStoreError:
            told += 1
    assert told > 3
    assert CALLS


def test_a_probe_is_a_hundred_requests() -> None:
    """No more, of storage that claims put-if-absent: a store on S3 is created in seconds."""
    counting = BackendFault(at=0)
    probe(FaultyBackend(MemoryBackend("probe-requests"), counting))
    assert 50 < counting.seen <= 100


def test_storage_that_refuses_everything() -> None:
    """No permission, no bucket: the probe raises that, and gives no report."""
    backend: Backend = FaultyBackend(MemoryBackend("probe-dead"), BackendFault(times=0))
    with pytest.raises(errors.StorageError):
        probe(backend)


def test_report_survives_json() -> None:
    """A report goes into the superblock and comes back equal; nonsense is refused."""
    report = probe(MemoryBackend("probe-json"))
    assert ProbeReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    for bad in ({}, {"backend": "x"}, report.to_dict() | {"put_if_absent": "perhaps"}):
        with pytest.raises(errors.FormatError):
            ProbeReport.from_dict(bad)


def test_measure() -> None:
    """Throughput is measured by one object, which is removed."""
    backend = MemoryBackend("probe-speed")
    speed = measure(backend, size_bytes=1 << 20)
    assert speed.bytes_moved == 1 << 20
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert backend.objects == {}
