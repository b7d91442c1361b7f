"""Files of other programs: what is exported is what the safetensors library reads, and back."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from damaging import flip_pack
from peaks import memory_below

import ckptstore
from ckptstore import errors, limits
from ckptstore.events import Progress
from ckptstore.format.dtypes import ITEM_BYTES
from ckptstore.integrations.files import export_safetensors, import_file
from ckptstore.integrations.safetensors_plan import SAFETENSORS_DTYPES
from ckptstore.jobs.job_outputs import replace_file
from ckptstore.pages.report_file import write_report
from ckptstore.store import Store, resume_check


@pytest.fixture
def damage() -> Callable[[Path], None]:
    """Return what flips a bit in the middle of every pack of a store."""

    def flip(root: Path) -> None:
        for pack in root.glob("packs/*/*.pack"):
            flip_pack(pack)

    return flip


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _of_dtype(name: str) -> torch.Tensor:
    """Return 6 elements of a dtype whose bytes are all different."""
    raw = torch.arange(6 * ITEM_BYTES[name], dtype=torch.uint8)
    if name == "bool":
        return torch.tensor([True, False, True, True, False, True]).reshape(2, 3)
    return raw.view(getattr(torch, name)).reshape(2, 3)


# --- export -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_DTYPES))
def test_each_dtype_comes_back_through_the_library(
    store: Store, tmp_path: Path, dtype: str
) -> None:
    """Every dtype that the table claims is read by safetensors with its shape and its bits."""
    tensor = _of_dtype(dtype)
    store.run("r").save({"w": tensor}, step=1)
    export_safetensors(store, "r", tmp_path / "a.safetensors")
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")["w"]
    assert (found.dtype, found.shape, _bits(found)) == (tensor.dtype, tensor.shape, _bits(tensor))


def test_table_of_dtypes_is_the_librarys(tmp_path: Path) -> None:
    """A dtype is in the table exactly if the installed library writes it, under the same name."""
    path = tmp_path / "a.safetensors"
    written = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name, None)
        if dtype is None or name == "complex32":  # torch warns; the library refuses it like bits8
            continue
        try:
            safetensors.torch.save_file({"w": _of_dtype(name)}, path)
        except (KeyError, ValueError, RuntimeError):
            continue
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        written[name] = header["w"]["dtype"]
    assert written == dict(SAFETENSORS_DTYPES)


def test_tied_views_orders_and_arrays_are_written_by_value(store: Store, tmp_path: Path) -> None:
    """Each path of a tied tensor, views, channels-last, 0-d, empty tensors and arrays are there."""
    base = torch.arange(48.0).reshape(6, 8)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state: dict[str, Any] = {
        "a": base, "tied": base, "view": base[1:3, ::2], "turned": base.t(),
        "halves": base.view(torch.int32)[0], "image": image, "swapped": torch.randn(4, 6).t(),
        "zero": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4, dtype=torch.int8), "array": np.arange(5, dtype=np.int16),
    }  # fmt: skip
    store.run("r").save(state, step=1)
    done = export_safetensors(store, "r", tmp_path / "a.safetensors")
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    expected = {name: torch.as_tensor(value) for name, value in state.items()}
    assert done.tensors_count == len(expected) == len(found)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bits(found[name]) == _bits(tensor), name


def test_values_that_are_no_tensors_are_reported(store: Store, tmp_path: Path) -> None:
    """Numbers, texts, bytes and generators are left out by name; what is not asked for is not."""
    state = {
        "model": {"w": torch.ones(2)}, "epoch": 3, "names": ["a", "b"], "blob": b"x" * 10_000,
        "generator": torch.Generator(), "other": {"lr": 0.1},
    }  # fmt: skip
    store.run("r").save(state, step=1)
    done = export_safetensors(store, "r", tmp_path / "a.safetensors", exclude=["other"])
    assert sorted(done.left_out) == ["blob", "epoch", "generator", "names.0", "names.1"]
    assert set(safetensors.torch.load_file(tmp_path / "a.safetensors")) == {"model.w"}


def test_part_of_a_state_under_the_names_a_module_wants(store: Store, tmp_path: Path) -> None:
    """include, exclude and strip_prefix give a file that load_state_dict takes as it is."""
    model = torch.nn.Linear(4, 3)
    state = {"model": model.state_dict(), "optimizer": {"m": torch.zeros(3)}}
    version = store.run("r").save(state, step=7)
    path = tmp_path / "a.safetensors"
    export_safetensors(store, "r@7", path, include=["model"], strip_prefix="model.")
    torch.nn.Linear(4, 3).load_state_dict(safetensors.torch.load_file(path), strict=True)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata == {
        "format": "pt",
        "ckptstore.run": "r",
        "ckptstore.step": "7",
        "ckptstore.version": version.id,
    }


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (_of_dtype("uint4"), "uint4"),
        (np.zeros(2, dtype="M8[s]"), "NumPy array"),
    ],
    ids=["complex128", "uint4", "datetime64"],
)
def test_dtype_that_the_format_lacks_is_an_error_with_its_path(
    store: Store, tmp_path: Path, leaf: object, named: str
) -> None:
    """The tensor is named, the hint leaves it out, and no file appears."""
    store.run("r").save({"good": torch.ones(1), "bad": leaf}, step=1)
    path = tmp_path / "a.safetensors"
    with pytest.raises(errors.StateError, match=f"'bad'.*{named}"):
        export_safetensors(store, "r", path)
    assert not path.exists()
    assert export_safetensors(store, "r", path, exclude=["bad"]).tensors_count == 1


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("model.pt", "model.safetensors"), ("pytorch_model.bin", "pytorch_model.safetensors"),
        ("-", "NAME.safetensors"), ("exp3", "exp3.safetensors"), ("", "model.safetensors"),
    ],
)  # fmt: skip
def test_a_file_is_named_as_what_it_is(
    store: Store, tmp_path: Path, name: str, better: str
) -> None:
    """No other ending, none, and no folder: neither torch.load nor import could read it by name."""
    store.run("r").save({"x": torch.ones(1)}, step=1)
    with pytest.raises(errors.InvalidInputError) as caught:
        export_safetensors(store, "r", tmp_path / name)
    assert str(tmp_path / better) in caught.value.hint
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    export_safetensors(store, "r", tmp_path / better)  # the hint can be followed


def test_names_must_differ_and_patterns_must_match(store: Store, tmp_path: Path) -> None:
    """Two tensors of one name, a pattern without a match and a state without tensors are errors."""
    one = torch.ones(1)
    store.run("r").save({"a.b": one, "a": {"b": one * 2}, "c": one, "x.c": one}, step=1)
    path = tmp_path / "a.safetensors"
    with pytest.raises(errors.InvalidInputError, match="second tensor"):
        export_safetensors(store, "r", path)
    with pytest.raises(errors.InvalidInputError, match="second tensor 'c'"):
        export_safetensors(store, "r", path, include=["c", "x.c"], strip_prefix="x.")
    with pytest.raises(errors.TensorNotFoundError, match="nothing in the state"):
        export_safetensors(store, "r", path, include=["nope"])
    store.run("numbers").save({"lr": 0.1}, step=1)
    with pytest.raises(errors.TensorNotFoundError, match="no tensor"):
        export_safetensors(store, "numbers", path)
    assert not path.exists()


def test_file_appears_whole_or_not_at_all(
    store: Store, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Damage met on the way leaves neither the file nor a temporary; an old file stands."""
    store.run("r").save({"w": torch.randn(300, 300)}, step=1)
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "a.safetensors"
    export_safetensors(store, "r", path)
    before = path.read_bytes()
    with pytest.raises(errors.ConflictError, match="there already"):
        export_safetensors(store, "r", path)
    damage(tmp_path / "store")
    with pytest.raises(errors.CorruptTensorError, match="tensor w"):
        export_safetensors(store, "r", path, overwrite=True)
    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == ["a.safetensors"]


