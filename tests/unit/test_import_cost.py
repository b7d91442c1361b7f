"""What importing costs: names that are loaded lazily stay unloaded until they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "fsspec", "s3fs", "gcsfs", "azure", "botocore", "aiohttp", "safetensors")


def _loaded_after(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after `code`."""
    probe = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=300
    )
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    return {name for name in HEAVY if name in modules}


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import ckptstore` costs what Python itself costs."""
    assert _loaded_after("import ckptstore") == set()


@pytest.mark.parametrize("module", ["ckptstore.cli.main", "ckptstore.store", "ckptstore.errors"])
def test_modules_of_the_command_line_load_nothing_heavy(module: str) -> None:
    """What every command imports leaves torch, numpy and the storage libraries alone."""
    assert _loaded_after(f"import {module}") == set()


@pytest.mark.parametrize(
    "module",
    [
        "ckptstore.catalog.catalog",
        "ckptstore.maintenance",
        "ckptstore.repo",
        "ckptstore.saver.child",
    ],
)
def test_lower_layers_do_not_load_torch(module: str) -> None:
    """Torch comes in with tensors and what stands on them, never below."""
    assert "torch" not in _loaded_after(f"import {module}")


@pytest.mark.parametrize("words", [["ls"], ["log"], ["du"], ["ls", "--json"]], ids=" ".join)
def test_catalog_commands_load_neither_torch_nor_storage_libraries(
    words: list[str], small_store: Path
) -> None:
    """Looking at a local store loads nothing heavy at all."""
    arguments = [*words, "--store", str(small_store)]
    code = f"from ckptstore.cli.main import run\nassert run({arguments}) == 0"

    assert _loaded_after(code) == set()


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a few versions."""
    import ckptstore

    path = tmp_path_factory.mktemp("cost") / "ckpts"
    with ckptstore.open(path, create=True) as store:
        run = store.run("gpt", metrics={"val_loss": "min"})
        for step in range(5):
            run.save({"step": step, "text": "x"}, step=step, metrics={"val_loss": 1 / (step + 1)})
    return path
