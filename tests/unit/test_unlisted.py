"""Stores on storage that cannot list: the log is followed by number, with the same result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from faultkit.states import differences, state_of
from faultkit.stores import create, memory_with, reopen

from ckptstore import limits
from ckptstore.backends.base import Backend, Capabilities, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import (
    CkptStoreError,
    CorruptObjectError,
    FormatError,
    LimitError,
    ObjectNotFoundError,
    ReadOnlyError,
    StorageError,
    StoreNotFoundError,
    UnsupportedFeatureError,
)
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import PUBLISHED_KEY, commit_key, snapshot_key
from ckptstore.format.published import Published, encode_published
from ckptstore.store import Store


class Blind(WrapperBackend):
    """A backend without listings; counts its requests, and hides names as caches do."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked: list[str] = []
        self.hidden: dict[str, int] = {}
        """Objects that seem missing, for so many requests."""
        self.answers_all = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, lists=False, read_only=True, lookup_lag_s=10.0)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        msg = f"list {prefix}: not here"
        raise StorageError(msg)

    def stat(self, key: str) -> ObjectInfo:
        """Return the size and time of an object."""
        self._ask(f"stat {key}", key)
        if self.answers_all:
            return ObjectInfo(key=key, size_bytes=1, modified_at=0.0)
        return super().stat(key)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        self._ask(f"get {key}", key)
        return super().get(key, bytes_max=bytes_max)

    def _ask(self, request: str, key: str) -> None:
        self.asked.append(request)
        if self.hidden.get(key, 0) > 0:
            self.hidden[key] -= 1
            raise ObjectNotFoundError(key)


def trained(count: int) -> tuple[MemoryBackend, Store]:
    """Return a store of so many versions, each with a commit of its own."""
    backend = memory_with({})
    store = create(backend)
    run = store.run("gpt", metrics={"loss": "min"})
    for step in range(1, count + 1):
        run.save({"w": [float(step)]}, step=step, metrics={"loss": 1 / step})
    return backend, store


def steps(backend: Backend) -> list[int]:
    """Return the steps of the versions that a new process sees."""
    with reopen(backend) as store:
        return [version.step for version in store.versions()]


@pytest.mark.short(sample=6)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 99, 100, 101, 205])
@pytest.mark.parametrize("published", [0, 1, 100, 205])
def test_the_log_is_found_by_number(count: int, published: int) -> None:
    """With any index that was true once, and without one, a reader sees all commits."""
    backend, store = trained(min(count, published))
    if published:
        store.publish()
    for step in range(published + 1, count + 1):
        store.run("gpt").save({"w": [float(step)]}, step=step)
    assert steps(Blind(backend)) == steps(backend) == list(range(1, count + 1))


def test_a_reader_follows_a_log_that_grows() -> None:
    """An open reader sees later commits, one or many, without a new index."""
    backend, store = trained(3)
    store.publish()
    reader = reopen(Blind(backend))
    for count in (3, 4, 5, 12, 12, 150):
        for step in range(len(store.versions()) + 1, count + 1):
            store.run("gpt").save({"w": [0.5]}, step=step)
        assert [one.step for one in reader.versions()] == list(range(1, count + 1))
        assert len(reader.log()) == count


