"""The single-file reader of docs/reference restores versions without ckptstore."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from goldenkit import READER, golden

import ckptstore
from ckptstore import limits
from ckptstore.format.keys import commit_key

GOLDEN = golden("v1")

# Runs the reader where ckptstore and torch cannot be imported.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ckptstore", "torch", "msgspec", "xxhash"):
            raise ImportError(name + " is not for the reader")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_reader(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the reader as a program in a process that has no ckptstore."""
    command = [sys.executable, "-c", ALONE, str(READER), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def restore(reader: ModuleType, store: Path, name: str) -> dict[str, Any]:
    """Return what the reader makes of a version."""
    found: dict[str, Any] = reader.restore(store, name)
    return found


def test_the_reader_is_one_short_file_on_a_few_libraries() -> None:
    """At most 335 lines; standard library, numpy, zstandard and blake3."""
    text = READER.read_text()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes
        for alias in node.names
    }
    foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names

    assert len(text.splitlines()) <= 335
    assert foreign == {"numpy", "zstandard", "blake3"}


def test_the_golden_store_read_without_ckptstore(tmp_path: Path) -> None:
    """As a program of its own, it writes every array of the newest version of a run."""
    out = tmp_path / "out.npz"
    done = run_reader(GOLDEN, "gpt", out)
    assert done.returncode == 0, done.stderr

    with np.load(out) as arrays:
        assert arrays["model.float32"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert arrays["model.view"].tolist() == [[4, 6], [8, 10]]
        assert arrays["model.float16"].tolist() == [-1.5] * 100
        assert arrays["model.bfloat16"].tolist() == [0x3F80, 0xBF00, 0x4040]
        assert arrays["model.large_float32"].tolist() == [(n % 251) / 8 for n in range(40_000)]
    assert "extra.plain.9: 'ä'" in done.stdout


def test_every_value_of_the_golden_store(reader: ModuleType) -> None:
    """Tensors of each kind, layout and codec, NumPy values and plain values."""
    found = restore(reader, GOLDEN, "gpt")

    assert found["model.channels_last"].tolist() == np.arange(24.0).reshape(1, 2, 3, 4).tolist()
    assert found["model.scalar"].tolist() == 2.5
    assert found["model.empty"].shape == (0, 5)
    assert found["model.bool"].tolist() == [True, False, True]
    assert found["model.float8"].tolist() == [0x38, 0xC0, 0x30]
    assert found["model.nan"].view(np.uint32).tolist() == [0x7FC00000, 0x7F800000, 0x80000000]
    assert found["model.complex64"].tolist() == [1 + 2j, -3.5j]
    assert found["model.quantized"].tolist() == [10, 12, 14]
    assert found["model.planes_float64"].tolist() == [n / 4 for n in range(500)]
    assert found["model.planes_int16"].tolist() == [*range(700)]
    assert found["model.planes_int32"].tolist() == [*range(0, 2400, 3)]
    assert found["model.planes_int64"].tolist() == [*range(-450, 450)]
    assert found["model.zstd_uint8"].tolist() == [n % 5 for n in range(2000)]
    assert found["extra.numpy"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["extra.long_bytes"] == b"0123456789" * 500
    assert found["extra.long_text"] == "grün " * 1000
    assert [found[f"extra.plain.{n}"] for n in (0, 1, 4, 7, 9)] == [None, True, -5, 1.5, "ä"]
    assert found["extra.plain.6"] == ["i", str(-(10**30))]
    assert found["extra.money.cents"] == 250
    assert found["extra.ordered.a"] == 2


@pytest.mark.parametrize("name", ["raw", "zstd/a", "de1559a6f33ebf3ae6eca845073c2669"])
def test_other_runs_and_ids(reader: ModuleType, name: str) -> None:
    """A run's name gives its newest version, an id the version itself."""
    assert restore(reader, GOLDEN, name)["bias"].tolist() == [float(n) for n in range(300)]


def test_an_older_version_by_its_id(reader: ModuleType) -> None:
    """A version that is not the newest is restored as it was."""
    found = restore(reader, GOLDEN, "4dece9da5a8888fe9c2bac69211d23ba")

    assert found["model.float16"].tolist() == [n / 8 for n in range(100)]


def test_a_store_that_was_just_written(reader: ModuleType, tmp_path: Path) -> None:
    """What this version of ckptstore writes, the reader reads: large, strided, odd tensors."""
    random = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "large": torch.randn(700, 1001, generator=random),
        "double": torch.randn(30_001, generator=random, dtype=torch.float64),
        "brain": torch.randn(50_001, generator=random).to(torch.bfloat16),
        "turned": torch.randn(300, 200, generator=random).t(),
        "small": {str(n): torch.randn(16, generator=random) for n in range(300)},
        "complex": torch.randn(5000, dtype=torch.complex128, generator=random),
    }
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=65536) as store:
        store.run("a").save(state, step=0)
        store.run("a").save({**state, "step": 1}, step=1)
    found = restore(reader, tmp_path / "store", "a")

    assert found["step"] == 1
    for name in ("large", "double", "turned", "complex"):
        tensor = state[name]
        assert np.array_equal(found[name], tensor.numpy())
    assert np.array_equal(found["brain"], state["brain"].view(torch.uint16).numpy())
    for n in range(300):
        assert np.array_equal(found[f"small.{n}"], state["small"][str(n)].numpy())


