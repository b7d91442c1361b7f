"""DCP over tiers: what it saves is written back, and what was evicted is read from the replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptstore
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_saved_by_dcp_written_back_evicted_and_loaded(tmp_path: Path) -> None:
    """Tensors and plain values come back bit by bit, though only the replica has them."""
    with ckptstore.open(tmp_path / "hot", create=True) as hot:
        hot.add_replica("cold", tmp_path / "cold", create=True)
        run = hot.run("gpt", write_back="cold")
        for step in (1, 2):
            state = {"w": torch.full((300, 300), float(step)), "epoch": step}
            save(state, storage_writer=CkptStoreWriter(run, step=step), no_dist=True)
        assert hot.wait_replicated("gpt@1", 120).state == "replicated"
        assert hot.wait_replicated("gpt@2", 120).state == "replicated"
        hot.evict(["gpt@1"], replica="cold")
        hot.gc(grace_s=0.0, orphan_age_s=0.0)
        target: dict[str, Any] = {"w": torch.zeros(300, 300), "epoch": 0}
        load(target, storage_reader=CkptStoreReader(run, 1), no_dist=True)

    assert torch.equal(target["w"], torch.full((300, 300), 1.0))
    assert target["epoch"] == 1