def test_an_export_is_on_disk_before_it_has_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are synced under the temporary name, and the folder after the rename."""
    store.run("r").save({"w": torch.ones(5)}, step=1)
    path = tmp_path / "out" / "a.safetensors"
    path.parent.mkdir()
    synced: list[tuple[int, int, bool]] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        """Note the file, its length, and whether the export has its name."""
        found = os.fstat(file)
        synced.append((found.st_ino, found.st_size, path.exists()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    export_safetensors(store, "r", path)

    data, folder = synced
    assert data == (path.stat().st_ino, path.stat().st_size, False)
    assert folder[0] == path.parent.stat().st_ino
    assert folder[2]


def test_a_file_that_appears_during_an_export_is_not_replaced(store: Store, tmp_path: Path) -> None:
    """Another program makes it meanwhile: its bytes stand, and no temporary file is left."""
    store.run("r").save({"w": torch.randn(300, 300)}, step=1)
    path = tmp_path / "out" / "a.safetensors"
    path.parent.mkdir()

    def appear(_: Progress) -> None:
        """Make the file, as another program would."""
        path.write_bytes(b"other")

    with pytest.raises(errors.ConflictError, match="there already"):
        export_safetensors(store, "r", path, progress=appear)

    assert [(entry, entry.read_bytes()) for entry in path.parent.iterdir()] == [(path, b"other")]
    export_safetensors(store, "r", path, overwrite=True, progress=appear)
    assert safetensors.torch.load_file(path).keys() == {"w"}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_access_to_a_written_file_is_that_of_the_one_before(
    store: Store, tmp_path: Path, umask: int
) -> None:
    """A new file follows the umask; a private one stays so; a link leads to the new content."""
    store.run("r").save({"w": torch.ones(5)}, step=1)
    writers: dict[str, Callable[[Path], object]] = {
        "a.safetensors": lambda path: export_safetensors(store, "r", path, overwrite=True),
        "a.html": lambda path: write_report(store, path),
        "a.json": lambda path: replace_file(path, bytes(50)),
    }
    before = os.umask(umask)
    try:
        for name, write in writers.items():
            path, link = tmp_path / name, tmp_path / f"link-{name}"
            write(path)
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
            for mode in (0o600, 0o640, 0o664, 0o444):
                path.write_bytes(b"old") if mode == 0o600 else None
                path.chmod(mode)
                write(path)
                assert path.stat().st_mode & 0o777 == mode, name
            link.symlink_to(path.name)
            size = path.stat().st_size
            path.chmod(0o600)
            path.write_bytes(b"old")
            write(link)
            assert link.is_symlink()
            assert path.stat().st_size > size - 9  # a report says when it was made
            assert path.stat().st_mode & 0o777 == 0o600
            path.unlink()
            write(link)  # a link to nothing makes its target
            assert path.stat().st_size > size - 9  # a report says when it was made
    finally:
        os.umask(before)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(errors.StorageError, match="no regular file"):
        export_safetensors(store, "r", tmp_path / "pipe.safetensors", overwrite=True)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(errors.StorageError, match=r"loop\.safetensors"):
        export_safetensors(store, "r", tmp_path / "loop.safetensors", overwrite=True)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_local_disk_errors_are_of_the_tree(store: Store, tmp_path: Path) -> None:
    """A folder that is not there is a StorageError that names the file."""
    store.run("r").save({"w": torch.ones(2)}, step=1)
    with pytest.raises(errors.StorageError, match=r"missing.*a\.safetensors"):
        export_safetensors(store, "r", tmp_path / "missing" / "a.safetensors")


@pytest.mark.slow
def test_memory_of_an_export_is_bounded(store: Store, tmp_path: Path) -> None:
    """A tensor of several windows goes through little more than one."""
    size = 3 * limits.EXPORT_WINDOW_BYTES
    state = {"w": torch.arange(size // 8, dtype=torch.int64), "small": torch.ones(3)}
    store.run("r").save(state, step=1)
    path = tmp_path / "a.safetensors"
    seen: list[int] = []
    with memory_below(2.5 * limits.EXPORT_WINDOW_BYTES):
        export_safetensors(store, "r", path, progress=lambda step: seen.append(step.done))
    assert seen == sorted(seen)
    assert seen[-1] == size + 12
    with safetensors.safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), state["w"])


# --- import -------------------------------------------------------------------------------------
def _saved(folder: Path, name: str, state: object, **options: bool) -> Path:
    path = folder / name
    torch.save(state, path, **options)
    return path


def test_safetensors_file_round_trip(store: Store, tmp_path: Path) -> None:
    """All of a file is imported as weights, with where it came from, and exports to equal bits."""
    state = {name.replace("_", "."): _of_dtype(name) for name in sorted(SAFETENSORS_DTYPES)}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path, metadata={"format": "pt", "by": "a script"})
    version = import_file(
        store, path, run="r", step=5, metrics={"acc": 0.5}, directions={"acc": "max"}, tags=["hf"]
    )
    assert (version.step, version.tags, dict(version.metrics)) == (5, ("hf",), {"acc": 0.5})
    assert set(version.roles) == {"weights"}
    assert version.metadata["import"] == {
        "format": "safetensors",
        "files": ["model.safetensors"],
        "metadata": {"format": "pt", "by": "a script"},
    }
    loaded = store.load("r@best:acc")
    assert {name: _bits(x) for name, x in loaded.items()} == {n: _bits(x) for n, x in state.items()}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_file_round_trip(store: Store, tmp_path: Path, *, zipped: bool) -> None:
    """A whole training state of torch.save is imported: containers, numbers, tied tensors."""
    shared = torch.randn(50, 4)
    state = {"model": {"a": shared, "b": shared}, "epoch": 3, "betas": (0.9, 0.99)}
    path = _saved(tmp_path, "c.pt", state, _use_new_zipfile_serialization=zipped)
    import_file(store, path, run="r", step=1, under="nested")
    loaded = store.load("r")["nested"]
    assert (loaded["epoch"], loaded["betas"]) == (3, (0.9, 0.99))
    assert torch.equal(loaded["model"]["a"], shared)
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["b"].data_ptr()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_one_version(store: Store, tmp_path: Path, suffix: str) -> None:
    """A folder of shards, named by its index, is imported whole; by the index's path too."""
    parts = {f"model-0000{i}.{suffix}": {f"layer.{i}": torch.randn(3, i)} for i in (1, 2, 3)}
    for name, part in parts.items():
        if suffix == "bin":
            torch.save(part, tmp_path / name)
        else:
            safetensors.torch.save_file(part, tmp_path / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    index = tmp_path / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 72}, "weight_map": weight_map}))
    first = import_file(store, tmp_path, run="r", step=1)
    second = import_file(store, index, run="r", step=2)
    assert first.content == second.content
    expected = {key: tensor for part in parts.values() for key, tensor in part.items()}
    loaded = store.load("r")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_an_import_is_no_training_that_was_not_resumed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older steps are imported after newer ones without the warning that is for trainings."""
    with ckptstore.open(tmp_path / "new", create=True) as store:
        import_file(store, folder, run="r", step=5)
    resume_check._chosen.clear()  # another process
    with ckptstore.open(tmp_path / "new") as store:
        import_file(store, folder, run="r", step=3)
        assert [version.step for version in store.run("r").versions()] == [5, 3]
    assert caplog.messages == []


# --- folders of Transformers and PEFT -----------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with weights, a configuration and a tokenizer."""
    made = tmp_path / "hub" / "base"
    made.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.ones(5)}, made / "model.safetensors")
    (made / "config.json").write_text('{"model_type": "gpt2", "layers": [1, 2.5, null]}')
    (made / "tokenizer.json").write_bytes(b'{"words": ["\xc3\xa9"]}')
    return made


