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

from ckptstore.errors import ConflictError, InvalidInputError
from ckptstore.integrations.files import import_file
from ckptstore.integrations.pretrained import RECORD, describe_model, export_folder
from ckptstore.integrations.transformers import export_pretrained
from ckptstore.store import Store

SHARDS = {"one": "1GB", "few": "8KB", "many": "6KB"}
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
    _model(2, layers=2).save_pretrained(root / "deep")
    adapted = get_peft_model(_model(5), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(root / "adapter")
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


def _crashing(monkeypatch: pytest.MonkeyPatch, after: int, work: Callable[[], None]) -> bool:
    """Return whether some work ends before the process would, after a number of changed names."""
    calls = itertools.count()

    def call(*arguments: object, real: Callable[..., None], **options: object) -> None:
        if next(calls) >= after:
            raise Crash
        real(*arguments, **options)

    with monkeypatch.context() as patched:
        for name in LEAVES:
            real = getattr(os, name)
            patched.setattr(os, name, lambda *a, real=real, **k: call(*a, real=real, **k))
        try:
            work()
        except Crash:
            return False
    return True


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.short("one-few|few-few")
@pytest.mark.parametrize(
    ("first", "second"),
    [("one", "one"), ("one", "few"), ("few", "one"), ("few", "few"), ("few", "many")],
)
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
        done = _crashing(monkeypatch, crash, lambda: _put(saved / f"{second}1", folder))  # noqa: B023
        found = _weights(folder)
        assert any(_same(found, one) for one in wanted), f"after {crash} calls"
        seen.append(_same(found, wanted[1]))
        version = import_file(store, folder, run=f"r{crash}")
        read = store.load(f"#{version.id}")["model"]
        assert all(torch.equal(read[key], found[key]) for key in read)
        _put(saved / f"{second}1", folder)
        assert _names(folder) == _names(tmp_path / "new")
        if done:
            break
    assert _same(_weights(folder), wanted[1])
    assert seen == sorted(seen)
    assert not seen[0]
    assert seen[-1]


@pytest.mark.short(sample=2)
@pytest.mark.parametrize(
    ("first", "second"),
    [("adapter", "one1"), ("few1", "adapter"), ("one0", "deep"), ("deep", "few0")],
)
def test_a_folder_never_mixes_two_exports(
    store: Store, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    first: str, second: str,
) -> None:  # fmt: skip
    """Between an adapter and a whole model, and two configurations: one of them, or a refusal."""
    for crash in itertools.count():
        folder = tmp_path / f"crash{crash}"
        _put(saved / first, folder)
        done = _crashing(monkeypatch, crash, lambda: _put(saved / second, folder))  # noqa: B023
        if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
            found = store.load(f"#{import_file(store, folder, run=f'r{crash}').id}")
            deep = any(".h.1." in name for name in found["model"])
            lora = any("lora" in name for name in found["model"])
            assert lora == ("adapter_config" in found["pretrained"])
            assert lora or found["pretrained"]["config"]["n_layer"] == 1 + deep
        if done:
            break
    assert _names(folder) == sorted([RECORD, *_names(saved / second)])


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("model.safetensors", "few0", "readers would use it"),
        ("model.safetensors.index.json", "one0", "readers would use it"),
        ("model-00007-of-00009.safetensors", "one0", "readers would use it"),
        ("other.safetensors", "few0", "readers would use it"),
        ("adapter_config.json", "one0", "readers would use it"),
        (".metadata", "one0", "readers would use it"),
        ("config.json", "one0", "is a link"),
        ("model.safetensors", "one0", "is a link"),
    ],
)
def test_a_foreign_file_that_readers_would_use_is_refused(
    saved: Path, tmp_path: Path, name: str, kind: str, what: str
) -> None:
    """It is named, nothing of the folder changes, and the export comes after it is moved."""
    folder = tmp_path / "out"
    _put(saved / f"{kind[:-1]}1", folder)
    if what == "is a link":
        (folder / name).replace(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
    else:
        save_file({"x": torch.ones(1)}, folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidInputError, match=f"{folder / name} .*{what}"):
        _put(saved / kind, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / name).unlink()
    _put(saved / kind, folder)
    assert _same(_weights(folder), _weights(saved / kind))


def test_what_is_not_of_an_export_stays(saved: Path, tmp_path: Path) -> None:
    """Notes, other formats, subfolders, and a file of an export that was written over since."""
    folder = tmp_path / "out"
    folder.mkdir()
    others = {"pytorch_model.bin": b"old", "notes.md": b"mine", "runs/events": b"x"}
    for name, data in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    save_file({"x": torch.ones(1)}, folder / "model-00007-of-00009.safetensors")
    _put(saved / "few0", folder)  # no record: shards of other numbers are of an older export
    assert not (folder / "model-00007-of-00009.safetensors").exists()
    _put(saved / "one1", folder)
    GPT2LMHeadModel.from_pretrained(saved / "one0").save_pretrained(folder)
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is not of an export"):
        _put(saved / "few1", folder)
    assert _same(_weights(folder), _weights(saved / "one0"))
    assert {name: (folder / name).read_bytes() for name in others} == others


def test_a_hostile_record_removes_nothing_outside(saved: Path, tmp_path: Path) -> None:
    """Names that lead out, or through a link; a damaged record counts as none."""
    folder, secret = tmp_path / "out", tmp_path / "secret"
    secret.write_bytes(b"")
    _put(saved / "one0", folder)
    (folder / "way").symlink_to(tmp_path)
    digest = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # of no byte
    names = ["../secret", str(secret), "way/secret", "a\0b", "", "."]
    for text in (json.dumps({"files": [[name, digest] for name in names]}), "{", "[]", ""):
        (folder / RECORD).write_text(text)
        _put(saved / "one1", folder)
        assert secret.exists()
        assert _same(_weights(folder), _weights(saved / "one1"))


def test_two_exports_at_once_are_told(saved: Path, tmp_path: Path) -> None:
    """The second one is refused; what a killed one left is removed, and an error leaves nothing."""
    folder = tmp_path / "out"
    _put(saved / "one0", folder)
    left = folder / ".ckptstore-export-left"
    (left / "deep").mkdir(parents=True)
    with export_folder(folder) as made:
        shutil.copytree(saved / "one1", made, dirs_exist_ok=True)
        with pytest.raises(ConflictError, match="another export"):
            _put(saved / "few0", folder)
    assert not left.exists()
    for place in (folder, tmp_path / "none"):
        with pytest.raises(ConflictError, match="stop"), export_folder(place):
            raise ConflictError("stop")
    assert not (tmp_path / "none").exists()
    assert _names(folder) == sorted([RECORD, *_names(saved / "one1")])


def test_files_of_an_export_keep_the_access_of_those_before(store: Store, tmp_path: Path) -> None:
    """New ones follow the umask; through a link to the folder, and without hard links, too."""
    model = _model(3)
    state = {"model": model.state_dict(), "pretrained": describe_model(model)}
    store.run("r").save(state, step=1, roles={"pretrained": "weights"})
    (tmp_path / "real").mkdir()
    folder = tmp_path / "link"
    folder.symlink_to("real")
    before = os.umask(0o027)
    try:
        export_pretrained(store, "r", folder, max_shard_size="8KB")
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}
        for path in folder.iterdir():
            path.chmod(0o600)
        (folder / "config.json").chmod(0o664)
        assert export_pretrained(store, "r", folder) == folder
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes.pop("config.json") == 0o664
    assert modes.pop("model.safetensors") == 0o640
    assert set(modes.values()) == {0o600}
    assert folder.is_symlink()


def test_without_hard_links_shards_keep_other_names(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index names them, and the next export removes them."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links")

    monkeypatch.setattr(os, "link", refuse)
    folder = tmp_path / "out"
    for seed in (0, 1, 0):
        _put(saved / f"few{seed}", folder)
        assert _same(_weights(folder), _weights(saved / f"few{seed}"))
    _put(saved / "one1", folder)
    assert _names(folder) == sorted([RECORD, *_names(saved / "one1")])
