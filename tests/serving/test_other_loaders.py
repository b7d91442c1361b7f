"""Loaders of inference servers, unmodified, read weights from ``ckptstore serve``.

vLLM and SGLang are gigabytes, so ``make soak`` runs them where ``CKPTSTORE_VLLM_PYTHON`` and
``CKPTSTORE_SGLANG_PYTHON`` name a Python that has them; the code that downloads and reads weights
is enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from servekit import Server

import ckptstore
from ckptstore.integrations.pretrained import export_pretrained

_HUB = """
import glob, sys, torch
from {package} import weight_utils
out, cache = sys.argv[1:]
folder = weight_utils.download_weights_from_hf(
    "store/gpt", cache, ["*.safetensors"], revision="best:val_loss")
files = sorted(glob.glob(folder + "/*.safetensors"))
torch.save(dict(weight_utils.safetensors_weights_iterator(files, False)), out)
"""
_STREAM = """
import sys, torch
from runai_model_streamer import SafetensorsStreamer
with SafetensorsStreamer() as streamer:
    streamer.stream_files(sys.argv[2:])
    torch.save({name: tensor.clone() for name, tensor in streamer.get_tensors()}, sys.argv[1])
"""


def _read(python: str, program: str, tmp_path: Path, *words: str, **more: str) -> object:
    """Run a program in this Python; return what it saved."""
    out = tmp_path / "out.pt"
    around = {**os.environ, "HF_HOME": str(tmp_path / "hf"), **more}
    command = [python, "-c", program, str(out), *words]
    done = subprocess.run(
        command, env=around, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def _check(found: object, folder: Path) -> None:
    """Compare weights with those of an exported folder, bit for bit."""
    expected: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        expected |= load_file(path)
    assert isinstance(found, dict)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def exported(place: Path, tmp_path: Path) -> Path:
    """Return the folder that ``export_pretrained`` writes, in shards as the server's."""
    with ckptstore.open(place) as store:
        return export_pretrained(
            store, "gpt@best:val_loss", tmp_path / "exported", max_shard_size=100_000
        )


@pytest.mark.parametrize(
    ("variable", "package"),
    [
        ("CKPTSTORE_VLLM_PYTHON", "vllm.model_executor.model_loader"),
        ("CKPTSTORE_SGLANG_PYTHON", "sglang.srt.model_loader"),
    ],
    ids=["vllm", "sglang"],
)
@pytest.mark.soak
@pytest.mark.timeout(400)
def test_an_inference_server_loads_from_the_hub(
    server: Server, exported: Path, tmp_path: Path, variable: str, package: str
) -> None:
    """Its own code downloads the shards of a ref and iterates over the exported weights."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python")
    program = _HUB.replace("{package}", package)
    found = _read(python, program, tmp_path, str(tmp_path / "cache"), HF_ENDPOINT=server.url)
    _check(found, exported)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_streamer_of_runai_reads_from_s3(
    server: Server, exported: Path, tmp_path: Path
) -> None:
    """Its requests, in parts and with absolute targets, give the exported weights."""
    names = sorted(path.name for path in exported.glob("*.safetensors"))
    places = [f"s3://store/gpt/best:val_loss/{name}" for name in names]
    around = {
        "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "ckptstore",
        "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }  # fmt: skip
    _check(_read(sys.executable, _STREAM, tmp_path, *places, **around), exported)
