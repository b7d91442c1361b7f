"""One store with models of all kinds, served to all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from peft import LoraConfig, get_peft_model
from servekit import Server, save_llama, served, tiny_llama

import ckptstore
from ckptstore.integrations.pretrained import describe_model


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client reach servers of the tests, whatever tests before have set."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the location of a store; its folder takes logs."""
    place = tmp_path_factory.mktemp("serving") / "store"
    with ckptstore.open(place, create=True) as store:
        save_llama(store, "gpt", tiny_llama(), metrics={"val_loss": 1.0})
        save_llama(store, "gpt", tiny_llama(seed=1), step=2, metrics={"val_loss": 2.0})
        save_llama(store, "bf16", tiny_llama(dtype=torch.bfloat16))
        save_llama(store, "tied", tiny_llama(tied=True))
        save_llama(store, "lr=1e-4/a", tiny_llama(seed=2))
        store.run("gpt").tag(1, "good/one")
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        adapted = get_peft_model(tiny_llama(), lora)
        state = {"model": adapted.state_dict(), "pretrained": describe_model(adapted)}
        store.run("lora").save(state, step=1, roles={"pretrained": "weights"})
        store.run("big").save({"model": {"w": torch.randn(5_000_000)}}, step=1)
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """Return a server of the store, whose files of weights are small."""
    with served(str(place), place.parent, "--max-shard-size", "100000") as server:
        yield server
