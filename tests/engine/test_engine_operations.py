"""Verification and replication over engines: same reports, same stores, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import enginetasks as tasks
import pytest
import torch
from damaging import flip_pack
from daskcluster import Cluster

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.engine.engine import open_engine
from ckptstore.errors import InvalidInputError, WorkerDiedError
from ckptstore.events import Progress
from ckptstore.maintenance.check import verify_tasks
from ckptstore.maintenance.check.integrity_scan import VerifyState
from ckptstore.maintenance.check.verify import VerifyReport
from ckptstore.objects import copying
from ckptstore.repo import create_on

CHUNK = 1 << 16
ENGINES = ("own threads", "own processes", "dask")
Spec = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make many tasks of little."""
    for name in ("VERIFY_TASK_BYTES", "COPY_TASK_BYTES", "COPY_TASK_BYTES_MIN"):
        monkeypatch.setattr(limits, name, 150_000)
    monkeypatch.setattr(limits, "VERIFY_TASK_PACKS", 2)


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> Iterator[Spec]:
    """Return a function from the name of an engine to what asks for it."""
    with ExitStack() as stack:

        def of(name: str) -> Any:  # noqa: ANN401 - a text or an executor
            if name == "dask":
                running: Cluster = request.getfixturevalue("cluster")
                running.await_workers()
                return running.address
            if name == "own threads":
                return stack.enter_context(ThreadPoolExecutor(2))
            return stack.enter_context(ProcessPoolExecutor(2, mp_context=get_context("spawn")))

        yield of


def state(step: int) -> dict[str, Any]:
    """Return a state of which most stays, some changes, and some follows from another part."""
    torch.manual_seed(7)
    weight = torch.randn(300, 300)
    weight[step] += 1
    torch.manual_seed(step)
    half = weight.bfloat16()
    return {"model": {"w": weight, "half": half}, "m": torch.randn(200, 300), "step": step}


def filled(root: Path, *, codec: str = "planes", steps: int = 4) -> ckptstore.Store:
    """Return a store of some versions."""
    store = ckptstore.open(root, create=True, chunk_bytes=CHUNK, codec=codec)
    run = store.run("gpt", metrics={"loss": "min"})
    for step in range(steps):
        run.save(state(step), step=step, metrics={"loss": 1 / (step + 1)}, tags=[f"t{step}"])
    return store


def assert_loads(store: ckptstore.Store, steps: int = 4) -> None:
    """All versions are there, bit for bit."""
    assert [version.step for version in store.versions()] == list(range(steps))
    for step in range(steps):
        found, wanted = store.load(f"gpt@{step}"), state(step)
        assert torch.equal(found["m"], wanted["m"])
        assert all(torch.equal(found["model"][n], wanted["model"][n]) for n in ("w", "half"))


def harm(root: Path) -> None:
    """Flip a bit in the oldest pack, cut the next one short, and remove the third."""
    packs = root.glob("packs/*/*.pack")
    first, second, third, *_ = sorted(packs, key=lambda path: path.stat().st_mtime_ns)
    flip_pack(first)
    second.write_bytes(second.read_bytes()[:-1000])
    third.unlink()


def same(report: VerifyReport) -> VerifyReport:
    """Return a report without how long it took."""
    return replace(report, seconds=0.0)


@pytest.mark.short("delta-dask")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("codec", ["planes", "delta"])
def test_reports_are_the_same_in_any_engine(
    tmp_path: Path, spec: Spec, name: str, codec: str
) -> None:
    """Whole stores and damaged ones, samples, records and versions: equal in every field."""
    with filled(tmp_path / "s", codec=codec) as store:
        for harmed in (False, True):
            if harmed:
                harm(tmp_path / "s")
            asked: dict[str, Any]
            for asked in ({}, {"sample": 0.5, "part": 1}, {"level": "records"}):
                wanted = same(store.verify(**asked))
                told: list[Progress] = []
                engine = {"executor": spec(name), "workers": 2}
                found = store.verify(**asked, **engine, progress=told.append)
                assert same(found) == wanted
                assert wanted.ok is (not harmed)
                done = [step.done for step in told]
                assert done == sorted(done)
        refs = ["gpt@1", "gpt@3"]
        assert same(store.verify(refs, executor=spec(name))) == same(store.verify(refs))


