"""Everything that a store does, it does encrypted: saves, loads, forks, moves, collects, mends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
from buckets import S3Bucket

import ckptstore
from ckptstore.backends import posix
from ckptstore.backends.encrypted import EncryptedBackend, EncryptedWriter
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import open_posix
from ckptstore.backends.sealing import DataKey
from ckptstore.config import Options
from ckptstore.errors import (
    AmbiguousWriteError,
    InvalidInputError,
    MissingKeyError,
    ObjectExistsError,
    StorageError,
    TransientStorageError,
)
from ckptstore.format.segments import HEADER_BYTES, MAGIC
from ckptstore.jobs import read_job, run_job
from ckptstore.repo import open_repo
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When


def state(step: int) -> dict[str, object]:
    """Return a state of some tensors, large and small."""
    made = torch.Generator().manual_seed(step)
    return {
        "model": {f"w{i}": torch.randn(300, 300, generator=made) for i in range(4)},
        "bias": [torch.randn(7, generator=made) for _ in range(20)],
        "step": step,
        "note": "x" * 10_000,
    }


def same(one: object, two: object) -> bool:
    """Return whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.fixture
def store(tmp_path: Path, key: bytes) -> Iterator[Store]:
    """Return an encrypted store."""
    with ckptstore.open(
        tmp_path / "s", create=True, encryption_key=key, chunk_bytes=1 << 16
    ) as made:
        yield made


def test_nothing_but_two_kinds_of_objects_is_legible(store: Store, tmp_path: Path) -> None:
    """Names of runs, metrics and tensors, and what is in them: none of it is stored as it is."""
    values = torch.arange(5000, dtype=torch.int64) + 123_456_789
    store.run("secret-run", metrics={"secret_metric": "min"}).save(
        {"secret_tensor": values, "text": "secret-text"},
        step=1,
        metrics={"secret_metric": 0.5},
        metadata={"secret-field": "secret-value"},
    )
    store.run("secret-run").tag("latest", "secret-tag")
    for step in range(2, 103):  # past the first snapshot
        store.run("secret-run").save({"x": torch.zeros(1)}, step=step)
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    kinds = {path.relative_to(tmp_path / "s").parts[0] for path in files}
    objects = {"store.json", "keys", "commits", "snapshots", "manifests", "packs"}
    assert kinds == {*objects, posix.NAME}  # which holds random bytes
    sample = values.numpy().tobytes()[:64]
    for path in files:
        data = path.read_bytes()
        assert b"secret" not in data
        assert sample not in data
        if path.relative_to(tmp_path / "s").parts[0] in objects - {"store.json", "keys"}:
            assert data.startswith(MAGIC)


def test_two_stores_of_one_state_have_nothing_in_common(tmp_path: Path, key: bytes) -> None:
    """Equal content is not seen: neither between stores nor between objects of one."""
    seen: set[bytes] = set()
    for name in ("a", "b"):
        with ckptstore.open(tmp_path / name, create=True, encryption_key=key) as store:
            store.run("r").save(state(1), step=1)
        for path in (tmp_path / name).rglob("*"):
            if path.is_file() and path.suffix in {".pack", ".manifest"}:
                data = path.read_bytes()
                assert data[len(MAGIC) : HEADER_BYTES] not in seen
                assert data[HEADER_BYTES : HEADER_BYTES + 64] not in seen
                seen |= {data[len(MAGIC) : HEADER_BYTES], data[HEADER_BYTES : HEADER_BYTES + 64]}


