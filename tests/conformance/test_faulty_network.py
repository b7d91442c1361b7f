"""Object stores behind a network that resets, loses and cuts: typed errors, no false claim."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from buckets import AzureBucket, GcsBucket, S3Bucket, open_bucket
from faultproxy import Fault, FaultProxy, Kind

from ckptstore import errors, limits
from ckptstore.backends.base import Backend
from ckptstore.backends.bucket import ANSWERS
from ckptstore.backends.registry import open_backend
from ckptstore.backends.retrying import RetryingBackend
from ckptstore.config import SystemEnvironment


class Patient(SystemEnvironment):
    """Waits no time, and remembers how long it should have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Remember."""
        self.slept.append(seconds)


class Place:
    """A bucket, the backend that reaches it through the proxy, and the proxy."""

    def __init__(
        self,
        bucket: S3Bucket | GcsBucket | AzureBucket,
        proxy: FaultProxy,
        **more: Any,  # noqa: ANN401
    ) -> None:
        self.bucket = bucket
        self.proxy = proxy
        self.write = "POST" if isinstance(bucket, GcsBucket) else "PUT"
        options = bucket.options(f"http://127.0.0.1:{proxy.port}") | more
        self.backend = open_bucket(bucket.url, **options)
        self.backend.put("warm", b"")
        self.patient = Patient()
        self.retrying: Backend = RetryingBackend(self.backend, environment=self.patient)


@pytest.fixture(params=["s3", "s3-library", "s3fs", "gcs", "gcs-library", "azure", "azure-library"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return the services by each client, and without the short path, behind proxies."""
    service, _, library = request.param.partition("-")
    server = "s3" if service == "s3fs" else service
    bucket = request.getfixturevalue(f"{server}_bucket")
    proxy = request.getfixturevalue(f"{server}_proxy")
    client = {"s3": {"client": "direct"}, "s3fs": {"client": "s3fs"}}.get(service, {})
    found = Place(bucket, proxy, thin=not library, **client)
    yield found
    proxy.set()
    found.backend.close()


@pytest.mark.parametrize(
    ("kind", "more", "told", "stored"),
    [
        # s3fs repeats a PUT once on a connection that it had kept open; others do not.
        (Kind.LOST, {}, (errors.AmbiguousWriteError, errors.ObjectExistsError), True),
        (Kind.LOST, {"times": 0}, errors.AmbiguousWriteError, True),
        (Kind.RESET, {"times": 0}, errors.AmbiguousWriteError, False),
        (Kind.STATUS_AFTER, {"status": 500, "code": ""}, errors.AmbiguousWriteError, True),
        (Kind.STATUS_AFTER, {"status": 503}, errors.ObjectExistsError, True),
    ],
    ids=["lost", "all-lost", "never-received", "500-after", "503-after"],
)
def test_a_create_without_a_clear_answer(
    place: Place, kind: Kind, more: dict[str, Any], told: type[Exception], stored: bool
) -> None:
    """It is no success: no clear answer, or "exists" by a repetition that finds its own object.

    Lost and reset answers are not waited for.
    """
    place.proxy.set(Fault(kind=kind, method=place.write, **more))
    with pytest.raises(told):
        place.retrying.put_if_absent("a", b"mine")
    assert place.bucket.read("a") == (b"mine" if stored else None)
    assert kind is Kind.STATUS_AFTER or place.patient.slept == []


def test_busy_create_is_tried_again(place: Place) -> None:
    """A create refused as busy is tried again, and once made it is there once."""
    fault = Fault(kind=Kind.STATUS, status=503, method=place.write, times=3)
    place.proxy.set(fault)
    place.retrying.put_if_absent("a", b"mine")
    assert fault.hits == 3
    assert len(place.patient.slept) == 3
    assert place.bucket.read("a") == b"mine"


@pytest.mark.parametrize("kind", [Kind.LOST, Kind.RESET, Kind.STATUS])
@pytest.mark.short(sample=3)
def test_writes_and_deletes_are_tried_again(place: Place, kind: Kind) -> None:
    """A put and a pack with all its bytes survive lost answers, resets and busy servers.

    A delete that is repeated after it worked is no error.
    """
    data = bytes(range(256)) * 5000
    place.proxy.set(Fault(kind=kind, method=place.write, times=2))
    place.retrying.put("a", b"data")
    assert place.bucket.read("a") == b"data"
    place.proxy.set(Fault(kind=kind, method=place.write, times=2))
    with place.retrying.open_writer("b") as writer:
        writer.write(data)
        writer.commit()
    assert place.bucket.read("b") == data
    place.proxy.set(Fault(kind=kind, method="DELETE", times=2))
    place.retrying.delete("a")
    assert place.bucket.read("a") is None


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.LOST, Kind.RESET, Kind.STATUS])
@pytest.mark.short(sample=4)
def test_reads_are_tried_again(place: Place, kind: Kind) -> None:
    """A cut, lost or refused read is repeated; what comes back is whole."""
    data = bytes(range(256)) * 5000
    place.bucket.write("a", data)
    place.proxy.set(Fault(kind=kind, method="GET", times=2))
    assert place.retrying.get("a", bytes_max=len(data)) == data
    place.proxy.set(Fault(kind=kind, method="GET", times=2))
    part = bytearray(700_000)
    place.retrying.read_into("a", 1000, [memoryview(part)])
    assert part == data[1000:701_000]
    place.proxy.set(Fault(kind=kind, method="GET", times=2))
    assert [info.key for info in place.retrying.list("")] == ["a", "warm"]


