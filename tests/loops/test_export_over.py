"""Exports over folders that hold something: an earlier export, files of others, links, modes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from ckptstore.errors import CkptStoreError, ConflictError, InvalidInputError
from ckptstore.integrations.export_folder import RECORD, export_folder
from ckptstore.integrations.files import import_file
from ckptstore.integrations.pretrained import describe_model
from ckptstore.integrations.transformers import export_pretrained
from ckptstore.store import Store

SHARDS = {"one": "1GB", "few": "8KB", "many": "5KB"}
LEAVES = ("replace", "rename", "unlink", "link")
"""Calls that change names in a folder."""


class Crash(BaseException):
    """The process ends here."""


def _model(seed: int, layers: int = 1) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=layers, n_head=2)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models as save_pretrained writes them: two seeds, three kinds of files."""
    root = tmp_path_factory.mktemp("saved")
    for seed, (kind, size) in itertools.product((0, 1), SHARDS.items()):
        _model(seed).save_pretrained(root / f"{kind}{seed}", max_shard_size=size)
        _model(seed, layers=2).save_pretrained(root / f"deep-{kind}{seed}", max_shard_size=size)
    adapted = get_peft_model(_model(5), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(root / "adapter0")
    return root


def _put(source: Path, folder: Path) -> None:
    """Export the files of a folder to another one."""
    with export_folder(folder) as made:
        shutil.copytree(source, made, dirs_exist_ok=True)


def _weights(source: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = GPT2LMHeadModel.from_pretrained(source).state_dict()
    return found


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(("first", "second"), [*itertools.product(SHARDS, repeat=2)])
def test_an_export_over_an_export_is_the_new_one_at_each_moment_or_the_old_one(
    store: Store, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    first: str, second: str,
) -> None:  # fmt: skip
    """After a crash at any change of a name, Transformers and the import read one of them whole.

    The next export needs no help, and its folder holds what an export to a new folder holds.
    """
    wanted = [_weights(saved / f"{kind}{seed}") for seed, kind in enumerate((first, second))]
    _put(saved / f"{second}1", tmp_path / "new")
    seen = []
    for crash in itertools.count():
        folder = tmp_path / f"crash{crash}"
        _put(saved / f"{first}0", folder)
        calls = itertools.count()

        def call(*arguments: object, real: Callable[..., None], **options: object) -> None:
            if next(calls) >= crash:
                raise Crash
            real(*arguments, **options)

        with monkeypatch.context() as patched:
            for name in LEAVES:
                real = getattr(os, name)
                patched.setattr(os, name, lambda *a, real=real, **k: call(*a, real=real, **k))
            try:
                _put(saved / f"{second}1", folder)
            except Crash:
                done = False
            else:
                done = True
        found = _weights(folder)
        assert any(_same(found, one) for one in wanted), f"after {crash} calls"
        seen.append(_same(found, wanted[1]))
        version = import_file(store, folder, run=f"r{crash}")
        read = store.load(f"#{version.id}")["model"]
        assert all(torch.equal(read[key], found[key]) for key in read)
        _put(saved / f"{second}1", folder)
        assert _names(folder) == _names(tmp_path / "new")
        assert _same(_weights(folder), wanted[1])
        if done:
            break
    assert seen == sorted(seen)
    assert not seen[0]
    assert seen[-1]