@pytest.mark.parametrize("engine", ["process", "thread"])
@pytest.mark.short(sample=1)
def test_saves_in_the_background(tmp_path: Path, key: bytes, engine: str) -> None:
    """A child process gets the key with the backend, and saves as the parent would."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=key, engine=engine) as store:
        run = store.run("r")
        for step in (1, 2, 3):
            run.save_async(state(step), step=step).result()
    with ckptstore.open(tmp_path / "s", encryption_key=key) as store:
        assert all(same(store.load(f"r@{step}"), state(step)) for step in (1, 2, 3))
        assert store.verify().ok


def test_a_life(store: Store, tmp_path: Path, key: bytes, other: bytes) -> None:
    """Fork, lazy reads, deltas, ageing, deletion, collection with repack, replicas both ways."""
    run = store.run("r", metrics={"loss": "min"})
    for step in range(1, 6):
        run.save(state(step), step=step, metrics={"loss": 1.0 / step})
    fork = store.fork("r@best:loss", "tuned", include=["model.*"])
    assert fork.head is not None
    lazy = store.version("r@3")
    wanted = state(3)["model"]
    assert isinstance(wanted, dict)
    assert torch.equal(lazy["model.w2"][17:23], wanted["w2"][17:23])
    with ckptstore.open(tmp_path / "cold", create=True, encryption_key=other) as cold:
        report = store.replicate(cold)
        assert len(report.copied) == 6
        assert cold.verify().ok
        assert same(cold.load("r@5"), state(5))
        assert not store.replicate(cold).copied
        with ckptstore.open(tmp_path / "plain", create=True) as plain:
            cold.replicate(plain)
            assert same(plain.load("r@2"), state(2))
            ids = [version.content for version in plain.versions("r")]
            assert ids == [version.content for version in store.versions("r")]
    store.remove([f"r@{step}" for step in (1, 2, 4)])
    collected = store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
    assert collected.reclaimable_now
    assert store.verify().ok
    assert same(store.load("r@5"), state(5))


def test_a_damaged_store_is_healed_from_another_key(
    store: Store, tmp_path: Path, key: bytes, other: bytes
) -> None:
    """A replica of another key, named by its place, brings back what was lost."""
    for step in (1, 2):
        store.run("r").save(state(step), step=step)
    store.replicate(tmp_path / "cold", to_key=other)
    (pack, *_) = sorted((tmp_path / "s").glob("packs/*/*.pack"))
    pack.unlink()
    assert not store.verify().ok
    with pytest.raises(MissingKeyError):
        store.repair(tmp_path / "cold")
    assert store.repair(tmp_path / "cold", source_key=other).ok
    assert store.verify().ok
    assert same(store.load("r@1"), state(1))


def test_what_is_encrypted_does_not_come_to_lie_open_by_itself(
    store: Store, tmp_path: Path, other: bytes
) -> None:
    """No store without a key is made for it; one that somebody made is taken."""
    store.run("r").save(state(1), step=1)
    for dry_run in (True, False):
        with pytest.raises(MissingKeyError, match="to_key"):
            store.replicate(tmp_path / "t", dry_run=dry_run)
    assert not (tmp_path / "t").exists()
    with pytest.raises(InvalidInputError, match="for the place of a store"):
        store.replicate(store, to_key=other)
    assert store.replicate(tmp_path / "t", to_key=other, dry_run=True).copied
    store.replicate(tmp_path / "t", to_key=other)
    ckptstore.open(tmp_path / "open", create=True).close()
    store.replicate(tmp_path / "open")
    with ckptstore.open(tmp_path / "open") as plain:
        assert same(plain.load("r@1"), state(1))


def test_a_job_between_two_keys(
    tmp_path: Path, key: bytes, other: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's file names the keys of both sides; the target is made with its own."""
    monkeypatch.setenv("HOT_KEY", key.hex())
    (tmp_path / "cold.key").write_bytes(other.hex().encode())
    (tmp_path / "cold.key").chmod(0o600)
    with ckptstore.open(tmp_path / "hot", create=True, encryption_key=key) as store:
        store.run("r").save(state(1), step=1)
    file = tmp_path / "job.toml"
    file.write_text(
        f'[source]\nurl = "{tmp_path}/hot"\nkey = "env:HOT_KEY"\n'
        f'[target]\nurl = "{tmp_path}/cold"\nkey = "file:{tmp_path}/cold.key"\n'
        "[scrub]\ntarget = 1.0\n"
    )
    report = run_job(read_job(file))
    assert report.ok
    assert key.hex() not in repr(report)
    with ckptstore.open(tmp_path / "cold", encryption_key=other) as cold:
        assert same(cold.load("r@1"), state(1))
    file.write_text(file.read_text().replace(f'key = "file:{tmp_path}/cold.key"\n', ""))
    with pytest.raises(MissingKeyError):
        run_job(read_job(file))


