"""What a writer offers beside what torch expects of one: sharing that can be left, and a word."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.errors import StateError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.model import Version
from ckptstore.repo import open_on
from ckptstore.store import Store, resume_check

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


def test_whether_to_share_travels_with_the_writer(url: str) -> None:
    """Torch sends the writer to a process of its own, where it is the same."""
    with ckptstore.open(url) as store:
        writer = CkptStoreWriter(store.run("gpt"), step=11, share=False)
        sent = pickle.loads(pickle.dumps(writer))  # noqa: S301 - between processes, by torch
        assert sent._share is False
        sent._session.close()


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