@pytest.mark.parametrize("count", [1, 10, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_do_not_grow(count: int) -> None:
    """A published store opens and is listed by the same few requests at any length of its log."""
    backend, store = trained(count)
    store.publish()
    blind = Blind(backend)
    assert len(steps(blind)) == count
    assert len(blind.asked) <= 8, blind.asked
    blind.asked.clear()
    with reopen(blind) as reader:
        reader.load("gpt@latest")
        before = len(blind.asked)
        reader.load("gpt@1")
        assert len(blind.asked) - before <= 4


def test_requests_without_an_index() -> None:
    """A store that was never published is found by a number of requests like its logarithm."""
    backend, _ = trained(300)
    blind = Blind(backend)
    assert len(steps(blind)) == 300
    assert sum(one.startswith("stat commits") for one in blind.asked) <= 30


def test_a_missing_name_that_a_cache_keeps() -> None:
    """A commit that exists and seems missing for a while only delays a reader."""
    backend, store = trained(4)
    store.publish()
    blind = Blind(backend)
    reader = reopen(blind)
    assert len(reader.versions()) == 4
    store.run("gpt").save({"w": [0.5]}, step=5)
    blind.hidden[commit_key(5)] = 1
    assert len(reader.versions()) == 4
    assert len(reader.versions()) == 5
    blind.hidden[commit_key(5)] = 3
    store.publish()
    assert steps(blind) == [1, 2, 3, 4, 5]
    assert not blind.hidden[commit_key(5)]


def test_a_log_that_was_cut_is_noticed() -> None:
    """A reader whose last commit is gone, or another, does not go on."""
    backend, store = trained(4)
    reader = reopen(Blind(backend))
    assert len(reader.versions()) == 4
    last = backend.get(commit_key(4), bytes_max=limits.COMMIT_BYTES_MAX)
    backend.delete(commit_key(4))
    with pytest.raises(CorruptObjectError, match=r"000000000004.json.* is gone"):
        reader.versions()
    store.log()
    backend.put(commit_key(4), last.replace(b"gpt", b"gpu"))
    assert len(reopen(Blind(backend)).versions()) == 3


def index(**fields: object) -> bytes:
    """Return an index with these fields, right or wrong."""
    whole = {**msgspec.to_builtins(Published(commits=4)), **fields}
    return encode_envelope(msgspec.json.encode(whole))


HOSTILE: dict[str, tuple[bytes, type[CkptStoreError], str]] = {
    "huge": (b'{"body":' + b" " * limits.PUBLISHED_BYTES_MAX, CorruptObjectError, "more than"),
    "cut": (index()[:-9], CorruptObjectError, "cut off"),
    "another digest": (index().replace(b":4,", b":3,"), CorruptObjectError, "digest"),
    "not JSON": (encode_envelope(b"\xff\x00"), CorruptObjectError, PUBLISHED_KEY),
    "deep": (encode_envelope(b"[" * 1500), CorruptObjectError, PUBLISHED_KEY),
    "a list": (encode_envelope(b"[1,2]"), CorruptObjectError, PUBLISHED_KEY),
    "a text": (index(commits="4"), CorruptObjectError, "commits"),
    "a path": (index(snapshot="../../etc/passwd"), CorruptObjectError, "snapshot"),
    "negative": (index(commits=-1), CorruptObjectError, "commits"),
    "too high": (index(commits=10**12), CorruptObjectError, "commits"),
    "no commit": (index(commits=5), CorruptObjectError, "000000000005.json, which is missing"),
    "far off": (index(commits=10**9 - 1), CorruptObjectError, "which is missing"),
    "newer": (index(format=2), UnsupportedFeatureError, "upgrade"),
    "something else": (index(magic="ckptstore-store"), FormatError, "is no index"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index(name: str) -> None:
    """An index that is damaged, or names missing commits, raises a typed error."""
    data, kind, text = HOSTILE[name]
    backend, _ = trained(4)
    backend.put(PUBLISHED_KEY, data)
    with pytest.raises(kind, match=text) as caught:
        steps(Blind(backend))
    assert type(caught.value) is kind


@pytest.mark.parametrize("wrong", [{"snapshot": 3}, {"snapshot": 9}, {"commits": 0}, {"later": 1}])
def test_an_index_that_is_old_or_new(wrong: dict[str, object]) -> None:
    """A missing snapshot, no commit or an unknown field changes no result."""
    backend, _ = trained(4)
    backend.put(PUBLISHED_KEY, index(**wrong))
    assert steps(Blind(backend)) == [1, 2, 3, 4]


def test_a_damaged_snapshot_costs_requests_only() -> None:
    """Of a published store whose snapshot is damaged the log is read."""
    backend, store = trained(12)
    number = store.publish().snapshot
    assert number == 12
    data = bytearray(backend.get(snapshot_key(number), bytes_max=limits.SNAPSHOT_STORED_BYTES_MAX))
    data[-1] ^= 1
    backend.delete(snapshot_key(number))
    backend.put(snapshot_key(number), bytes(data))
    assert steps(Blind(backend)) == list(range(1, 13))


def test_a_server_that_answers_for_every_name() -> None:
    """It ends in a typed error after few requests, and in little memory."""
    backend, _ = trained(4)
    blind = Blind(backend)
    blind.answers_all = True
    with pytest.raises(LimitError, match="does it answer for any name"):
        steps(blind)
    assert len(blind.asked) < 200


def test_reading_lists_nothing() -> None:
    """Every read of versions works without listings; what needs one, or writes, says so."""
    backend, store = trained(1)
    state = state_of(3)
    store.run("gpt").save(state, step=2, tags=["good"])
    store.publish()
    reader, mine = reopen(Blind(backend)), create(memory_with({}))
    assert not differences(reader.load("gpt@good"), state)
    assert reader.version("gpt@latest").keys()
    assert reader.diff("gpt@1", "gpt@2").added
    assert reader.verify(["gpt@1", "gpt@2"]).ok
    assert reader.verify(["gpt@2"], level="records").ok
    assert reader.run("gpt").latest_valid().version.step == 2
    assert len(reader.versions()) == reader.stats().versions_count == 2
    assert not reader.stats().objects
    assert reader.sharing().versions_count == 2
    assert [run.name for run in reader.runs()] == ["gpt"]
    reader.fork("gpt@good", "mine", store=mine)
    assert not differences(mine.load("mine@latest"), state)
    report = reader.replicate(mine, ["gpt@1"])
    assert (report.copied, report.note_failure) == ((reader.resolve("gpt@1").id,), "")
    for call in (reader.verify, lambda: reader.gc(dry_run=True)):
        with pytest.raises(StorageError, match="not here"):
            call()
    for write in (reader.gc, reader.publish, lambda: reader.tag("gpt@1", "x"), reader.repair):
        with pytest.raises(ReadOnlyError, match="read-only"):
            write()
    with pytest.raises(ReadOnlyError):
        reader.run("gpt").save({"w": [1.0]}, step=3)
    with pytest.raises(ReadOnlyError):
        reader.remove(["gpt@1"])


def test_a_pack_that_is_gone_is_found_by_verify() -> None:
    """Without a listing, ``verify`` asks for each pack that a version needs."""
    backend, store = trained(1)
    store.run("gpt").save(state_of(3), step=2)
    pack = next(key for key in backend.objects if key.startswith("packs/"))
    backend.delete(pack)
    found = reopen(Blind(backend)).verify(["gpt@2"], level="records")
    assert [problem.kind for problem in found.problems][:1] == ["integrity"]


def test_no_store() -> None:
    """Where no store is, the hint speaks of the folder and not of creating one."""
    with pytest.raises(StoreNotFoundError, match=r"folder with store\.json") as caught:
        reopen(Blind(memory_with({})))
    assert "init" not in str(caught.value)
    with pytest.raises(ReadOnlyError):
        create(Blind(memory_with({})))


def test_the_index_is_bounded() -> None:
    """The largest index that can be written is far below the limit of its readers."""
    most = limits.COMMIT_NUMBER_MAX
    data = encode_published(Published(commits=most, snapshot=most, key_record=most))
    assert len(data) * 8 < limits.PUBLISHED_BYTES_MAX