_SAVING = """
import sys, ckptstore, torch
with ckptstore.open(sys.argv[1], encryption_key=bytes(range(1, 33))) as store:
    for step in range(int(sys.argv[2]), 10**9):
        store.run("r").save({"x": torch.full((300_000,), float(step))}, step=step)
        print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_savers_that_are_killed(store: Store, tmp_path: Path) -> None:
    """After each SIGKILL everything that was committed is there, and a saver goes on."""
    step = 0
    for kill in range(6):
        words = [sys.executable, "-c", _SAVING, str(tmp_path / "s"), str(step + 1)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(1 + kill % 3):
                step = int(child.stdout.readline())
            child.kill()
        assert store.resolve("r@latest").step >= step
        step = store.resolve("r@latest").step
        report = store.verify()
        assert report.ok, report.problems
    assert float(store.load(f"r@{step}")["x"][7]) == step


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
@pytest.mark.slow
def test_workers_of_other_processes(
    store: Store, tmp_path: Path, kind: type[ThreadPoolExecutor | ProcessPoolExecutor], other: bytes
) -> None:
    """A check and a copy by processes: each gets the key with its task's backend."""
    for step in (1, 2, 3):
        store.run("r").save(state(step), step=step)
    with (
        ckptstore.open(tmp_path / "t", create=True, encryption_key=other) as target,
        kind(2) as pool,
    ):
        assert len(store.replicate(target, executor=pool).copied) == 3
        assert target.verify(executor=pool).ok
        assert same(target.load("r@2"), state(2))


@pytest.mark.slow
def test_a_bucket(
    store: Store, s3_bucket: S3Bucket, tmp_path: Path, key: bytes, other: bytes
) -> None:
    """To S3 and back: sealed there, and the key of the access is not the key of the store."""
    for step in (1, 2):
        store.run("r").save(state(step), step=step)
    options = s3_bucket.options()
    with ckptstore.open(s3_bucket.url, create=True, encryption_key=other, **options) as bucket:
        assert len(store.replicate(bucket).copied) == 2
        bucket.run("own").save_async(state(9), step=9).result()
        assert bucket.verify().ok
    for name in s3_bucket.keys():  # noqa: SIM118 - a method of the bucket's
        data = s3_bucket.read(name)
        assert data is not None
        clear = name == "store.json" or name.startswith("keys/")
        assert data.startswith(b"{" if clear else MAGIC)
    with (
        ckptstore.open(s3_bucket.url, encryption_key=other, read_only=True, **options) as bucket,
        ckptstore.open(tmp_path / "back", create=True, encryption_key=key) as back,
    ):
        assert len(bucket.replicate(back).copied) == 3
        assert same(back.load("own@9"), state(9))
        assert same(bucket.load("r@1", include=["bias"])["bias"], state(1)["bias"])


# --- the wrapper --------------------------------------------------------------------------------
def wrapped(inner: MemoryBackend | FaultyBackend, material: bytes = b"k" * 32) -> EncryptedBackend:
    """Return an encrypted backend of small segments."""
    return EncryptedBackend(inner, DataKey(material), segment_bytes=4096)