def test_rows_are_told_when_all_their_tasks_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that comes before the next task is planned does not end the batch of both."""
    monkeypatch.setattr(limits, "VERIFY_TASK_BYTES", 1)  # a task for each chunk
    monkeypatch.setattr(limits, "ENGINE_AHEAD", 1)  # planned when the one before is done
    told: list[tuple[int, set[int]]] = []
    real = VerifyState.told

    def listen(state: VerifyState, version: Any, rows: range, wrong: Any) -> None:  # noqa: ANN401
        told.append((len(rows), set(wrong)))
        real(state, version, rows, wrong)

    monkeypatch.setattr(VerifyState, "told", listen)
    with filled(tmp_path / "s", steps=1) as store, ThreadPoolExecutor(1) as pool:
        pieces = len(store.repo.manifests.read(store.versions()[0]).pieces)
        assert store.verify(executor=pool, workers=1, resume=tmp_path / "state").ok
    assert told == [
        (pieces, set()),
        (1, set()),
    ]  # the chunks, and the tensor that follows from them
    assert pieces > 2


def test_what_is_recorded_is_the_same(tmp_path: Path, spec: Spec) -> None:
    """Sound versions are recorded, damaged ones are not, whoever has read them."""
    found = []
    for engine in (None, spec("own processes")):
        root = tmp_path / str(engine is None)
        with filled(root, steps=3) as store:
            pack = max(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
            pack.write_bytes(bytes(pack.stat().st_size))
            report = store.verify(record=True, executor=engine)
            steps = [v.step for v in store.versions() if v.verified]
            found.append((len(report.recorded), steps, len(report.damaged_versions)))
    assert found[0] == found[1] == (2, [0, 1], 1)


class Interrupt(Exception):
    """Stands for whatever stops a check."""


def test_an_interrupted_check_goes_on_in_another_engine(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state in the file is of the check, not of who did it."""
    monkeypatch.setattr(limits, "VERIFY_BATCH_BYTES", 200_000)
    with filled(tmp_path / "s") as store:
        harm(tmp_path / "s")
        whole = store.verify()

        def stop(progress: Progress) -> None:
            if progress.stage == "verify" and progress.done > 700_000:
                raise Interrupt

        file = tmp_path / "state"
        with pytest.raises(Interrupt):
            store.verify(resume=file, executor=spec("own processes"), progress=stop)
        assert file.stat().st_size > 200
        resumed = store.verify(resume=file)
        assert resumed.problems == whole.problems
        assert resumed.read_bytes < whole.read_bytes


@pytest.mark.short("dask")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("codec", ["planes", "delta"])
def test_stores_come_whole_through_any_engine(
    tmp_path: Path, spec: Spec, name: str, codec: str
) -> None:
    """Same chunks, same versions, every byte; the second time nothing travels."""
    engine = {"executor": spec(name), "workers": 2}
    with (
        filled(tmp_path / "s", codec=codec) as source,
        ckptstore.open(tmp_path / "plain", create=True) as plain,
        ckptstore.open(tmp_path / "spread", create=True) as spread,
    ):
        wanted = source.replicate(plain)
        told: list[Progress] = []
        found = source.replicate(spread, **engine, progress=told.append)
        assert (found.chunks_count, found.chunk_bytes) == (wanted.chunks_count, wanted.chunk_bytes)
        assert found.copied == wanted.copied
        assert found.checked
        assert found.noted
        assert_loads(spread)
        assert spread.verify().ok
        assert {v.id for v in spread.versions()} == {v.id for v in source.versions()}
        assert told[-1].done == told[-1].total
        assert source.replicate(spread, **engine).chunks_count == 0
        assert spread.gc(dry_run=True, orphan_age_s=0.0, grace_s=0.0).orphans["packs"].count == 0