def test_a_folder_with_a_configuration_keeps_its_files(store: Store, folder: Path) -> None:
    """Weights lie below `model` at step 0; what is no description of them stays outside."""
    kept = {"LICENSE": b"free", "modeling.py": b"raise SystemExit", "vocab.txt": b"a\nb"}
    left_out = (".gitattributes", "training_args.bin", "model.h5", "picture.png", ".token.json")
    for name, data in {**kept, **dict.fromkeys(left_out, b"x")}.items():
        (folder / name).write_bytes(data)
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_bytes(b"{{ tools }}")
    os.mkfifo(folder / "pipe.json")

    version = import_file(store, folder, run="r")

    state = store.load("r")
    about = state["pretrained"]
    assert version.step == 0
    assert state["model"]["w"].tolist() == [1.0] * 5
    assert about["config"] == {"model_type": "gpt2", "layers": [1, 2.5, None]}
    assert about["processing"] == {
        **kept,
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
    }
    assert set(version.roles) == {"weights"}


def test_other_files_need_a_step_and_are_as_they_were(store: Store, folder: Path) -> None:
    """A file by its name is its content alone, whatever lies beside it."""
    path = folder / "model.safetensors"
    with pytest.raises(errors.InvalidInputError, match="does not say its step"):
        import_file(store, path, run="r")
    import_file(store, path, run="r", step=3)
    assert set(store.load("r@3")) == {"w"}
    import_file(store, folder, run="r", step=4, under="")
    assert set(store.load("r@4")) == {"w", "pretrained"}
    with pytest.raises(errors.InvalidInputError, match="leave no place for 'pretrained'"):
        import_file(store, folder, run="r", step=5, under="pretrained")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_link_out_of_a_folder_is_refused(store: Store, folder: Path, name: str) -> None:
    """What lies elsewhere on the machine is not what was to be imported."""
    (folder / name).rename(folder.parent / "secret")
    (folder / name).symlink_to("../secret")
    with pytest.raises(errors.InvalidInputError, match=f"{name} leads out of its folder") as told:
        import_file(store, folder, run="r")
    assert "import the folder that it leads to" in told.value.hint
    assert store.versions() == []


