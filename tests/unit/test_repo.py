"""Opening and creating a store: one winner, no surprise, no write without knowing the storage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from simulated_environment import SimulatedEnvironment

from ckptstore import errors, limits
from ckptstore.backends import posix
from ckptstore.backends.base import Backend, Capabilities, ObjectInfo, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog.log import Build
from ckptstore.config import Environment, Options
from ckptstore.format.framing import encode_envelope
from ckptstore.format.keys import STORE_KEY, commit_key
from ckptstore.format.superblock import Superblock, decode_superblock, encode_superblock
from ckptstore.repo import Finding, create_on, open_on, open_repo
from ckptstore.testing.faulty import Fault, FaultyBackend, When

Saving = Callable[..., Build]


class Prober:
    """Finds what the test says, and counts how often it was asked."""

    def __init__(self, verdict: PutIfAbsent = PutIfAbsent.ATOMIC) -> None:
        self.verdict = verdict
        self.asked = 0

    def __call__(self, backend: Backend, environment: Environment) -> Finding:
        assert environment.monotonic() >= 0
        self.asked += 1
        return Finding(put_if_absent=self.verdict, report={"backend": backend.name})


def store_json(backend: Backend) -> dict[str, Any]:
    """Return the superblock's body as plain JSON."""
    body: dict[str, Any] = json.loads(backend.get(STORE_KEY, bytes_max=10**6))["body"]
    return body


# --- creating and opening -----------------------------------------------------------------------
def test_create_then_open(memory: MemoryBackend, environment: SimulatedEnvironment) -> None:
    """What the creator chose is what the opener finds."""
    prober = Prober()
    made = create_on(memory, environment=environment, chunk_bytes=2 * limits.MIB, prober=prober)
    again = open_on(memory, prober=prober)
    assert again.superblock == made.superblock
    assert again.chunk_bytes == 2 * limits.MIB
    assert again.superblock.created_at_ms == environment.now_ms()
    assert store_json(memory)["probe"] == {"backend": "memory"}
    assert prober.asked == 1


def test_create_by_url_runs_the_real_probe_and_leaves_nothing_else(tmp_path: Path) -> None:
    """On a real file system: probed, created, one object, and open to commits, with a reserve."""
    url = str(tmp_path / "store")
    with open_repo(url, create=True, exist_ok=False) as repo:
        assert repo.superblock.put_if_absent == "atomic"
        repo.check_writable()
    left = sorted(str(p.relative_to(url)) for p in Path(url).rglob("*") if p.is_file())
    assert left == [posix.NAME, STORE_KEY]
    with open_repo(url) as repo:
        assert repo.catalog.number == 0


def test_no_store_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    """Opening nothing creates nothing."""
    url = str(tmp_path / "none")
    with pytest.raises(errors.StoreNotFoundError, match="ckptstore init"):
        open_repo(url)
    assert not Path(url).exists()
    with open_repo(url, create=True) as made:
        store_id = made.superblock.store_id
    with open_repo(url, create=True) as again:
        assert again.superblock.store_id == store_id


def test_creating_twice_is_refused(memory: MemoryBackend) -> None:
    """``init`` on a store does not touch it; ``open(create=True)`` opens it."""
    first = create_on(memory, prober=Prober())
    with pytest.raises(errors.StoreExistsError):
        create_on(memory, prober=Prober())
    again = create_on(memory, exist_ok=True, prober=Prober())
    assert again.superblock.store_id == first.superblock.store_id


def test_foreign_files_are_left_alone(memory: MemoryBackend) -> None:
    """A store may share its location with other things."""
    memory.put("readme.txt", b"hello")
    memory.put("data/train.bin", b"x")
    create_on(memory, prober=Prober())
    assert [info.key for info in memory.list("")] == ["data/train.bin", "readme.txt", STORE_KEY]


@pytest.mark.parametrize("key", ["commits/000000/000000000001.json", "packs/aa/x.pack"])
def test_remains_of_a_store_are_not_built_upon(memory: MemoryBackend, key: str) -> None:
    """Objects below our prefixes without store.json: garbage collection would eat them."""
    memory.put(key, b"{}")
    with pytest.raises(errors.StoreExistsError, match=key):
        create_on(memory, prober=Prober())
    with pytest.raises(errors.StoreNotFoundError):
        open_on(memory)


