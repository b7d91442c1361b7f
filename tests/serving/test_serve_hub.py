"""Clients of the Hugging Face Hub, unmodified, read versions from ``ckptstore serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from servekit import Server, save_llama, settle, tiny_llama

import ckptstore
from ckptstore.integrations.pretrained import export_pretrained

_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
name, revision, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, revision=revision)
torch.save(model.state_dict(), out)
"""
_ADAPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from peft import PeftModel
from servekit import tiny_llama
model = PeftModel.from_pretrained(tiny_llama(), "store/lora")
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.fixture
def api(server: Server) -> HfApi:
    """Return the Hub's client."""
    return HfApi(endpoint=server.url, token=False)


@pytest.fixture
def hub(server: Server, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process that takes the server for the Hub."""
    return {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}


def _run(hub: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=hub, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.short(sample=1)
@pytest.mark.parametrize(
    ("name", "revision", "made"),
    [
        ("store/gpt", "best:val_loss", {}),
        ("store/gpt", "main", {"seed": 1}),
        ("store/tied", "main", {"tied": True}),
        ("store/bf16", "1", {"dtype": torch.bfloat16}),
        ("store/gpt", "good/one?dtype=bf16", {"dtype": torch.bfloat16}),
        ("store/any", "lr=1e-4/a@1", {"seed": 2}),
    ],
)
def test_transformers_loads_any_ref(
    hub: dict[str, str], tmp_path: Path, name: str, revision: str, made: dict[str, Any]
) -> None:
    """``from_pretrained`` gives the saved weights bit for bit: sharded, tied, cast."""
    _run(hub, sys.executable, "-c", _LOAD, name, revision, str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt")
    expected = tiny_llama(**made).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.slow
def test_peft_loads_an_adapter(hub: dict[str, str], tmp_path: Path, place: Path) -> None:
    """``PeftModel.from_pretrained`` gives the adapter that was saved."""
    kits = str(Path(__file__).parents[1] / "kits")
    _run(hub, sys.executable, "-c", _ADAPT, kits, str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt")
    with ckptstore.open(place) as store:
        expected = store.load("lora")["model"]
    adapted = {key for key in expected if "lora_" in key}
    assert adapted
    assert all(torch.equal(found[key], expected[key]) for key in adapted)


def test_the_command_line_downloads_what_export_writes(
    hub: dict[str, str], tmp_path: Path, place: Path
) -> None:
    """``hf download`` gives the files of ``export_pretrained``, and a model card."""
    folder = tmp_path / "got"
    command = str(Path(sys.executable).with_name("hf"))
    _run(hub, command, "download", "store/gpt", "--revision", "2", "--local-dir", str(folder))
    with ckptstore.open(place) as store:
        export_pretrained(store, "gpt@2", tmp_path / "out", max_shard_size=100_000)
    for path in (tmp_path / "out").glob("[!.]*"):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert "gpt@2" in (folder / "README.md").read_text()


def test_snapshots_and_listings_agree(server: Server, api: HfApi, tmp_path: Path) -> None:
    """The commit is the version, and tree, information and files name the same things."""
    folder = Path(snapshot_download("gpt", endpoint=server.url, cache_dir=tmp_path, token=False))
    info = api.model_info("gpt", files_metadata=True)
    assert folder.name == info.sha
    tree = {entry.path: entry for entry in api.list_repo_tree("gpt", recursive=True)}
    assert set(tree) == {path.name for path in folder.iterdir()} == set(api.list_repo_files("gpt"))
    for name, entry in tree.items():
        assert entry.size == (folder / name).stat().st_size  # type: ignore[union-attr]
        assert (folder / name).resolve().name == entry.blob_id  # type: ignore[union-attr]
    (one,) = api.get_paths_info("gpt", ["config.json", "absent"])
    assert one.path == "config.json"
    by_commit = hf_hub_download(
        "gpt", "config.json", revision=info.sha, endpoint=server.url, cache_dir=tmp_path
    )
    assert json.loads(Path(by_commit).read_text())["vocab_size"] == 256


def test_what_is_not_there_is_said_so(server: Server, api: HfApi, tmp_path: Path) -> None:
    """Clients raise their own errors for a missing repository, revision and file."""
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("absent")
    for revision in ("77", "best:nothing", "a" * 40, "1?dtype=int3", "~-1"):
        with pytest.raises(RevisionNotFoundError):
            api.model_info("gpt", revision=revision)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("gpt", "absent.bin", endpoint=server.url, cache_dir=tmp_path)


def test_a_tree_comes_in_pages(
    server: Server, api: HfApi, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of more than one page is complete; folders are listed where asked for."""
    files = {f"extra/{number:04}.txt": b"x" for number in range(1100)}
    state = {"model": {"w": torch.ones(3)}, "pretrained": {"processing": files}}
    with ckptstore.open(place) as store:
        store.run("many").save(state, step=1, roles={"pretrained": "weights"})
    settle()
    tree = [entry.path for entry in api.list_repo_tree("many", recursive=True)]
    assert tree == sorted([*files, "README.md", "model.safetensors"])
    top = [entry.path for entry in api.list_repo_tree("many")]
    assert top == ["README.md", "extra", "model.safetensors"]


def test_a_moving_ref_is_fixed_by_a_redirect(server: Server, place: Path) -> None:
    """A file of ``latest`` is that of one commit; after a save, of the next."""
    with ckptstore.open(place) as store:
        save_llama(store, "moving", tiny_llama(seed=4))
        settle()
        files = json.loads(server.get("/api/models/moving")[2])["siblings"]
        (name,) = (one["rfilename"] for one in files if "model-00001" in one["rfilename"])
        path = f"/moving/resolve/main/{name}"
        status, first, _ = server.get(path)
        assert status == 307
        _, _, body = server.get(first["location"])
        save_llama(store, "moving", tiny_llama(seed=5), step=2)
        settle()
        second = server.get(path)[1]
    assert second["x-repo-commit"] != first["x-repo-commit"]
    assert server.get(first["location"])[2] == body != server.get(second["location"])[2]


@pytest.fixture
def whole(server: Server) -> tuple[str, bytes]:
    """Return the path of a file at its commit, and its bytes."""
    place = server.get("/big/resolve/1/model.safetensors")[1]["location"]
    return place, server.get(place)[2]


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1), ("bytes=5-", 5, None), ("bytes=-7", -7, None),
        ("bytes=8388600-8388700", 8388600, 8388701), ("bytes=19999990-99999999999", 19999990, None),
    ],
)  # fmt: skip
def test_ranges(
    server: Server, whole: tuple[str, bytes], asked: str, start: int, stop: int | None
) -> None:
    """A range is that part of the whole; its headers say which."""
    place, data = whole
    status, headers, body = server.get(place, Range=asked)
    assert status == 206
    assert body == data[start:stop]
    first = start % len(data)
    assert headers["content-range"] == f"bytes {first}-{first + len(body) - 1}/{len(data)}"
    etag = headers["etag"]
    for names in (etag, f'"other", {etag}', "*"):
        assert server.get(place, If_None_Match=names)[0] == 304
        assert server.get(place, If_Match=names)[0] == 200
    assert server.get(place, Range=asked, If_Range='"other"')[0] == 200
    assert server.get(place, Range=f"bytes={len(data)}-")[0] == 416
    assert server.get(place, Range="bytes=5-2")[0] == 200
    assert server.get(place, If_Match='"other"')[0] == 412


def test_paths_cannot_leave_the_store(server: Server) -> None:
    """No path leads to a file that no version has."""
    for trick in (
        "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "a%00b", "../../../etc/passwd", "%ff%fe",
        "..%5c..%5cstore.json", quote("\u202e"), "store.json",
    ):  # fmt: skip
        status, headers, body = server.get(f"/gpt/resolve/main/{trick}")
        assert status == 404, trick
        assert headers["x-error-code"] == "EntryNotFound"
        assert b"root:" not in body
    assert server.get("/../../store.json")[0] == 404
    assert server.get("/gpt/resolve/..%2f..%2f/config.json")[0] == 404
    assert server.get("/api/models/..%2f/tree/main")[0] == 404
    assert server.get("/gpt/resolve/main/config.json", method="DELETE")[0] == 405
