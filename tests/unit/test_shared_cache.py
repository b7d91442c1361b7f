"""The cache that processes of one host share: bytes are fetched once, and wrong ones not used."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import flip_pack
from metered import MeteredBackend
from programs import forkserver
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import limits
from ckptstore.backends import shared_cache
from ckptstore.backends.key_sources import read_key
from ckptstore.backends.registry import open_backend
from ckptstore.backends.shared_cache import CacheFolder
from ckptstore.config import SYSTEM, Options
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.repo import open_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

pytestmark = pytest.mark.timeout(120)

KEY = bytes(range(32))
Start = Callable[..., tuple[Any, Connection]]
"""Starts a loading process that is to stop at one of its reads; returns it and its pipe."""


def _state(seed: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    state = {f"t{n}": torch.randn(90_000 * (n + 1), generator=random) for n in range(5)}
    return state | {f"s{n}": torch.randn(50 + n, generator=random) for n in range(20)}


def _opened(
    place: Path | str,
    cache: Path | None,
    *faults: Fault,
    **options: Any,  # noqa: ANN401 - as Options takes them
) -> tuple[Store, MeteredBackend]:
    """Open a store on disk as if it were remote; return it with the meter of its storage."""
    key = options.pop("encryption_key", None)
    meter = MeteredBackend(FaultyBackend(open_backend(place), *faults))
    meter.name = "remote"
    options["cache_folder"] = "" if cache is None else cache
    opened = open_on(meter, key=key and read_key(key), options=Options(**options))
    return Store(opened), meter


def _moved(meter: MeteredBackend) -> int:
    found = meter.snapshot()
    return sum(found[call].bytes_moved for call in ("read_into", "get") if call in found)


def _load(
    place: Path | str,
    cache: Path | None,
    ref: str = "r@1",
    **options: Any,  # noqa: ANN401 - as Options takes them
) -> tuple[Mapping[str, torch.Tensor], int]:
    """Load a version; return the state and the bytes that the storage sent for it."""
    store, meter = _opened(place, cache, **options)
    with store:
        version = store.resolve(ref)  # reads the log
        before = _moved(meter)
        state = store.load(f"#{version.id}")
        return state, _moved(meter) - before


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return the place of a store with one version."""
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=1 << 18) as store:
        store.run("r").save(_state(), step=1)
    return str(tmp_path / "store")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a cache, which does not exist yet, on whatever disk has room for it."""
    monkeypatch.setattr(limits, "CACHE_FREE_BYTES", 0)
    return tmp_path / "cache"


def _blocks(cache: Path) -> list[Path]:
    """Return the blocks in a cache."""
    (home,) = cache.iterdir()
    return sorted(path for path in home.iterdir() if path.name != "lock")


def _main(pipe: Connection, place: str, cache: Path, pausing_at: int) -> None:
    """Load in another process, which stops at one of its reads to be killed."""

    def pause(call: str, key: str) -> None:
        pipe.send("reading")
        signal.pause()

    limits.CACHE_FREE_BYTES = 0  # type: ignore[misc] # as the fixture `cache` has it
    fault = Fault(calls=frozenset({"read_into"}), at=pausing_at, when=When.CALLBACK, callback=pause)
    store, meter = _opened(place, cache, fault)
    with store:
        pipe.send("open")
        pipe.recv()
        state = store.load("r@1")
    found = meter.snapshot()["read_into"].bytes_moved if "read_into" in meter.snapshot() else 0
    pipe.send((_equal(state, _state()), found))


@pytest.fixture
def start(place: str, cache: Path) -> Iterator[Start]:
    """Return a function that starts a loading process, and gives it and its pipe."""
    context, started = forkserver(), []

    def begin(pausing_at: int = 0) -> tuple[Any, Connection]:
        mine, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, place, cache, pausing_at))
        process.start()
        theirs.close()
        started.append(process)
        assert mine.recv() == "open"
        return process, mine

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_six_processes_fetch_each_byte_once(place: str, start: Start) -> None:
    """All begin at once: together they fetch 1.1 times what one alone does."""
    _, alone = _load(place, None)
    pipes = [start()[1] for _ in range(6)]
    for pipe in pipes:
        pipe.send("go")

    ends = [pipe.recv() for pipe in pipes]

    assert all(equal for equal, _ in ends)
    assert 0.9 * alone <= sum(read for _, read in ends) <= 1.1 * alone


def test_another_takes_over_from_a_killed_fetcher(place: str, cache: Path, start: Start) -> None:
    """SIGKILL of the process that fetches, while another waits: that one fetches, and succeeds."""
    killed, pipe = start(2)
    pipe.send("go")
    assert pipe.recv() == "reading"
    _, waiting = start()
    waiting.send("go")
    assert not waiting.poll(0.3), "it waits for the block of the other"
    os.kill(killed.pid, signal.SIGKILL)

    equal, read = waiting.recv()

    assert equal
    assert read
    assert _equal(_load(place, cache)[0], _state())


def test_a_stopped_fetcher_does_not_stop_others(
    place: str, cache: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds a lock and never goes on: others fetch by themselves after a while."""
    _, pipe = start(1)
    pipe.send("go")
    assert pipe.recv() == "reading"
    monkeypatch.setattr(limits, "CACHE_WAIT_S", 0.05)

    state, read = _load(place, cache)

    assert _equal(state, _state())
    assert read