def test_of_many_creators_one_wins(memory: MemoryBackend) -> None:
    """All creators end up in the same store; ``init`` succeeds for exactly one."""
    together = Barrier(8)

    class Together(WrapperBackend):
        """Lets all creators look before any writes."""

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            """List, after the others have come as far."""
            if prefix == "commits/":
                together.wait(120)
            return self.inner.list(prefix, after=after)

    def create(number: int) -> str:
        try:
            repo = create_on(Together(memory), exist_ok=number % 2 == 0, prober=Prober())
        except errors.StoreExistsError:
            return ""
        return repo.superblock.store_id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(create, range(8)))
    assert len({*ids} - {""}) == 1
    assert all(ids[::2])
    assert sum(map(bool, ids[1::2])) <= 1


@pytest.mark.parametrize("chunk_bytes", [0, -1, limits.CHUNK_BYTES_MIN - 1, 2**40])
def test_a_chunk_size_out_of_bounds_is_refused(memory: MemoryBackend, chunk_bytes: int) -> None:
    """Before anything is written."""
    with pytest.raises(errors.InvalidInputError, match="chunk_bytes is an integer"):
        create_on(memory, chunk_bytes=chunk_bytes, prober=Prober())
    assert list(memory.list("")) == []


# --- lost replies -------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [errors.AmbiguousWriteError, errors.TransientStorageError])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_lost_reply_while_creating(
    memory: MemoryBackend,
    environment: SimulatedEnvironment,
    error: type[errors.StorageError],
    when: When,
) -> None:
    """Request or answer lost: the store is there once, and is this creator's."""
    fault = Fault(calls=frozenset({"put_if_absent"}), when=when, error=lambda: error("lost"))
    repo = create_on(FaultyBackend(memory, fault), environment=environment, prober=Prober())
    assert repo.superblock.store_id == store_json(memory)["store_id"]
    assert fault.seen == (2 if when is When.BEFORE else 1)


def test_creating_that_stays_unclear_is_an_error(
    memory: MemoryBackend, environment: SimulatedEnvironment
) -> None:
    """Nothing is claimed without proof."""
    fault = Fault(
        calls=frozenset({"put_if_absent"}),
        times=0,
        error=lambda: errors.AmbiguousWriteError("lost"),
    )
    with pytest.raises(errors.AmbiguousWriteError, match=STORE_KEY):
        create_on(FaultyBackend(memory, fault), environment=environment, prober=Prober())
    lost = Fault(
        calls=frozenset({"put_if_absent"}),
        when=When.AFTER,
        error=lambda: errors.AmbiguousWriteError("x"),
    )
    blind = Fault(calls=frozenset({"list"}), at=6, times=0)
    with pytest.raises(errors.AmbiguousWriteError, match=STORE_KEY):
        create_on(FaultyBackend(memory, lost, blind), environment=environment, prober=Prober())


def test_nfs_is_listed_not_probed(memory: MemoryBackend) -> None:
    """Where a failed lookup is remembered, a store that is not there is not looked up by name."""

    class Remembering(WrapperBackend):
        """Like an NFS client: no name may be looked up that is not there."""

        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, lookup_lag_s=30.0)

        def get(self, key: str, *, bytes_max: int) -> bytes:
            assert any(info.key == key for info in self.inner.list(key))
            return self.inner.get(key, bytes_max=bytes_max)

    backend = Remembering(memory)
    with pytest.raises(errors.StoreNotFoundError):
        open_on(backend)
    create_on(backend, prober=Prober())
    assert open_on(backend).catalog.number == 0


# --- who may write ------------------------------------------------------------------------------
UNSAFE = [PutIfAbsent.IGNORED, PutIfAbsent.REFUSED, PutIfAbsent.UNKNOWN]


@pytest.mark.parametrize("verdict", UNSAFE)
def test_unsafe_storage_makes_no_store(memory: MemoryBackend, verdict: PutIfAbsent) -> None:
    """Without put-if-absent nothing is created, and the way out is named."""
    with pytest.raises(errors.UnsafeBackendError, match="single_writer=True"):
        create_on(memory, prober=Prober(verdict))
    assert list(memory.list("")) == []


