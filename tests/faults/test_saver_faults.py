"""Storage that fails under a save in the background: the error arrives, and no version appears.

Every fault is provoked in the thread engine and in the process engine, where it happens in the
child. What arrives is what `save` would have raised; it arrives once, at whoever asks first: the
pending save, the next save, or `close`; and it is in the log at once.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from heldback import BrokenBackend

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError, LimitError, StorageError, StorageFullError
from ckptstore.events import SaveEvent
from ckptstore.repo import create_on
from ckptstore.store import Store

pytestmark = pytest.mark.short(sample=1)


@pytest.fixture(params=["thread", "process"])
def engine(request: pytest.FixtureRequest) -> str:
    """Return each engine in turn."""
    return str(request.param)


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{place}": torch.randn(300_000, generator=generator) for place in range(4)}


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    """Return the file that breaks the storage as long as it is there."""
    return tmp_path / "broken"


def _broken(tmp_path: Path, code: int, switch: Path, engine: str) -> Store:
    inner = open_backend(tmp_path / "store", retry=False)
    return Store(create_on(BrokenBackend(inner, code, switch), options=Options(engine=engine)))


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StorageFullError), (errno.EIO, StorageError)]
)
def test_what_the_kernel_answers_arrives(
    tmp_path: Path, switch: Path, engine: str, code: int, error: type[CkptStoreError]
) -> None:
    """ENOSPC and EIO in a worker: raised by `result`, no version, and the next save is sound."""
    with _broken(tmp_path, code, switch, engine) as store:
        run = store.run("gpt")
        first = run.save_async(_state(1), step=1).result()
        switch.touch()
        pending = run.save_async(_state(2), step=2)
        with pytest.raises(error) as caught:
            pending.result()
        assert type(caught.value) is error
        assert caught.value.__notes__ == ["in the background save of gpt@2"]
        assert pending.state == "failed"
        assert [version.id for version in run.versions()] == [first.id]

        switch.unlink()
        third = run.save_async(_state(3), step=3).result()  # it was told: nothing is raised here
        assert third.parent == first.id
        assert torch.equal(run.load()["w3"], _state(3)["w3"])
        assert store.verify().ok


def test_the_next_save_raises(
    tmp_path: Path, switch: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that asks no pending save hears of it at its next one, once; the log had it."""
    heard: list[SaveEvent] = []
    with _broken(tmp_path, errno.ENOSPC, switch, engine) as store:
        store.observe(heard.append)
        run, other = store.run("gpt"), store.run("other")
        switch.touch()
        pending = run.save_async(_state(1), step=1)
        store._session.saver.wait()
        records = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert [one.name for one in records] == ["ckptstore.saves"]
        assert "gpt@1 failed" in caplog.text
        assert heard[-1].error_kind == "storage_full"
        switch.unlink()

        other.save_async(_state(5), step=5).result()  # another run is not concerned
        with pytest.raises(StorageFullError):
            run.save_async(_state(2), step=2)
        run.save_async(_state(3), step=3).result()
        assert [version.step for version in run.versions()] == [3]
        assert pending.error is not None


def test_close_does_not_hide_what_ended_the_block(
    tmp_path: Path, switch: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception of the training is the one that is seen; the save's is logged."""
    switch.touch()
    with pytest.raises(ZeroDivisionError):
        _train_and_fail(_broken(tmp_path, errno.ENOSPC, switch, engine))
    assert "besides what ended the block" in caplog.text


def _train_and_fail(store: Store) -> None:
    with store:
        store.run("gpt").save_async(_state(1), step=1)
        _ = 1 / 0


@pytest.mark.usefixtures("file_size_limit")
def test_a_file_that_may_not_grow(tmp_path: Path, engine: str) -> None:
    """The kernel itself refuses, nothing is patched; it refuses shared memory, too."""
    error = StorageFullError if engine == "thread" else LimitError
    with ckptstore.open(tmp_path / "s", create=True, engine=engine) as store:
        run = store.run("gpt")
        with pytest.raises(error):
            run.save_async(_state(1), step=1).result()
        assert run.versions() == []


@pytest.fixture
def s3_store(s3_bucket: S3Bucket, s3_proxy: FaultProxy, engine: str) -> Iterator[Store]:
    """Return a store on S3 behind the proxy; failures are tried again by nobody."""
    options = s3_bucket.options(f"http://127.0.0.1:{s3_proxy.port}")
    backend = open_backend(s3_bucket.url, retry=False, **options)
    with Store(create_on(backend, options=Options(engine=engine))) as store:
        yield store


@pytest.mark.parametrize("part", ["packs", "manifests"])
@pytest.mark.short(sample=1)
def test_http_500(s3_store: Store, s3_proxy: FaultProxy, part: str) -> None:
    """A server that answers 500 to packs, or to manifests: an error, no version, then recovery."""
    run = s3_store.run("gpt")
    first = run.save_async(_state(1), step=1).result()
    s3_proxy.set(Fault(kind=Kind.STATUS, path=part, status=500, code="InternalError", times=0))

    with pytest.raises(StorageError):
        run.save_async(_state(2), step=2).result()
    s3_proxy.set()

    assert [version.id for version in run.versions()] == [first.id]
    run.save_async(_state(3), step=3).result()
    assert torch.equal(run.load()["w0"], _state(3)["w0"])


@pytest.mark.slow
def test_a_dead_server(s3_store: Store, s3_proxy: FaultProxy) -> None:
    """Every connection is reset: the same, and whether a version appeared can be asked later."""
    run = s3_store.run("gpt")
    first = run.save_async(_state(1), step=1).result()
    s3_proxy.set(Fault(kind=Kind.RESET, times=0))

    pending = run.save_async(_state(2), step=2)
    with pytest.raises(StorageError):
        pending.result()
    s3_proxy.set()

    assert [version.id for version in run.versions()] == [first.id]
    run.save_async(_state(3), step=3).result()
