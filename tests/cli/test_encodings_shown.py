"""``ckptstore show`` tells how tensors are stored: form, error, bound and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose one version is rounded, derived, coded, and kept in vain."""
    path = tmp_path_factory.mktemp("encoded")
    random = torch.Generator().manual_seed(1)
    master = torch.randn(80, 90, generator=random)
    state = {
        "model": {"w": torch.randn(80, 90, generator=random), "low": master.to(torch.bfloat16)},
        "optimizer": {"master": master, "exp_avg": torch.randn(80, 90, generator=random)},
        "table": torch.randn(80, 90, generator=random),
    }
    rules = {"model.w": "bf16:rel_l2=0.004", "*.exp_avg": "int8", "table": "int8:rel_l2=1e-5"}
    with ckptstore.open(path, create=True) as store:
        store.run("gpt").save(state, step=1, encodings=rules)
    return path


def test_text_lists_what_is_not_stored_as_it_is(cli: Any, encoded: Path) -> None:  # noqa: ANN401
    """A table of forms, and in the metadata what fell back; other tensors are not in either."""
    shown = cli("show", "gpt", "-s", encoded)
    assert shown.code == 0
    table = shown.out.split("ENCODED")[1].split("RECEIPT")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines()[1:] if line.strip()}
    assert set(rows) == {"model.w", "model.low", "optimizer.exp_avg"}
    assert rows["model.w"][1] == "bf16"
    assert rows["model.w"][-1] == "0.004"
    assert rows["model.low"][1:3] == ["as", "optimizer.master"]
    assert rows["optimizer.exp_avg"][1] == "int8"
    assert rows["optimizer.exp_avg"][-1] == "-"
    assert "the relative error would be" in shown.out


def test_the_document_has_figures(cli: Any, encoded: Path) -> None:  # noqa: ANN401
    """Every tensor has its form, its errors, their bounds, and the bytes of its codes."""
    tensors = {
        t["path"]: t for t in cli("show", "gpt", "--json", "-s", encoded).document["tensors"]
    }
    size = 80 * 90
    weight = tensors["model.w"]
    assert (weight["encoding"], weight["coded_bytes"]) == ("bf16", 2 * size)
    assert 0 < weight["rel_l2"] < weight["rel_l2_bound"] == 0.004
    assert weight["max_abs"] > 0
    assert weight["max_abs_bound"] is None
    assert tensors["model.low"]["derived_from"] == "optimizer.master"
    assert tensors["model.low"]["coded_bytes"] == 0
    assert tensors["optimizer.exp_avg"]["coded_bytes"] == size + 4 * -(-size // 256)
    assert tensors["table"]["encoding"] == "lossless"
    assert tensors["table"]["coded_bytes"] == 4 * size


def test_a_version_without_forms_has_no_table(cli: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Nothing is said of encodings where there are none."""
    with ckptstore.open(tmp_path, create=True) as store:
        store.run("gpt").save({"w": torch.ones(9)}, step=1)
    assert "ENCODED" not in cli("show", "gpt", "-s", tmp_path).out
