"""A version as a folder of files: the bytes of ``save_pretrained``, in any range, each checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from servekit import read_whole, save_llama, tiny_llama
from shortening import examples

import ckptstore
from ckptstore.errors import CorruptTensorError, InvalidInputError, StateError
from ckptstore.integrations.files import import_file
from ckptstore.integrations.pretrained import describe_model, export_pretrained
from ckptstore.model import Version
from ckptstore.serving.model_folder import ModelFolder, open_folder, split_commit
from ckptstore.serving.serving_limits import WINDOW_BYTES
from ckptstore.serving.versions import ServedVersions
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a new store."""
    return ckptstore.open(tmp_path / "store", create=True)


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _served(folder: ModelFolder) -> dict[str, bytes]:
    """Return all files; each has the size that was said."""
    found = {name: read_whole(folder.read(name)) for name in folder.files}
    assert {name: len(data) for name, data in found.items()} == {
        name: file.nbytes for name, file in folder.files.items()
    }
    return found


@pytest.mark.parametrize("shard_bytes", [None, 100_000], ids=["one", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.short(sample=4)
def test_its_bytes_are_those_of_save_pretrained(
    store: Store, tmp_path: Path, dtype: torch.dtype, tied: bool, shard_bytes: int | None
) -> None:
    """All files but the model card equal those that the model itself writes."""
    model = tiny_llama(dtype=dtype, tied=tied)
    version = save_llama(store, "gpt", model)
    limit: dict[str, Any] = {"max_shard_size": shard_bytes} if shard_bytes else {}
    model.save_pretrained(tmp_path / "own", **limit)
    export_pretrained(store, "gpt", tmp_path / "exported", **limit)

    made = _served(open_folder(store, version, shard_bytes=shard_bytes))
    card = made.pop("README.md").decode()

    assert made == _files(tmp_path / "own")
    exported = _files(tmp_path / "exported")
    assert {name: data for name, data in made.items() if name in exported} == exported
    assert version.id in card
    assert version.content in card


def test_an_imported_folder_is_served_as_it_is_exported(store: Store, tmp_path: Path) -> None:
    """Names, index and files of an import are kept; small files come from where a run began."""
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("a card")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    import_file(store, tmp_path / "base", run="base")
    export_pretrained(store, "base", tmp_path / "out", max_shard_size=50_000)
    folder = open_folder(store, store.resolve("base"), shard_bytes=50_000)
    assert _served(folder) == _files(tmp_path / "out")

    weights = store.load("base")["model"]
    store.fork("base", "tuned")
    tuned = store.run("tuned").save({"model": weights}, step=7)
    export_pretrained(store, "tuned", tmp_path / "tuned")
    assert _served(open_folder(store, tuned)) == _files(tmp_path / "tuned")


@pytest.mark.parametrize("only", [False, True], ids=["whole", "adapter-only"])
def test_an_adapter_is_a_folder_of_peft(store: Store, tmp_path: Path, only: bool) -> None:
    """Weights of an adapter have the names and the bytes that PEFT writes, and load."""
    base = tiny_llama()
    lora = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False, use_dora=True
    )
    model = get_peft_model(tiny_llama(), lora)
    model.save_pretrained(str(tmp_path / "own"))
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model) if only else model.state_dict()
    state = {"model": weights, "pretrained": describe_model(model)}
    version = store.run("lora").save(state, step=1, roles={"pretrained": "weights"})
    made = _served(open_folder(store, version))

    own = _files(tmp_path / "own")
    assert made["adapter_model.safetensors"] == own["adapter_model.safetensors"]
    assert set(made) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    for name, data in made.items():
        (tmp_path / "made").mkdir(exist_ok=True)
        (tmp_path / "made" / name).write_bytes(data)
    again = PeftModel.from_pretrained(base, str(tmp_path / "made"))
    words = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(words).logits, model.eval()(words).logits)


def test_an_adapter_that_only_peft_can_name_is_refused(store: Store) -> None:
    """Prompt tuning in a whole state is an error, not a folder with other weights."""
    about = {"adapter_config": {"default": {"peft_type": "PROMPT_TUNING"}}}
    weights = {
        "prompt_encoder.default.embedding.weight": torch.ones(3),
        "base_layer.w": torch.ones(3),
    }
    state = {"model": {**weights, "x.base_layer.w": torch.ones(2)}, "pretrained": about}
    version = store.run("a").save(state, step=1, roles={"pretrained": "weights"})
    with pytest.raises(StateError, match="only PEFT"):
        open_folder(store, version)