def test_the_cache_of_the_hub_is_read_through_its_links(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    """Its files are links to blobs beside the snapshots; links that lead further are refused."""
    model = tmp_path / "models--x"
    snapshot = model / "snapshots" / "abc"
    (model / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(model / "blobs" / path.stem)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.stem}")
    import_file(store, snapshot, run="r")
    assert "tokenizer.json" in store.load("r")["pretrained"]["processing"]
    (model / "secret").write_text("x")
    (snapshot / "vocab.txt").symlink_to("../../blobs/../secret")
    with pytest.raises(errors.InvalidInputError, match="leads out of its folder"):
        import_file(store, snapshot, run="r", step=1)


def test_files_beside_the_weights_are_bounded(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together, and read no further than the bound."""
    sizes = sum((folder / name).stat().st_size for name in ("config.json", "tokenizer.json"))
    monkeypatch.setattr("ckptstore.limits.PRETRAINED_BYTES_MAX", sizes)
    import_file(store, folder, run="r")
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        errors.LimitError, match=r"vocab\.txt takes the files beside the weights over"
    ):
        import_file(store, folder, run="r", step=1)


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickle_that_wants_more_is_refused_and_not_run(
    store: Store, tmp_path: Path, *, zipped: bool
) -> None:
    """Nothing of a hostile pickle is executed, and the error says what would be needed."""
    trace = tmp_path / "executed"
    state = {"w": torch.ones(2), "x": _Bomb(trace)}
    path = _saved(tmp_path, "evil.pt", state, _use_new_zipfile_serialization=zipped)
    with pytest.raises(errors.PolicyError, match=r"weights_only=True allows: .*getattr") as told:
        import_file(store, path, run="r", step=1)
    assert "weights_only=False" not in str(told.value)
    assert not trace.exists()
    assert store.versions() == []
    raw = tmp_path / "raw.pth"
    raw.write_bytes(pickle.dumps(_Bomb(trace)))
    with pytest.raises(errors.FormatError, match=r"torch\.save did not write"):
        import_file(store, raw, run="r", step=1)
    assert not trace.exists()


def _header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


_HOSTILE = {
    "nothing": b"",
    "short": b"\x01\x02",
    "length beyond the file": _header({}, length=1 << 40),
    "length of 2^64-1": _header({}, length=(1 << 64) - 1),
    "not JSON": _header(b"{" * 100),
    "deep JSON": _header(b'{"a":' * 50_000),
    "offsets beyond the data": _header(
        {"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}, b"1234"
    ),
    "shape against offsets": _header(
        {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"1234"
    ),
    "shape that overflows": _header(
        {"w": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 4]}}, b"1234"
    ),
    "overlap": _header(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        },
        b"123456",
    ),
    "hole": _header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, b"1234"),
    "unknown dtype": _header({"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "negative": _header({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}, b"1234"),
    "dtype torch lacks": _header(
        {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123"
    ),
}


def test_damaged_files_raise_errors_of_the_tree(store: Store, tmp_path: Path) -> None:
    """Cut, flipped or mistaken files of either kind never raise a foreign exception."""
    rng = np.random.default_rng(5)
    whole = {
        "a.pt": _saved(tmp_path, "a.pt", {"w": torch.randn(20), "n": 3}).read_bytes(),
        "b.safetensors": safetensors.torch.save({"w": torch.randn(20)}),
    }
    refused = 0
    for name, data in whole.items():
        path = tmp_path / f"bad-{name}"
        for _ in range(60):
            body = bytearray(data)
            if rng.random() < 0.3:
                del body[int(rng.integers(len(body))) :]
            else:
                body[int(rng.integers(len(body)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(body)
            try:
                import_file(store, path, run="r", step=1)
            except errors.CkptStoreError:
                refused += 1
    assert refused > 20  # flips in the numbers themselves are not noticed: the formats have no sums


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:01\nsize 4000000000\n"


def _zip(compression: int = zipfile.ZIP_STORED, /, **members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


_WEIGHTS = safetensors.torch.save({"w": torch.ones(1)})
_INDICES = {
    "above": ('{"weight_map": {"w": "../secret.safetensors"}}', "not beside it"),
    "absolute": ('{"weight_map": {"w": "/etc/passwd"}}', "not beside it"),
    "dots": ('{"weight_map": {"w": ".."}}', "not beside it"),
    "empty": ('{"weight_map": {}}', "names no tensor"),
    "type": ('{"weight_map": {"w": 3}}', "not an index"),
    "deep": ("[" * 100_000, "not an index"),
    "wrong": ('{"weight_map": {"x": "a.safetensors"}}', "'x' is in a.safetensors; it is not"),
}
_CONFIGURATIONS = {
    "cut": (b"{", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "bytes": (b"\x80", "not JSON"),
    "number": (b"3", "no JSON object"),
}
_REFUSED: dict[str, tuple[dict[str, bytes], type[errors.CkptStoreError], str, str]] = {
    **{
        f"header: {name}": ({"evil.safetensors": data}, errors.FormatError, r"evil\.safetens", "")
        for name, data in _HOSTILE.items()
    },
    **{
        f"index: {name}": (
            {"in/m.safetensors.index.json": text.encode(), "in/a.safetensors": _WEIGHTS},
            errors.FormatError, problem, "",
        )
        for name, (text, problem) in _INDICES.items()
    },
    **{
        f"configuration: {name}": (
            {"in/config.json": data, "in/a.safetensors": _WEIGHTS},
            errors.FormatError, problem, "name their file",
        )
        for name, (data, problem) in _CONFIGURATIONS.items()
    },
    "missing shard": (
        {"in/m.safetensors.index.json": b'{"weight_map": {"w": "one.safetensors"}}'},
        errors.ObjectNotFoundError, r"there is no file .*/one\.safetensors", "",
    ),
    "missing file": ({"nope.pt": b""}, errors.ObjectNotFoundError, r"nope\.pt", ""),
    "no kind": ({"a.dat": b"\xfe\xdc\xba"}, errors.InvalidInputError, "no kind", ".safetensors"),
    "no checkpoint": ({"in/config.json": b"{}"}, errors.InvalidInputError, "there is none", ""),
    "two checkpoints": (
        {"in/a.safetensors": _WEIGHTS, "in/b.safetensors": _WEIGHTS},
        errors.InvalidInputError, r"a\.safetensors, b\.safetensors", "",
    ),
    "store": (
        {"in/store.json": b"{}"}, errors.InvalidInputError, "there is none",
        "it is a store: ckptstore replicate copies its versions",
    ),
    "text": ({"config.json": b"{}"}, errors.InvalidInputError, r"config\.json is a JSON text", ""),
    "compressed": (
        {"bomb.pt": _zip(zipfile.ZIP_DEFLATED, **{"x/data.pkl": bytes(1 << 20)})},
        errors.FormatError, "compressed", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_what_cannot_be_imported_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    """Wrong sizes, paths that lead out, no or two checkpoints: told before a step is asked for."""
    files, error, problem, hint = _REFUSED[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(_WEIGHTS)
    for path, data in files.items():
        (tmp_path / path).write_bytes(data)
    if name == "missing file":
        (tmp_path / "nope.pt").unlink()
    given = tmp_path / next(iter(files)).partition("/")[0]
    for step in (None, 1):
        with pytest.raises(error, match=problem) as told:
            import_file(store, given, run="r", step=step)
        assert hint in told.value.hint
    assert store.versions() == []


def _torch_bytes(**options: bool) -> bytes:
    made = io.BytesIO()
    torch.save({"w": torch.ones(2), "n": 3}, made, **options)
    return made.getvalue()


_KINDS = {
    "a Git LFS pointer": _POINTER,
    "an HTML page": b"\xef\xbb\xbf\n<!DOCTYPE html><html>404</html>",
    "an XML page": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "a JSON text": b'{"error": "gated"}',
    "a text": b"/data/ckpts/last.pt \xc3\xa9\n",
    "an empty file": b"",
    "a file that begins with zeros": bytes(2000),
    "a gzip file": gzip.compress(_torch_bytes()),
    "an xz file": lzma.compress(_torch_bytes()),
    "a bzip2 file": bz2.compress(_torch_bytes()),
    "a zstd file": b"\x28\xb5\x2f\xfd\x04\0\1\0",
    "a 7z, rar": b"7z\xbc\xaf\x27\x1c\0\4",
    "a tar archive": b"a.pt".ljust(257, b"\0") + b"ustar\x0000" + bytes(300),
    "a NumPy array": b"\x93NUMPY\1\0v\0",
    "an archive of NumPy arrays": _zip(**{"a.npy": b"\x93NUMPY"}),
    "a TorchScript program": _zip(**{"m/data.pkl": b"\x80\2", "m/constants.pkl": b"\x80\2"}),
    "a zip archive without a state": _zip(**{"a.txt": b"hello"}),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "a GGUF file": b"GGUF\3\0\0\0" + bytes(50),
    "an ONNX model": b"\x08\x08\x12\x07pytorch\x1a\x03\x32\x2e\x31",
    "a TensorFlow Lite model": b"\x1c\0\0\0TFL3\x14\0",
    "a TensorFlow model": b"\x08\x01\x12\xaa\x01\n",
    "a pickle that torch.save did not write": pickle.dumps({"w": [1]}),
}


@pytest.mark.parametrize("suffix", ["bin", "safetensors", "pth.tar"])
def test_a_file_of_another_kind_is_named(store: Store, tmp_path: Path, suffix: str) -> None:
    """The first bytes tell, under any suffix, in an index too; no advice is to unpickle it."""
    path = tmp_path / f"model.{suffix}"
    index = tmp_path / "model.index.json"
    index.write_text(json.dumps({"weight_map": {"w": path.name}}))
    error = errors.InvalidInputError if suffix == "pth.tar" else errors.FormatError
    for kind, data in _KINDS.items():
        path.write_bytes(data)
        for given in (path, index):
            with pytest.raises(error, match=re.escape(f"{path} is {kind}")) as told:
                import_file(store, given, run="r", step=1)
            assert told.value.hint, kind
            assert "weights_only=False" not in str(told.value)
    assert store.versions() == []


@pytest.mark.parametrize(
    "suffix", ["", ".pth.tar", ".pkl", ".model", ".th", ".bin", ".safetensors"]
)
def test_the_content_decides_under_any_suffix(store: Store, tmp_path: Path, suffix: str) -> None:
    """Both forms of torch.save, and safetensors, are read whatever their names end in."""
    contents = [
        _torch_bytes(),
        _torch_bytes(_use_new_zipfile_serialization=False),
        safetensors.torch.save({"w": torch.ones(2)}),
    ]
    for step, data in enumerate(contents):
        (tmp_path / f"file{suffix}").write_bytes(data)
        import_file(store, tmp_path / f"file{suffix}", run="r", step=step)
        assert store.load(f"r@{step}")["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "spm.model", "README.md"])
def test_a_file_beside_the_weights_that_is_something_else_is_refused(
    store: Store, folder: Path, name: str
) -> None:
    """A pointer or an error page would be served as a tokenizer; a card may begin with HTML."""
    (folder / "README.md").write_bytes(b"<!DOCTYPE html><div align=center>")
    (folder / "empty.txt").touch()
    import_file(store, folder, run="right")
    for kind in ("a Git LFS pointer", "a gzip file", "a file that begins with zeros"):
        (folder / name).write_bytes(_KINDS[kind])
        with pytest.raises(errors.FormatError, match=f"{name} is {kind}"):
            import_file(store, folder, run="r")
    if name != "README.md":
        (folder / name).write_bytes(_KINDS["an HTML page"])
        with pytest.raises(errors.FormatError, match=f"{name} is an HTML page"):
            import_file(store, folder, run="r")


def test_bytes_that_a_format_sums_up_are_checked(store: Store, tmp_path: Path) -> None:
    """Sums of zip records, sizes in an index, names of the hub's blobs; absent sums are right."""
    data = bytearray(_torch_bytes())
    data[data.index(torch.ones(2).numpy().tobytes())] ^= 1
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    with pytest.raises(errors.FormatError, match="CRC"):
        import_file(store, path, run="r", step=1)
    torch.serialization.set_crc32_options(False)
    try:
        import_file(store, _saved(tmp_path, "b.pt", {"w": torch.ones(2)}), run="sumless", step=1)
    finally:
        torch.serialization.set_crc32_options(True)
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    for size in (7, 8, 9):
        found = {"metadata": {"total_size": size}, "weight_map": {"w": "m.safetensors"}}
        index.write_text(json.dumps(found))
        wrong = pytest.raises(errors.FormatError, match="hold 9 bytes of tensors; they hold 8")
        with wrong if size == 9 else nullcontext():
            import_file(store, index, run=f"size{size}", step=1)
    (tmp_path / "blobs").mkdir()
    whole = (tmp_path / "m.safetensors").read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(whole).hexdigest()
    (tmp_path / "link.safetensors").symlink_to(blob)
    blob.write_bytes(whole)
    import_file(store, tmp_path / "link.safetensors", run="hub", step=1)
    blob.write_bytes(whole[:-1] + b"x")
    with pytest.raises(errors.FormatError, match="SHA-256"):
        import_file(store, tmp_path / "link.safetensors", run="hub", step=2)


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_storages_come_as_tensors_of_one_dimension(
    store: Store, tmp_path: Path, *, zipped: bool
) -> None:
    """weights_only reads them; they share memory with the tensors that they hold."""
    whole = torch.arange(4.0)
    raw = whole.untyped_storage()
    kind: Any = torch.TypedStorage
    typed = kind(wrap_storage=raw, dtype=torch.float32, _internal=True)
    state: dict[str, Any] = {"w": whole, "typed": typed, "pair": (typed, [typed])}
    if zipped:  # the old form has no such storage
        state["deep"] = [{"raw": torch.arange(3).byte().untyped_storage()}]
    path = _saved(tmp_path, "s.pt", state, _use_new_zipfile_serialization=zipped)
    import_file(store, path, run="r", step=1)
    found = store.load("r@1")
    assert torch.equal(found["typed"], whole)
    assert found["typed"].data_ptr() == found["w"].data_ptr() == found["pair"][1][0].data_ptr()
    assert torch.equal(found["pair"][0], whole)
    if zipped:
        assert found["deep"][0]["raw"].tolist() == [0, 1, 2]


def test_import_of_what_the_head_holds_stores_nothing_new(store: Store, tmp_path: Path) -> None:
    """A second import of one file shares every chunk with the first."""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.randn(500, 500)}, path)
    import_file(store, path, run="r", step=1)
    again = import_file(store, path, run="r", step=2)
    assert again.roles["weights"].new == again.roles["weights"].stored == 0