@pytest.mark.parametrize("verdict", UNSAFE)
def test_a_declared_single_writer_never_tries_the_condition(
    memory: MemoryBackend, saving: Saving, verdict: PutIfAbsent
) -> None:
    """Superblock and commits are plain puts; others may read, but not write."""
    fault = Fault(calls=frozenset({"put_if_absent"}), times=0)
    backend = FaultyBackend(memory, fault)
    alone = create_on(backend, options=Options(single_writer=True), prober=Prober(verdict))
    alone.log.append(saving(step=1))
    assert fault.seen == 0
    assert store_json(memory)["single_writer"] is True
    other = open_on(backend, prober=Prober())
    assert other.catalog.versions_count == 1
    with pytest.raises(errors.UnsafeBackendError, match="reading is safe"):
        other.log.append(saving(step=2))
    assert fault.seen == 0


class Rangeless(WrapperBackend):
    """Takes no notice of where a range begins."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.inner.read_into(key, 0, buffers)


class Altering(WrapperBackend):
    """Gives other bytes than were stored."""

    def get(self, key: str, *, bytes_max: int) -> bytes:
        return self.inner.get(key, bytes_max=bytes_max).swapcase()


class Stale(WrapperBackend):
    """Lists nothing of what was just written."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(list(self.inner.list(prefix, after=after))[:-1])


class Keeping(WrapperBackend):
    """Deletes nothing that the probe reads."""

    def delete(self, key: str) -> None:
        """Delete all but what the probe looks at."""
        if "read-1" not in key:
            self.inner.delete(key)


@pytest.mark.parametrize("single_writer", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Rangeless, "ranged read (other bytes came back)"),
        (Altering, "read after write (a written object came back changed)"),
        (Stale, "list after write (7 of 8 new objects were listed)"),
        (Keeping, "delete (a deleted object could still be read)"),
    ],
)
def test_storage_that_fails_a_check_makes_no_store(
    memory: MemoryBackend, kind: type[WrapperBackend], said: str, *, single_writer: bool
) -> None:
    """To be the only writer helps nobody where reads, listings or deletions are wrong."""
    with pytest.raises(errors.StorageError, match=re.escape(said)) as caught:
        create_on(kind(memory), options=Options(single_writer=single_writer))
    assert "doctor" in caught.value.hint
    assert "single_writer" not in str(caught.value)
    assert [key for key in memory.objects if not key.startswith("probe/")] == []