def test_a_lost_reply_is_resolved_by_what_is_read_back(memory: MemoryBackend) -> None:
    """Each encryption of the same bytes differs: what counts is what they decrypt to."""
    fault = Fault(
        calls=frozenset({"put_if_absent"}), when=When.AFTER, error=lambda: AmbiguousWriteError("x")
    )
    backend = wrapped(FaultyBackend(memory, fault))
    with pytest.raises(AmbiguousWriteError):
        backend.put_if_absent("commits/1", b"mine")
    assert backend.get("commits/1", bytes_max=10) == b"mine"
    with pytest.raises(ObjectExistsError):
        backend.put_if_absent("commits/1", b"mine")
    assert backend.get("commits/1", bytes_max=10) == b"mine"


def test_a_put_that_is_repeated_compares_without_encryption(tmp_path: Path) -> None:
    """The same content again is no error, another is, as without encryption."""
    backend = EncryptedBackend(open_posix(str(tmp_path)), DataKey(b"k" * 32))
    backend.put("packs/a", b"same")
    backend.put("packs/a", bytearray(b"same"))
    for different in (b"other", b"sam", b"same more"):
        with pytest.raises((ObjectExistsError, ckptstore.CkptStoreError)):
            backend.put("packs/a", different)
    assert backend.get("packs/a", bytes_max=10) == b"same"


def test_a_commit_that_is_tried_again_seals_nothing_again(memory: MemoryBackend) -> None:
    """Sealing other bytes under a nonce that was used would give both away."""
    fault = Fault(
        calls=frozenset({"writer.commit"}), times=2, error=lambda: TransientStorageError("busy")
    )
    backend = wrapped(FaultyBackend(memory, fault))
    with backend.open_writer("packs/a") as writer:
        writer.write(bytes(10_000))
        for _ in range(2):
            with pytest.raises(TransientStorageError):
                writer.commit()
        writer.commit()
        with pytest.raises(ValueError, match="finished"):
            writer.write(b"more")
    assert backend.get("packs/a", bytes_max=10_000) == bytes(10_000)


@pytest.mark.parametrize("size", [100, 100_000])
def test_what_could_not_be_written_is_not_committed_without_it(
    memory: MemoryBackend, size: int
) -> None:
    """An object never appears without its end, even if who lost a write tries the commit again."""
    for call in range(1, 4):
        fault = Fault(
            calls=frozenset({"writer.write"}), at=call, error=lambda: TransientStorageError("busy")
        )
        writer = wrapped(FaultyBackend(memory, fault)).open_writer("packs/a")
        failed = 0
        for act in (lambda w=writer: w.write(bytes(size)), writer.commit, writer.commit):
            try:
                act()
            except StorageError:
                failed += 1
        assert bool(failed) is not any(True for _ in memory.list("packs/"))
        writer.abort()
        memory.delete("packs/a")


def test_a_writer_holds_little(memory: MemoryBackend) -> None:
    """However much is written at once, no more than some segments are held."""
    backend = wrapped(memory)
    writer = backend.open_writer("packs/a")
    assert isinstance(writer, EncryptedWriter)
    for size in (1, 100_000, 4096, 8192, 4095):
        writer.write(bytes(size))
        assert len(writer._held) <= 4096
        assert len(writer._ready) <= 16
    writer.abort()
    assert "packs/a" not in memory.objects


def _salts(backend: EncryptedBackend, name: str, answer: Queue[list[bytes]]) -> None:
    """Write some objects in a child, and tell what they begin with."""
    for index in range(20):
        backend.put(f"from/{name}-{index}", b"")
    heads: list[bytes] = []
    for index in range(20):
        head = bytearray(HEADER_BYTES)
        backend.inner.read_into(f"from/{name}-{index}", 0, [memoryview(head)])
        heads.append(bytes(head))
    answer.put(heads)