def test_a_read_that_gets_no_answer_is_sent_again(place: Place) -> None:
    """One of many is held up for a minute: another takes its place, and brings the bytes."""
    place.backend.put("a", b"x" * 100)

    def read() -> bytes:
        memory = bytearray(100)
        place.backend.read_into("a", 0, [memoryview(memory)])
        return bytes(memory)

    for _ in range(ANSWERS // 2):
        assert read() == b"x" * 100
    held = Fault(kind=Kind.HELD, method="GET", seconds=limits.READ_TIMEOUT_S)
    place.proxy.set(held)
    assert read() == b"x" * 100
    assert (held.hits, held.seen) == (1, 2)
    for _ in range(3):
        assert read() == b"x" * 100


def test_a_refusal_that_is_cut_off_says_nothing(place: Place) -> None:
    """An answer is taken for "missing" or "forbidden" once it is there whole."""
    cut = [Fault(kind=Kind.CUT, method="GET") for _ in range(2)]
    place.proxy.set(cut[0])
    with pytest.raises(errors.TransientStorageError):
        place.backend.get("absent", bytes_max=100)
    place.proxy.set(cut[1])
    with pytest.raises(errors.ObjectNotFoundError):
        place.retrying.get("absent", bytes_max=100)
    assert [one.hits for one in cut] == [1, 1]
    assert len(place.patient.slept) == 1


def test_server_that_is_gone(place: Place) -> None:
    """When nothing listens, even a create is known not to have happened."""
    place.backend.close()
    place.proxy.close()
    with pytest.raises(errors.TransientStorageError):
        place.backend.put_if_absent("a", b"x")
    with pytest.raises(errors.TransientStorageError):
        place.backend.get("warm", bytes_max=1)
    place.proxy.__init__(place.proxy.target_port)  # type: ignore[misc]


def test_listings_go_page_by_page(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of several pages misses nothing, and goes on after a page that failed."""
    monkeypatch.setattr(limits, "LIST_PAGE_OBJECTS", 3)
    keys = sorted(f"a/{index}" for index in range(10))
    for key in keys:
        place.bucket.write(key, b"x")
    place.proxy.set(Fault(kind=Kind.STATUS, method="GET", skip=1))
    assert [info.key for info in place.retrying.list("a/")] == keys
    assert [info.key for info in place.retrying.list("a/", after="a/4")] == keys[5:]
    assert len(place.patient.slept) == 1


def test_missing_bucket_is_said(place: Place) -> None:
    """A bucket that is not there is a storage error with a hint, and is not created."""
    scheme = place.bucket.url.partition("://")[0]
    backend = open_backend(f"{scheme}://no-such-bucket/x", retry=False, **place.bucket.options())
    for call in (lambda: backend.put("a", b"x"), lambda: list(backend.list(""))):
        with pytest.raises(errors.StorageError, match="bucket"):
            call()
    with pytest.raises((errors.StorageError, errors.ObjectNotFoundError)):
        backend.get("a", bytes_max=1)
    backend.close()


@pytest.mark.parametrize("kind", [Kind.LOST, Kind.RESET, Kind.STATUS_AFTER])
@pytest.mark.short(sample=3)
def test_no_false_winner_in_a_race(place: Place, kind: Kind) -> None:
    """Under faults, who is told to have won has won, and nobody else is told so."""

    def create(who: int, key: str) -> bool:
        try:
            place.retrying.put_if_absent(key, b"%d" % who)
        except (errors.ObjectExistsError, errors.AmbiguousWriteError):
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for turn in range(6):
            key = f"race/{turn}"
            fault = Fault(
                kind=kind, method=place.write, skip=turn % 4, times=2, status=500, code=""
            )
            place.proxy.set(fault)
            told = list(pool.map(lambda who, key=key: create(who, key), range(4)))
            assert sum(told) <= 1
            owner = place.bucket.read(key)
            assert owner is not None
            assert not any(told) or told[int(owner)]
            assert fault.hits > 0
