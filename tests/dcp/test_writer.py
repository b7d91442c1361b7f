"""What a writer offers beside what torch expects of one: sharing that can be left, and a word."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest
import torch
from heldback import BrokenBackend, HeldBackend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import InvalidInputError, SaveBusyError, StateError, StorageFullError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.integrations.sharded_states import PendingShards, fill, save_parts
from ckptstore.model import Version
from ckptstore.repo import create_on, open_on
from ckptstore.store import Run, Store, resume_check

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAYS = "was it started again without being resumed?"


class Watched(WrapperBackend):
    """Notes the keys of whole objects that are read."""

    def __init__(self, url: str) -> None:
        super().__init__(open_backend(url))
        self.read: list[str] = []

    def get(self, key: str, *, bytes_max: int) -> bytes:
        self.read.append(key)
        return self.inner.get(key, bytes_max=bytes_max)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a store with a version of step 10, of which this process knows nothing."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        save({"w": torch.arange(1e5)}, storage_writer=CkptStoreWriter(store.run("gpt"), step=10))
    monkeypatch.setattr(resume_check, "_chosen", {})
    return str(tmp_path / "store")


@pytest.mark.parametrize("share", [True, False])
def test_who_does_not_share_reads_no_manifest(url: str, share: bool) -> None:
    """Without sharing a save reads none and writes everything; with it, one, and nothing."""
    backend = Watched(url)
    with Store(open_on(backend)) as store:
        writer = CkptStoreWriter(store.run("gpt"), step=11, share=share)
        save({"w": torch.arange(1e5)}, storage_writer=writer)
        version = writer.version
        assert isinstance(version, Version)
        manifests = [key for key in backend.read if key.startswith("manifests/")]
        (logical, new) = (version.receipt[name] for name in ("logical_bytes", "new_bytes"))

        assert len(manifests) == (1 if share else 0)
        assert new == (0 if share else logical)
        assert torch.equal(store.load("gpt")["w"], torch.arange(1e5))
        assert store.verify().ok


def test_a_text_is_no_list_of_tags(url: str) -> None:
    """It would be taken letter by letter, and take tags of one letter away from other versions."""
    with ckptstore.open(url) as store, pytest.raises(InvalidInputError, match="tags=\\['best_one'"):
        CkptStoreWriter(store.run("gpt"), step=11, tags="best_one")


@pytest.mark.parametrize("said", [0, 1, 3])
def test_a_rank_that_says_nothing_is_missed(url: str, said: int) -> None:
    """Results of two ranks, of which none, one, or one twice say what they wrote: no version."""
    with ckptstore.open(url) as store:
        writer = CkptStoreWriter(store.run("gpt"), step=11)
        writer.set_up_storage_writer(is_coordinator=True)
        planner = DefaultSavePlanner()
        planner.set_up_planner({"w": torch.arange(1e5)}, is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        silent = [WriteResult(index=MetadataIndex("w"), size_in_bytes=0, storage_data=None)]
        with pytest.raises(StateError, match=f"2 ranks took part, and {said} say"):
            writer.finish(metadata, [results * said, silent])
        assert len(store.versions()) == 1
        writer.finish(metadata, [results])
        assert store.resolve("gpt").step == 11


def test_whether_to_share_and_to_retain_travels_with_the_writer(url: str) -> None:
    """Torch sends the writer to a process of its own, where it is the same."""
    with ckptstore.open(url) as store:
        writer = CkptStoreWriter(store.run("gpt", keep_last=2), step=11, share=False)
        sent = pickle.loads(pickle.dumps(writer))  # noqa: S301 - between processes, by torch
        assert sent._share is False
        assert sent._retain is True
        sent._session.close()


def test_what_a_run_keeps_holds_for_its_writers(url: str) -> None:
    """``keep_last`` and `retain` are as for ``Run.save``; without a policy nothing is written."""

    def saved(run: Run, step: int, retain: bool | None = None) -> list[int]:
        writer = CkptStoreWriter(run, step=step, retain=retain)
        save({"w": torch.arange(1e5) + step}, storage_writer=writer)
        return [version.step for version in run.versions()]

    with ckptstore.open(url) as store:
        run = store.run("gpt", keep_last=2)
        assert saved(run, 11) == [10, 11]
        assert saved(run, 12) == [11, 12]
        assert saved(run, 13, retain=False) == [11, 12, 13]
        assert saved(store.run("gpt"), 14) == [11, 12, 13, 14]
        assert saved(store.run("gpt"), 15, retain=True) == [14, 15]
        with pytest.raises(CheckpointException, match="no retention policy"):
            saved(store.run("other"), 1, retain=True)
        assert not store.run("other").versions()
        store.set_policy({"full": "last 1"})
        for step in (1, 2):
            assert saved(store.run("other"), step, retain=True) == [step]


def test_an_error_of_a_background_save_of_parts_is_raised_once(tmp_path: Path) -> None:
    """By its ``result``, or else by the next save; a load waits, and leaves it to that."""
    switch = tmp_path / "broken"
    backend = BrokenBackend(open_backend(tmp_path / "s", retry=False), errno.ENOSPC, switch)
    model = torch.nn.Linear(4, 4)

    def begin(step: int) -> PendingShards:
        torch.nn.init.constant_(model.bias, step)
        state = {"model": model.state_dict()}
        return save_parts(run, state, ["model"], step=step, background=True)

    with Store(create_on(backend)) as store:
        run = store.run("gpt")
        first = begin(1)
        assert first.result().step == 1
        assert first.done
        switch.touch()
        failed = begin(2)
        for _ in range(2):
            with pytest.raises(StorageFullError):
                failed.result()
        switch.unlink()
        assert begin(3).result().step == 3
        switch.touch()
        begin(4)
        fill(run, "latest", {"model": model}, {})
        switch.unlink()
        with pytest.raises(StorageFullError):
            begin(5)
        assert begin(6).result().step == 6
        assert [version.step for version in run.versions()] == [1, 3, 6]


def test_a_running_save_of_parts_is_busy(tmp_path: Path) -> None:
    """A timeout raises what that of every pending save does; the save goes on."""
    backend = HeldBackend(open_backend(tmp_path / "s"), tmp_path)
    with Store(create_on(backend)) as store:
        state = {"model": {"w": torch.ones(4)}}
        pending = save_parts(store.run("gpt"), state, ["model"], step=1, background=True)
        with pytest.raises(SaveBusyError, match="under way after 0 s"):
            pending.result(0)
        assert not pending.done
        backend.go()
        assert pending.result().step == 1


def test_a_training_that_is_not_resumed_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The rank that commits warns if the step goes back and it has loaded nothing of the run."""
    with ckptstore.open(url) as store:
        save({"w": torch.ones(3)}, storage_writer=CkptStoreWriter(store.run("gpt"), step=1))
    assert caplog.text.count(SAYS) == 1


def test_one_that_has_loaded_is_told_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A reader's load is one; the process that torch saves by learns of it with the writer."""
    with ckptstore.open(url) as store:
        run = store.run("gpt")
        load({"w": torch.zeros(100_000)}, storage_reader=CkptStoreReader(run))
        sent = pickle.dumps(CkptStoreWriter(run, step=1))
        resume_check._chosen.clear()
        writer = pickle.loads(sent)  # noqa: S301 - between processes, by torch
        save({"w": torch.ones(3)}, storage_writer=writer)
        writer._session.close()
    assert SAYS not in caplog.text