def test_a_store_that_is_reached_by_unsound_storage_is_not_written_to(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Another driver than at its creation is tried out before the first write, vouched or not."""
    create_on(memory, prober=Prober())
    reached = Rangeless(memory)
    reached.name = "another"
    repo = open_on(reached, options=Options(single_writer=True))
    with pytest.raises(errors.StorageError, match="ranged read"):
        repo.log.append(saving())
    assert repo.catalog.versions_count == 0


def test_a_single_writer_on_safe_storage_uses_the_condition(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Vouching for being alone does not switch off what the storage can do."""
    fault = Fault(calls=frozenset({"put_if_absent"}), at=0)
    repo = create_on(
        FaultyBackend(memory, fault), options=Options(single_writer=True), prober=Prober()
    )
    repo.log.append(saving())
    assert fault.seen == 2
    assert not repo.superblock.single_writer


def test_read_only(memory: MemoryBackend, saving: Saving) -> None:
    """Read-only stores are not written, not probed, and not created."""
    with pytest.raises(errors.ReadOnlyError):
        create_on(memory, options=Options(read_only=True), prober=Prober())
    create_on(memory, prober=Prober()).log.append(saving())
    prober = Prober()
    repo = open_on(memory, options=Options(read_only=True), prober=prober)
    assert repo.catalog.versions_count == 1
    with pytest.raises(errors.ReadOnlyError):
        repo.check_writable()
    with pytest.raises(errors.ReadOnlyError):
        repo.log.append(saving())
    assert prober.asked == 0


def test_another_way_to_the_storage_is_probed_before_the_first_write(
    memory: MemoryBackend, saving: Saving
) -> None:
    """Made on a local disk, now reached by NFS: the old verdict does not count."""
    create_on(memory, prober=Prober())
    by_nfs = WrapperBackend(memory)
    by_nfs.name = "nfs"
    good, bad = Prober(), Prober(PutIfAbsent.IGNORED)
    repo = open_on(by_nfs, prober=good)
    assert (repo.catalog.number, good.asked) == (0, 0)
    repo.log.append(saving(step=1))
    repo.log.append(saving(step=2))
    assert good.asked == 1
    with pytest.raises(errors.UnsafeBackendError):
        open_on(by_nfs, prober=bad).log.append(saving(step=3))
    assert bad.asked == 1
    assert store_json(memory)["backend"] == "memory"


def test_the_log_is_read_when_it_is_asked_for(memory: MemoryBackend, saving: Saving) -> None:
    """Opening reads one object; the first question reads the log, later ones do not."""
    create_on(memory, prober=Prober()).log.append(saving())
    fault = Fault(calls=frozenset({"list", "get"}), at=0)
    repo = open_on(FaultyBackend(memory, fault))
    assert fault.seen == 1
    assert repo.catalog.versions_count == 1
    seen = fault.seen
    assert repo.catalog.versions_count == 1
    assert fault.seen == seen
    assert repo.refresh().versions_count == 1
    assert fault.seen == seen + 1


def test_a_damaged_log_can_be_read_up_to_the_damage(memory: MemoryBackend, saving: Saving) -> None:
    """The store opens, the error names the commit, and what comes before is at hand."""
    repo = create_on(memory, prober=Prober())
    for step in range(3):
        repo.log.append(saving(step=step))
    memory.delete(commit_key(2))
    memory.put(commit_key(2), b"junk")
    damaged = open_on(memory)
    with pytest.raises(errors.CorruptObjectError, match=commit_key(2)):
        _ = damaged.catalog
    assert damaged.catalog.versions_count == 1


# --- the superblock -----------------------------------------------------------------------------
PLAIN = Superblock(
    store_id="a" * 32, chunk_bytes=limits.CHUNK_BYTES_DEFAULT, created_at_ms=1, by="ana",
    backend="memory", put_if_absent="atomic", single_writer=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": 2}, errors.UnsupportedFeatureError),
        ({"format": 2, "features": {"new": "shape"}}, errors.UnsupportedFeatureError),
        ({"features": ["encryption"]}, errors.UnsupportedFeatureError),
        ({"features": ["x"] * 100}, errors.CorruptObjectError),
        ({"features": ["Not A Feature"]}, errors.CorruptObjectError),
        ({"magic": "something-else"}, errors.FormatError),
        ({"store_id": "x"}, errors.CorruptObjectError),
        ({"chunk_bytes": 2**40}, errors.CorruptObjectError),
        ({"chunk_bytes": 0}, errors.CorruptObjectError),
        ({"put_if_absent": "surely"}, errors.CorruptObjectError),
        ({"single_writer": 1}, errors.CorruptObjectError),
        ({"created_at_ms": -1}, errors.CorruptObjectError),
        ({"probe": []}, errors.CorruptObjectError),
        ({"by": None}, errors.CorruptObjectError),
    ],
    ids=str,
)
def test_hostile_superblocks(
    memory: MemoryBackend, changes: dict[str, Any], error: type[errors.CkptStoreError]
) -> None:
    """Each is refused by kind, whether opened or created upon."""
    body = json.loads(encode_superblock(PLAIN))["body"] | changes
    memory.put(STORE_KEY, encode_envelope(json.dumps(body).encode()))
    for attempt in (open_on, create_on):
        with pytest.raises(error, match=STORE_KEY):
            attempt(memory, prober=Prober())


def test_superblock_survives_and_ignores_what_is_added() -> None:
    """Equal after a round trip; a field of a later version is ignored."""
    data = encode_superblock(PLAIN)
    assert decode_superblock(data, where="k") == PLAIN
    body = json.loads(data)["body"] | {"later": [1]}
    again = decode_superblock(encode_envelope(json.dumps(body).encode()), where="k")
    assert again == PLAIN


def test_every_bit_of_the_superblock_counts() -> None:
    """Any flipped bit is noticed."""
    data = encode_superblock(PLAIN)
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.CorruptObjectError):
            decode_superblock(bytes(torn), where="k")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"[" * 10**6, b'{"format":2}', b"\xff"])
def test_bodies_that_are_no_superblock(body: bytes) -> None:
    """Anything else is corruption, or another format; never a crash."""
    with pytest.raises(errors.CorruptObjectError):
        decode_superblock(encode_envelope(body), where="k")
    with pytest.raises(errors.CorruptObjectError):
        decode_superblock(body, where="k")
    with pytest.raises(errors.CorruptObjectError):
        decode_superblock(b" " * (limits.SUPERBLOCK_BYTES_MAX + 1), where="k")
