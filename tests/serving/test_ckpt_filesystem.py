"""``ckpt://`` for fsspec: files of versions without a server."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load
from servekit import save_llama, tiny_llama

import ckptstore
from ckptstore.errors import InvalidInputError
from ckptstore.serving.filesystem import CkptFileSystem

fsspec.register_implementation("ckpt", CkptFileSystem, clobber=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the location of a store with a run whose name and tag have slashes."""
    place = str(tmp_path / "store")
    with ckptstore.open(place, create=True) as store:
        save_llama(store, "exp/gpt", tiny_llama(), metrics={"val_loss": 2.0})
        save_llama(store, "exp/gpt", tiny_llama(seed=1), step=2, metrics={"val_loss": 1.0})
        store.run("exp/gpt").tag(2, "good/one")
        save_llama(store, "exp/gpt", tiny_llama(seed=2), step=3)
    return place


def test_the_entry_point_names_the_class() -> None:
    """Fsspec finds the class by the entry point of the package."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["ckpt"].partition(":")
    assert getattr(import_module(module), name) is CkptFileSystem


@pytest.mark.parametrize("ref", ["2", "best:val_loss", "good/one", "~1"])
def test_every_ref_is_a_folder(url: str, ref: str) -> None:
    """Weights read through fsspec are those of the version of the ref."""
    with fsspec.open(f"ckpt://exp/gpt@{ref}/model.safetensors", store=url) as file:
        found = load(file.read())
    model = tiny_llama(seed=1).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    assert found.keys() == model.keys()


def test_a_tag_may_begin_with_another_tag(url: str) -> None:
    """A path leads to the longest ref that it begins with, and that holds its file."""
    with ckptstore.open(url) as store:
        run = store.run("exp/gpt")
        run.tag(1, "good")
        run.tag(3, "good/one/ema")
    system = fsspec.filesystem("ckpt", store=url, skip_instance_cache=True)
    for ref, step in (("good", 1), ("good/one", 2), ("good/one/ema", 3)):
        path = f"exp/gpt@{ref}/model.safetensors"
        assert system.cat_file(path) == system.cat_file(f"exp/gpt@{step}/model.safetensors")
        assert path in system.ls(f"exp/gpt@{ref}", detail=False)


def test_a_location_may_follow_the_path(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is named by fsspec's chaining, or by the environment; a dtype by the ref."""
    path = "ckpt://exp/gpt@2?dtype=bf16/model.safetensors"
    chained = fsspec.open(f"{path}::file://{url}").open().read()
    assert load(chained)["lm_head.weight"].dtype == torch.bfloat16
    monkeypatch.setenv("CKPTSTORE_URL", url)
    CkptFileSystem.clear_instance_cache()
    assert fsspec.open(path).open().read() == chained
    monkeypatch.delenv("CKPTSTORE_URL")
    CkptFileSystem.clear_instance_cache()
    with pytest.raises(InvalidInputError, match="no store"):
        CkptFileSystem()


def test_another_store_is_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever names it: fsspec keeps none, whose arguments alone do not tell the store."""
    found = []
    for name, step in (("one", 1), ("two", 2)):
        with ckptstore.open(tmp_path / name / "s", create=True) as store:
            save_llama(store, "gpt", tiny_llama(), step=step)
        monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / name / "s"))
        found.append(fsspec.filesystem("ckpt").ls("", detail=False))
        monkeypatch.chdir(tmp_path / name)
        assert fsspec.filesystem("ckpt", store="s").ls("", detail=False) == found[-1]
    assert found[0] != found[1]


def test_listings_and_ranges(url: str) -> None:
    """Listings name what can be read; ranges are those of the whole."""
    system = CkptFileSystem(url)
    folders = system.ls("", detail=False)
    assert "exp/gpt@good/one" in folders
    assert "exp/gpt@best:val_loss" in folders
    names = system.ls("exp/gpt@3", detail=False)
    assert "exp/gpt@3/config.json" in names
    assert system.isdir("exp/gpt@3")
    assert not system.exists("exp/gpt@3/absent")
    assert not system.exists("exp/gpt@99/config.json")
    for name in names:
        whole = system.cat_file(name)
        assert system.info(name)["size"] == len(whole)
        assert system.cat_file(name, 3, 11) == whole[3:11]
        assert system.cat_file(name, -5) == whole[-5:]
    with system.open(names[-1]) as file:
        file.seek(7)
        assert file.read(9) == system.cat_file(names[-1], 7, 16)


def test_an_open_file_stays_the_same_version(url: str) -> None:
    """A save and a collection do not change what an open file gives."""
    system = CkptFileSystem(url)
    path = "exp/gpt@latest/model.safetensors"
    before = system.cat_file(path)
    file = system.open(path, block_size=1000)
    first = file.read(500)
    with ckptstore.open(url) as store:
        save_llama(store, "exp/gpt", tiny_llama(seed=5), step=4)
        store.gc()
    assert first + file.read() == before


def test_nothing_can_be_written(url: str) -> None:
    """Every kind of writing is refused."""
    system = CkptFileSystem(url)
    with pytest.raises(OSError, match="cannot be written"):
        system.open("exp/gpt@3/x", "wb")
    with pytest.raises((OSError, NotImplementedError)):
        system.rm("exp/gpt@3/config.json")