def test_forked_children_never_share_a_salt(tmp_path: Path) -> None:
    """Each object has its own, from the operating system: a fork copies no state of it."""
    backend = EncryptedBackend(open_posix(str(tmp_path)), DataKey(b"k" * 32))
    backend.put("from/parent", b"")
    context = multiprocessing.get_context("fork")
    answer: Queue[list[bytes]] = context.Queue()
    children = [context.Process(target=_salts, args=(backend, str(n), answer)) for n in range(4)]
    for child in children:
        child.start()
    salts = [head for _ in children for head in answer.get(timeout=600)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(set(salts)) == len(salts) == 80


def test_a_child_cannot_go_on_with_its_parents_writer(memory: MemoryBackend) -> None:
    """Both would seal different bytes under one nonce: the child is refused."""
    writer = wrapped(memory).open_writer("packs/a")
    writer.write(bytes(100))
    pid = os.fork()
    if not pid:
        code = 1
        try:
            writer.write(b"x")
        except InvalidInputError:
            try:
                writer.commit()
            except InvalidInputError:
                code = 0
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    writer.commit()


def test_a_pickled_backend_reads_and_writes(tmp_path: Path, key: bytes) -> None:
    """The store's key travels with it, which is what workers need; nothing of it shows."""
    with ckptstore.open(tmp_path / "s", create=True, encryption_key=key) as store:
        backend = pickle.loads(pickle.dumps(store.repo.backend))  # noqa: S301 - our own
        backend.put("packs/ab/x", b"there")
        assert store.repo.backend.get("packs/ab/x", bytes_max=9) == b"there"
        assert "key" not in repr(backend).lower().replace("retrying", "")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(backend.get, "packs/ab/x", bytes_max=9).result(60) == b"there"


def test_threads_read_and_write_at_once(tmp_path: Path) -> None:
    """Two threads and more share one backend, its pool and its heads."""
    backend = EncryptedBackend(open_posix(str(tmp_path)), DataKey(b"k" * 32))
    data = os.urandom(5_000_000)
    gate = threading.Barrier(6)

    def work(number: int) -> bool:
        gate.wait(120)
        with backend.open_writer(f"packs/{number}") as writer:
            for at in range(0, len(data), 700_001):
                writer.write(data[at : at + 700_001])
            writer.commit()
        good = True
        for at in range(0, 4_000_000, 333_333):
            out = memoryview(bytearray(900_000))
            backend.read_into(f"packs/{number}", at, [out[:5], out[5:]])
            good &= out == data[at : at + 900_000]
        return good

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.slow
def test_plain_stores_never_load_cryptography(tmp_path: Path) -> None:
    """Who has no key pays nothing for keys."""
    code = (
        "import sys, ckptstore, numpy\n"
        f"store = ckptstore.open({str(tmp_path / 's')!r}, create=True)\n"
        "store.run('r').save({'x': numpy.ones(3)}, step=1)\n"
        "store.load('r@1'); store.verify(); store.close()\n"
        "assert not [name for name in sys.modules if name.startswith('cryptography')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_key_of_an_access_is_not_the_key_of_a_store(tmp_path: Path) -> None:
    """s3fs has an option ``key``: a spec given there is refused with the right name."""
    with pytest.raises(InvalidInputError, match="option of the storage library") as caught:
        ckptstore.open(tmp_path / "s", create=True, key="env:X")
    assert "encryption_key=" in caught.value.hint


def test_opening_costs_two_requests_more(tmp_path: Path, key: bytes) -> None:
    """``store.json``, a listing of ``keys/`` and one record."""
    ckptstore.open(tmp_path / "s", create=True, encryption_key=key).close()
    with open_repo(tmp_path / "s", key=key, options=Options(read_only=True)) as repo:
        calls = Fault(at=0)
        from ckptstore.backends.key_sources import read_key
        from ckptstore.repo import open_on

        assert isinstance(repo.backend, EncryptedBackend)
        open_on(FaultyBackend(repo.backend.inner, calls), key=read_key(key))
        assert calls.seen == 3