def _odd_state() -> dict[str, Any]:
    torch.manual_seed(1)
    base = torch.randn(20, 10)
    return {
        "wide": torch.randn(3_000, 1_001), "half": torch.randn(7, 5).to(torch.bfloat16),
        "turned": torch.randn(64, 32).t(),
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "rows": base[2:5], "columns": base[:, 1:3],
        "bytes": base.flatten()[4:9].view(torch.uint8)[1:7], "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 4), "whole": torch.arange(9), "flags": torch.tensor([True, False]),
        "wide8": torch.randn(33).to(torch.float8_e4m3fn), "f64": torch.randn(5).double(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, bytes]:
    """Return a version of tensors of all kinds, and the file that safetensors makes of them."""
    store = ckptstore.open(tmp_path_factory.mktemp("odd") / "store", create=True)
    state = _odd_state()
    version = store.run("odd").save(state, step=1, roles={"**": "weights", "*": "weights"})
    dense = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }
    return open_folder(store, version), save(dense, metadata={"format": "pt"})


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_range_is_that_of_the_file(odd: tuple[ModelFolder, bytes], data: st.DataObject) -> None:
    """Ranges of weights at the root, of any layout, equal those of the file of safetensors."""
    folder, whole = odd
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(0, len(whole)) | st.integers(start, min(start + 99, len(whole))))
    parts = list(folder.read("model.safetensors", start, stop))
    assert b"".join(parts) == whole[start:stop]
    assert max(map(len, parts), default=0) <= 2 * WINDOW_BYTES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_are_cast_on_request(store: Store, dtype: str) -> None:
    """A cast gives the bits that torch gives, other dtypes stay, and the ETag differs."""
    state = _odd_state()
    version = store.run("odd").save({"model": state}, step=1)
    plain = open_folder(store, version)
    cast = open_folder(store, version, dtype=dtype)
    whole = read_whole(cast.read("model.safetensors"))
    target = getattr(torch, dtype)
    named = {"float64", "float32", "float16", "bfloat16"}
    for name, tensor in load(whole).items():
        float_like = str(state[name].dtype)[6:] in named
        assert torch.equal(tensor, state[name].to(target) if float_like else state[name]), name
    start = len(whole) // 3
    assert read_whole(cast.read("model.safetensors", start, start + 777)) == whole[start:][:777]
    assert cast.files["model.safetensors"].etag != plain.files["model.safetensors"].etag
    assert split_commit(cast.commit) == (version.id, dtype)


def test_an_etag_follows_from_the_content(store: Store) -> None:
    """Equal weights have equal ETags in any version, and one changed bit makes another."""
    model = tiny_llama()
    first = open_folder(store, save_llama(store, "a", model)).files
    second = open_folder(store, save_llama(store, "b", model, step=9)).files
    model.lm_head.weight.data[0, 0] += 1
    third = open_folder(store, save_llama(store, "a", model, step=2)).files
    name = "model.safetensors"
    assert first[name].etag == second[name].etag != third[name].etag
    assert first["config.json"].etag == third["config.json"].etag
    assert all(len(file.etag) == 40 for file in first.values())


def test_a_flipped_bit_stops_the_stream(store: Store, tmp_path: Path) -> None:
    """Every byte that arrives before the error is right; the error names the tensor."""
    version = store.run("big").save({"model": {"w": torch.randn(4_000_000)}}, step=1)
    folder = open_folder(store, version)
    good = read_whole(folder.read("model.safetensors"))
    (pack,) = (tmp_path / "store" / "packs").rglob("*.pack")
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size * 2 // 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    arrived: list[memoryview] = []
    with pytest.raises(CorruptTensorError, match=r"model\.w"):
        arrived.extend(folder.read("model.safetensors"))
    assert 0 < sum(map(len, arrived)) < len(good)
    assert good.startswith(b"".join(arrived))


def test_the_newest_valid_version_is_looked_for_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a read of every byte: once for each state of the log, not for each request."""
    store.run("r").save({"w": torch.ones(3)}, step=1)
    asked: list[str] = []
    resolve = store.resolve

    def counted(ref: str) -> Version:
        asked.append(ref)
        return resolve(ref)

    monkeypatch.setattr(store, "resolve", counted)
    monkeypatch.setattr("ckptstore.serving.versions.REFRESH_S", -1.0)
    versions = ServedVersions(store)
    assert [versions.find("r@latest-valid")[0].step for _ in range(3)] == [1, 1, 1]
    assert len(asked) == 1
    store.run("r").save({"w": torch.ones(3)}, step=2)
    assert versions.find("r@latest-valid")[0].step == 2


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", "a\0b", "a//b", "..", "a\\b", ""])
def test_a_file_outside_of_the_folder_is_refused(store: Store, name: str) -> None:
    """A version whose small files have hostile names is an error."""
    about = {"config": {}, "processing": {name: b"x"}}
    state = {"model": {"w": torch.ones(3)}, "pretrained": about}
    version = store.run("a").save(state, step=1, roles={"pretrained": "weights"})
    with pytest.raises(InvalidInputError, match="outside"):
        open_folder(store, version)


def test_a_card_shows_what_the_catalog_says(store: Store) -> None:
    """The card names metrics and lineage, and no name breaks its table."""
    save_llama(store, "gpt", tiny_llama(), metrics={"val_loss": 0.5})
    version = save_llama(store, "gpt", tiny_llama(), step=2, metadata={"note": "|<b>|"})
    card = read_whole(open_folder(store, version).read("README.md")).decode()
    assert "gpt@1" in card
    assert "&#124;&lt;b&gt;&#124;" in card
    assert "| step | 2 |" in card
