"""What a writer offers beside what torch expects of one: sharing that can be left, and a word."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptstore
from ckptstore.backends.registry import open_backend
from ckptstore.backends.wrapper import WrapperBackend
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
        """Note, and pass on."""
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


def test_whether_to_share_travels_with_the_writer(url: str) -> None:
    """Torch sends the writer to a process of its own, where it is the same."""
    with ckptstore.open(url) as store:
        writer = CkptStoreWriter(store.run("gpt"), step=11, share=False)
        sent = pickle.loads(pickle.dumps(writer))  # noqa: S301 - between processes, by torch
        assert sent._share is False
        sent._store.close()


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
        writer._store.close()
    assert SAYS not in caplog.text