def test_stores_that_versions_travelled_between(reader: ModuleType, tmp_path: Path) -> None:
    """The reader reads a replica, records of versions that did not travel, and what goes on."""
    with ckptstore.open(tmp_path / "here", create=True) as store:
        for step in range(3):
            store.run("a").save({"t": torch.full((5000,), float(step))}, step=step)
        store.replicate(tmp_path / "there", ["a@1"])
        store.replicate(tmp_path / "whole")
    with ckptstore.open(tmp_path / "whole") as store:
        store.run("a").save({"t": torch.full((5000,), 3.0)}, step=3)
    for name, newest in (("here", 2.0), ("there", 1.0), ("whole", 3.0)):
        assert restore(reader, tmp_path / name, "a")["t"].tolist() == [newest] * 5000


@pytest.mark.parametrize("numbers", [(2,), (1, 2), (2, 3)])
def test_records_that_were_set_aside_are_read_past(
    reader: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    """Torn, whole again later, and gone; a damaged end that is not set aside is refused."""
    monkeypatch.setattr(limits, "VISIBILITY_WAIT_MIN_S", 0.01)
    place = tmp_path / "s"
    with ckptstore.open(place, create=True) as store:
        for step in range(numbers[-1]):
            store.run(f"r{step}").save({"t": torch.full((9,), float(step))}, step=step)
    records = {place / commit_key(number): b"" for number in numbers}
    for path in records:
        records[path] = path.read_bytes()
        path.write_bytes(records[path][:40])
    with pytest.raises(ValueError, match="does not match its digest"):
        restore(reader, place, "r0")
    with ckptstore.open(place) as store:
        assert store.repair().ok
        store.run("new").save({"t": torch.full((9,), 7.0)}, step=7)
    for change in (Path.exists, lambda path: path.write_bytes(records[path]), Path.unlink):
        for path in records:
            change(path)
        assert restore(reader, place, "new")["t"].tolist() == [7.0] * 9
        assert numbers[0] == 1 or restore(reader, place, "r0")["t"].tolist() == [0.0] * 9
        with pytest.raises(ValueError, match="no run or version"):
            restore(reader, place, f"r{numbers[-1] - 1}")
    (place / commit_key(numbers[-1] + 1)).unlink()
    with pytest.raises(ValueError, match="missing"):
        restore(reader, place, "new")


@pytest.mark.parametrize("kind", ["store.json", "commits", "manifests", "packs"])
def test_damage_is_noticed(reader: ModuleType, tmp_path: Path, kind: str) -> None:
    """A flipped bit in anything that is read raises, and never gives other values."""
    store = tmp_path / "store"
    shutil.copytree(GOLDEN, store)
    (store / "packs/b1/b1ee894a381ae8098e18896bb8116a9e.pack").unlink()  # another version's
    name = "4dece9da5a8888fe9c2bac69211d23ba"
    meant = restore(reader, store, name)
    paths = [path for path in sorted(store.rglob("*")) if path.is_file()]
    for path in paths:
        key = path.relative_to(store).as_posix()
        other = key.startswith("manifests/") and name not in key
        if not key.startswith(kind) or other or (kind == "packs" and path.stat().st_size < 5000):
            continue
        data = path.read_bytes()
        # Of a pack, the first chunk: its own header is at 32, what it stores begins at 96.
        for at in [40, 100, 110] if kind == "packs" else range(3, len(data), len(data) // 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with pytest.raises((ValueError, KeyError, zstandard.ZstdError)):
                restore(reader, store, name)
        path.write_bytes(data)
    again = restore(reader, store, name)
    assert again.keys() == meant.keys()


def test_what_is_not_there_or_too_new_is_refused(reader: ModuleType) -> None:
    """An unknown name ends the program with an error that names it."""
    with pytest.raises(ValueError, match="no run or version nobody"):
        restore(reader, GOLDEN, "nobody")
    done = run_reader(GOLDEN, "nobody")

    assert done.returncode != 0
    assert "no run or version nobody" in done.stderr