def test_a_part_of_a_block_cut_short_is_not_read(tmp_path: Path) -> None:
    """Nor are the bytes that it still has: whoever cut it may have changed them, too."""
    cache = CacheFolder(str(tmp_path), bytes_max=1 << 20, environment=SYSTEM)
    cache.put({"block": [memoryview(bytes(range(100)))]})
    found = bytearray(10)
    assert cache.read("block", 100, 0, [memoryview(found)])
    (path,) = _blocks(tmp_path)
    os.truncate(path, 50)
    assert not cache.read("block", 100, 0, [memoryview(found)])


def test_what_a_dying_process_left_is_no_block(place: str, cache: Path) -> None:
    """A block cut short, and a temporary file, are not read, and are replaced or removed."""
    whole, size = _load(place, cache)
    for path in _blocks(cache):
        os.truncate(path, path.stat().st_size // 2)
        path.with_name(path.name + ".0123456789abcdef").write_bytes(b"half")

    state, read = _load(place, cache)

    assert _equal(state, whole)
    assert read >= 0.9 * size
    assert _load(place, cache)[1] == 0, "they are in the cache again"


@pytest.mark.parametrize("encrypted", [False, True])
def test_flipped_bytes_in_the_cache_are_fetched_again(
    tmp_path: Path, cache: Path, encrypted: bool
) -> None:
    """A flipped bit in every block: the state is right, and the blocks are gone."""
    key: dict[str, Any] = {"encryption_key": KEY} if encrypted else {}
    place = tmp_path / "store"
    with ckptstore.open(place, create=True, chunk_bytes=1 << 18, **key) as store:
        store.run("r").save(_state(), step=1)
    _load(place, cache, **key)
    blocks = _blocks(cache)
    for path in blocks:
        data = bytearray(path.read_bytes())
        data[:: max(1, len(data) // 9)] = bytes(b ^ 1 for b in data[:: max(1, len(data) // 9)])
        path.write_bytes(data)

    state, read = _load(place, cache, **key)

    assert _equal(state, _state())
    assert read
    assert len(_blocks(cache)) < len(blocks)
    assert _equal(_load(place, cache, **key)[0], _state())
    assert _equal(_load(place, cache, **key)[0], _state())


def test_an_encrypted_store_leaves_no_plain_bytes(tmp_path: Path, cache: Path) -> None:
    """The cache lies below encryption."""
    place = tmp_path / "store"
    text = "a long sentence that nobody but the owner of the key may read " * 200
    with ckptstore.open(place, create=True, codec="raw", encryption_key=KEY) as store:
        store.run("r").save({"text": text}, step=1)

    state, _ = _load(place, cache, encryption_key=KEY)

    assert state["text"] == text
    assert _blocks(cache)
    assert not any(b"owner of the key" in path.read_bytes() for path in _blocks(cache))


def test_a_removed_object_gives_the_error_of_a_load_without_cache(place: str, cache: Path) -> None:
    """What a collection removed is not loaded from the cache: same error, same message."""
    _load(place, cache)
    for pack in Path(place, "packs").rglob("*.pack"):
        pack.unlink()

    said = []
    for folder in (None, cache):
        with pytest.raises(CkptStoreError, match="the pack is gone") as caught:
            _load(place, folder)
        said.append((caught.type, str(caught.value).partition(" (")[0].split(":")[1:]))

    assert said[0] == said[1]


def test_checks_read_the_storage(place: str, cache: Path) -> None:
    """Verify finds damage in the storage of what the cache still has whole."""
    _load(place, cache)
    pack = max(Path(place, "packs").rglob("*.pack"), key=lambda path: path.stat().st_size)
    flip_pack(pack)

    store, _ = _opened(place, cache)
    with store:
        assert _equal(store.load("r@1"), _state())
        assert not store.verify().ok


def test_damage_in_the_storage_is_an_error(place: str, cache: Path) -> None:
    """What is damaged in the storage too is the error that a load without cache raises."""
    pack = max(Path(place, "packs").rglob("*.pack"), key=lambda path: path.stat().st_size)
    flip_pack(pack)

    said = []
    for folder in (None, cache, cache):
        with pytest.raises(ckptstore.errors.CorruptTensorError) as caught:
            _load(place, folder)
        said.append(str(caught.value))

    assert len(set(said)) == 1


def test_the_cache_is_bounded(place: str, cache: Path) -> None:
    """Blocks of more than the limit: the oldest go, and every load is right."""
    for _ in range(2):
        state, read = _load(place, cache, cache_bytes=3 << 20)
        assert _equal(state, _state())
        assert sum(path.stat().st_size for path in _blocks(cache)) <= 3 << 20
    assert read, "not all of it fits"
    assert len(_blocks(cache)) >= 2


def test_blocks_that_others_write_count(cache: Path) -> None:
    """A block that was admitted, and of which nothing is written yet, is within the limit."""
    size = 1 << 20
    folder = shared_cache.CacheFolder(str(cache), bytes_max=3 * size, environment=SYSTEM)
    block = [memoryview(bytes(size))]
    for name in ("a", "b"):
        folder.put({name: block})
    assert folder._reserve({folder._home / "c.0": size})
    folder.put({"d": block})  # removes the oldest, and counts the files
    folder.put({"e": block})
    (folder._home / "c.0").write_bytes(bytes(size))
    files = [path for path in folder._home.iterdir() if path.name != "lock"]
    assert sum(path.stat().st_size for path in files) <= 3 * size


def test_a_full_file_system_means_plain_reading(
    place: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No space, or nearly none: loads read the storage, with one warning."""

    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    caplog.set_level(logging.WARNING, "ckptstore")
    with monkeypatch.context() as patched:
        patched.setattr(shared_cache, "_private", full)
        state, read = _load(place, cache)
        assert _equal(state, _state())
        assert read
    with monkeypatch.context() as patched:
        patched.setattr(limits, "CACHE_FREE_PART", 1)
        patched.setattr(limits, "CACHE_FREE_BYTES", 1 << 60)
        assert _equal(_load(place, cache)[0], _state())

    assert _blocks(cache) == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "No space left" in said[0]
    assert "nearly full" in said[1]


@pytest.mark.parametrize(
    ("whole", "free", "kept"),
    [(1 << 40, 9 << 30, True), (1 << 40, 7 << 30, False), (16 << 30, 3 << 30, True)],
)
def test_what_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int, free: int, kept: bool
) -> None:
    """An eighth of the cache's file system stays free, and never more than 8 GiB of it."""
    folder = shared_cache.CacheFolder(str(tmp_path), bytes_max=1 << 30, environment=SYSTEM)
    found = os.statvfs_result((4096, 4096, whole >> 12, free >> 12, free >> 12, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)

    folder.put({"a": [memoryview(bytes(1 << 20))]})

    assert bool(_blocks(tmp_path)) == kept


def test_a_block_that_is_removed_while_it_is_written_is_no_failure(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may remove it to make room: nothing is logged, and the next one is kept."""
    private = shared_cache._private

    def removed(path: str, flags: int) -> int:
        file = private(path, flags)
        os.unlink(path)  # noqa: PTH108
        return file

    folder = shared_cache.CacheFolder(str(cache), bytes_max=1 << 20, environment=SYSTEM)
    with monkeypatch.context() as patched:
        patched.setattr(shared_cache, "_private", removed)
        folder.put({"a": [memoryview(b"x")]})
    folder.put({"b": [memoryview(b"y")]})
    buffer = bytearray(1)
    assert not folder.read("a", 1, 0, [memoryview(buffer)])
    assert folder.read("b", 1, 0, [memoryview(buffer)])
    assert (bytes(buffer), caplog.records) == (b"y", [])


def test_a_folder_that_is_removed_means_plain_reading(place: str, cache: Path) -> None:
    """The folder goes while the store is open."""
    store, _ = _opened(place, cache)
    with store:
        (home,) = cache.iterdir()
        (home / "lock").unlink()
        home.rmdir()

        assert _equal(store.load("r@1"), _state())


def test_a_stopped_process_holds_up_others_once(cache: Path) -> None:
    """A process stopped while it adds a block: others wait for it once, and add none until then."""
    clock = SimulatedEnvironment()
    folder = CacheFolder(str(cache), bytes_max=1 << 20, environment=clock)
    (home,) = cache.iterdir()
    block = [memoryview(b"block")]
    file = os.open(home / "lock", os.O_RDWR)
    assert shared_cache._lock(file, 0)
    for name in "abc":
        folder.put({name: block})
    assert limits.CACHE_WAIT_S <= clock.monotonic() < 2 * limits.CACHE_WAIT_S
    assert _blocks(cache) == []

    os.close(file)
    folder.put({"d": block})
    assert [path.name for path in _blocks(cache)] == ["d"]


def test_a_process_forked_beside_a_lock_does_not_keep_it(cache: Path) -> None:
    """Such as a data loader's worker, forked while another thread fetches."""
    folder, other = (CacheFolder(str(cache), bytes_max=9, environment=SYSTEM) for _ in range(2))
    ours, theirs = os.pipe()
    with folder.claims() as claim:
        assert claim(5)
        if (child := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        with other.claims() as again:
            assert not again(5)
    with other.claims() as again:
        assert again(5)
    os.close(theirs)
    os.waitpid(child, 0)
    os.close(ours)


@pytest.mark.parametrize("broken", ["write", "lock"])
def test_a_folder_that_fails_later_means_plain_reading(
    place: str, cache: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A file system that becomes read-only, or has no locks left, after the store was opened."""

    def fails(*_: object, **__: object) -> Any:  # noqa: ANN401 - as the real ones
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    store, _ = _opened(place, cache)
    with store, monkeypatch.context() as patched:
        version = store.resolve("r@1")
        if broken == "write":
            patched.setattr(shared_cache, "_private", fails)
            patched.setattr(Path, "unlink", fails)
        else:
            patched.setattr(shared_cache, "_lock", fails)
        assert _equal(store.load(f"#{version.id}"), _state())


def test_folders_that_others_reach_are_refused(place: str, tmp_path: Path) -> None:
    """Of another user, open to others, a link, below a folder where others may rename: refused."""
    name = f"ckptstore-{os.geteuid()}"
    cases: dict[str, str] = {}
    for case in ("of another", "open", "link", "unsafe above"):
        above = tmp_path / case
        above.mkdir(mode=0o700)
        home = above / name
        if case == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            home.symlink_to(tmp_path / "elsewhere")
        else:
            home.mkdir(mode=0o700)
        if case == "of another":
            os.chown(home, 54321, 54321)
        if case == "open":
            home.chmod(0o750)
        if case == "unsafe above":
            above.chmod(0o777)
        with pytest.raises(InvalidInputError) as caught:
            _opened(place, above)
        cases[case] = str(caught.value)
    assert "other users have access" in cases["open"]
    assert "another user could replace" in cases["unsafe above"]
    (tmp_path / "unsafe above").chmod(0o1777)
    assert _equal(_load(place, tmp_path / "unsafe above")[0], _state()), "as /tmp and /dev/shm"


def test_a_path_that_is_no_folder_is_refused(place: str, tmp_path: Path) -> None:
    """A file in its place, or a value that is no path."""
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot hold a cache"):
        _opened(place, tmp_path / "file")
    wrong: Any = 3
    for value in (wrong, "s3://bucket/cache"):
        with pytest.raises(InvalidInputError, match="is a path on this host") as caught:
            Options(cache_folder=value)
        assert "CKPTSTORE_CACHE" in caught.value.hint
        with pytest.raises(InvalidInputError, match="is a path on this host"):
            ckptstore.open(place, cache_folder=value)
    with pytest.raises(InvalidInputError, match="cache_bytes"):
        Options(cache_bytes=0)


def test_stores_share_a_folder(tmp_path: Path, cache: Path) -> None:
    """Two stores, and a copy of one that differs: each load gives its own state."""
    for number in (1, 2):
        with ckptstore.open(tmp_path / f"s{number}", create=True) as store:
            store.run("r").save(_state(number), step=1)

    for _ in range(2):
        for number in (1, 2):
            state, _ = _load(tmp_path / f"s{number}", cache)
            assert _equal(state, _state(number))


def test_parts_are_read_through_the_cache(place: str, cache: Path) -> None:
    """A row of a lazy tensor fetches its block once; a second process's row costs nothing."""
    for expected in (True, False):
        store, meter = _opened(place, cache)
        with store:
            lazy = store.version("r@1")
            before = _moved(meter)
            part = lazy["t4"][400_000:400_010]
            assert torch.equal(part, _state()["t4"][400_000:400_010])
            assert (_moved(meter) > before) is expected
            assert _moved(meter) - before <= 3 << 20


def test_a_local_store_has_no_cache(place: str, cache: Path) -> None:
    """The page cache of the system does the same."""
    with ckptstore.open(place, cache_folder=cache) as store:
        assert _equal(store.load("r@1"), _state())
    assert _blocks(cache) == []


def test_the_environment_names_a_cache(
    place: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CKPTSTORE_CACHE`` is the default of every opening."""
    monkeypatch.setenv("CKPTSTORE_CACHE", str(cache))
    assert Options().cache_folder == str(cache)
    with ckptstore.open(place) as store:
        assert store.repo.options.cache_folder == str(cache)
    monkeypatch.delenv("CKPTSTORE_CACHE")
    assert Options().cache_folder == ""