@pytest.mark.parametrize("name", ["own threads", "own processes"])
def test_a_damaged_version_keeps_no_other_back(tmp_path: Path, spec: Spec, name: str) -> None:
    """The failure is that of the version, with tensor and pack, and the rest comes."""
    root = tmp_path / "s"
    with (
        filled(root) as source,
        ckptstore.open(tmp_path / "t", create=True) as target,
        ckptstore.open(tmp_path / "u", create=True) as plain,
    ):
        pack = max(root.glob("packs/*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
        flip_pack(pack)
        report = source.replicate(target, executor=spec(name))
        assert [failure.step for failure in report.failures] == [3]
        found, other = report.failures, source.replicate(plain).failures
        assert [replace(one, message="") for one in found] == [
            replace(one, message="") for one in other
        ]
        assert all(f"pack {pack.stem}" in one.message for one in (*found, *other))
        assert [v.step for v in target.versions() if v.level == "full"] == [0, 1, 2]


def test_bytes_that_change_on_the_way_never_show(tmp_path: Path) -> None:
    """What a task reads back must be what it wrote."""

    class Bad(MemoryBackend):
        def read_into(self, key: str, offset: int, buffers: Any) -> None:  # noqa: ANN401
            super().read_into(key, offset, buffers)
            if key.startswith("packs/") and len(buffers[-1]):
                buffers[-1][0] ^= 1

    for codec in ("planes", "delta"):
        target = ckptstore.Store(create_on(Bad(f"{tmp_path}/{codec}"), chunk_bytes=CHUNK))
        with filled(tmp_path / codec, codec=codec, steps=2) as source:
            report = source.replicate(target, executor="threads", workers=2)
            assert len(report.failures) == 2
            assert all("does not hold" in failure.message for failure in report.failures)
            assert {v.level for v in target.versions()} == {"record"}
            assert source.replicate(target, check=False, executor="threads", workers=2).copied


def test_the_bandwidth_is_that_of_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task has its share of the limit, and of the memory and the threads."""
    seen: list[copying.CopyTask] = []

    def copy(task: copying.CopyTask) -> Any:  # noqa: ANN401
        seen.append(task)
        return real(task)

    real = copying.copy_part
    monkeypatch.setattr(copying, "copy_part", copy)
    with (
        filled(tmp_path / "s", steps=1) as source,
        ckptstore.open(tmp_path / "t", create=True, host_bytes=1 << 28, workers=4) as target,
    ):
        source.replicate(target, executor="threads", workers=4, bytes_per_s=8e9)
    assert len(seen) > 2
    assert {task.copies.bytes_per_s for task in seen} == {2e9}
    assert {task.copies.options.host_bytes for task in seen} == {1 << 26}
    assert {task.copies.options.workers for task in seen} == {1}


@pytest.mark.parametrize("name", ["own processes", "dask"])
@pytest.mark.parametrize("operation", ["verify", "replicate"])
@pytest.mark.short(sample=2)
def test_workers_may_be_killed_in_the_middle(
    tmp_path: Path, spec: Spec, name: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of a worker at work: the report is whole, the target loads; orphans are for gc.

    An executor that this breaks ends the operation with a typed error; another one finishes it.
    """
    killed = threading.Event()
    with filled(tmp_path / "s") as source, ckptstore.open(tmp_path / "t", create=True) as target:
        wanted = same(source.verify())

        def strike(engine: Any) -> None:  # noqa: ANN401
            pid = next(iter(engine.map(tasks.number_of, [0])))
            os.kill(pid, signal.SIGKILL)
            killed.set()

        module = verify_tasks if operation == "verify" else copying
        taken = module.cut_rows

        def cut(*arguments: Any) -> Iterator[Any]:  # noqa: ANN401
            for count, part in enumerate(taken(*arguments)):
                if count == 1 and not killed.is_set():  # one task is under way
                    strike(engines[0])
                yield part

        engines: list[Any] = []
        opened = open_engine

        def opening(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            return _Noting(opened(*arguments, **options), engines)

        monkeypatch.setattr(module, "cut_rows", cut)
        monkeypatch.setattr("ckptstore.maintenance.core.task_pool.open_engine", opening)

        def operate() -> Any:  # noqa: ANN401 - a report
            pool = spec(name)
            if operation == "verify":
                return source.verify(executor=pool, workers=2)
            return source.replicate(target, executor=pool, workers=2)

        if name == "own processes":
            with pytest.raises(WorkerDiedError, match="BrokenProcessPool"):
                operate()
        if operation == "verify":
            assert same(operate()) == wanted
        else:
            assert operate().failures == ()
            assert_loads(target)
            target.gc(grace_s=0.0, orphan_age_s=0.0)
            assert target.verify().ok
        assert killed.is_set()


class _Noting:
    """A context manager around another, which notes what that gives."""

    def __init__(self, inner: Any, seen: list[Any]) -> None:  # noqa: ANN401
        self._inner = inner
        self._seen = seen

    def __enter__(self) -> Any:  # noqa: ANN401
        found = self._inner.__enter__()
        self._seen.append(found)
        return found

    def __exit__(self, *arguments: object) -> Any:  # noqa: ANN401
        return self._inner.__exit__(*arguments)


@pytest.mark.slow
def test_a_task_that_always_kills_ends_the_operation(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After bounded tries a typed error comes; what was committed stays, and the rest can come."""
    with filled(tmp_path / "s") as source, ckptstore.open(tmp_path / "t", create=True) as target:
        source.replicate(target, ["gpt@0"])
        with monkeypatch.context() as patched:
            patched.setattr(copying, "copy_part", tasks.die)
            patched.setattr(verify_tasks, "look", tasks.die)
            with pytest.raises(WorkerDiedError, match="KilledWorker"):
                source.replicate(target, executor=cluster.address, workers=2)
            with pytest.raises(WorkerDiedError, match="KilledWorker"):
                source.verify(executor=cluster.address, workers=2)
        assert [v.step for v in target.versions() if v.level == "full"] == [0]
        assert source.replicate(target, executor=cluster.address).failures == ()
        assert_loads(target)


def test_storage_that_others_cannot_reach_is_refused(tmp_path: Path, spec: Spec) -> None:
    """Before anything is done, and it names the storage and what to do."""
    with filled(tmp_path / "s", steps=1) as source:
        hidden = ckptstore.Store(create_on(MemoryBackend(f"{tmp_path}"), chunk_bytes=CHUNK))
        with pytest.raises(InvalidInputError, match="memory of this process -- use the engine"):
            source.replicate(hidden, executor=spec("own processes"))
        with pytest.raises(InvalidInputError, match="memory of this process"):
            hidden.verify(executor=spec("own processes"))
        assert hidden.versions() == []
        assert source.replicate(hidden, executor="threads", workers=2).copied
