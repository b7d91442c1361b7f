"""Engines from the command line, from job files, and for encrypted stores."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from daskcluster import Cluster

import ckptstore
from ckptstore.cli.main import run
from ckptstore.errors import InvalidInputError
from ckptstore.jobs import read_job, run_job

KEY = "command:printf " + "00112233445566778899aabbccddeeff" * 2


def trained(root: Path, **options: Any) -> None:  # noqa: ANN401 - of the store
    """Make a store of two versions."""
    with ckptstore.open(root, create=True, **options) as store:
        for step in (1, 2):
            store.run("gpt").save({"w": torch.full((50_000,), float(step))}, step=step)


def test_commands_take_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: Cluster
) -> None:
    """The documents are those of threads; what is no engine ends with 2, and the next step."""
    dask = ["--engine", cluster.address]
    hot, cold = str(tmp_path / "hot"), str(tmp_path / "cold")
    trained(tmp_path / "hot")
    documents = []
    for engine in ([], [*dask, "--workers", "2"]):
        assert run(["verify", "-s", hot, "--json", *engine]) == 0
        document = json.loads(capsys.readouterr().out) | {"seconds": 0}
        assert document.pop("transfers")["read"]["requests_count"] > 0  # of this process
        documents.append(document)
    assert documents[0] == documents[1]
    assert run(["replicate", "-s", hot, "--to", cold, "--json", *dask]) == 0
    assert len(json.loads(capsys.readouterr().out)["copied"]) == 2
    assert run(["verify", "-s", cold]) == 0
    commands = ["verify", "-s", hot], ["replicate", "-s", hot, "--to", cold], ["gc", "-s", hot]
    for command, wrong in product(commands, ("processes", "dask:local")):
        assert run([*command, "--engine", wrong]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"unknown engine '{wrong}'" in said
        assert "dask scheduler, dask worker tcp://HOST:PORT" in said


@pytest.mark.slow
def test_jobs_take_an_engine(tmp_path: Path, cluster: Cluster) -> None:
    """The job's copies and scrubs run over it; what is none is refused with the file's name."""
    trained(tmp_path / "hot")
    file = tmp_path / "job.toml"
    places = f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{tmp_path}/cold"\n'
    scrub = "[scrub]\nsource = 1.0\ntarget = 1.0\n"
    file.write_text(f'{places}{scrub}[copy]\nengine = "{cluster.address}"\ntasks = 2\n')
    report = run_job(read_job(file))
    assert report.ok
    assert {step.name for step in report.steps} >= {"replicate", "scrub-source", "scrub-target"}
    with ckptstore.open(tmp_path / "cold") as cold:
        assert cold.verify().ok
        assert len(cold.versions()) == 2
    for wrong, advice in (
        ('engine = "processes"', "dask scheduler"),
        ('engine = "dask:local"', "dask scheduler"),
        ("tasks = 2", "name one"),
    ):
        file.write_text(f"{places}[copy]\n{wrong}\n")
        with pytest.raises(InvalidInputError, match=r"job\.toml: .*" + advice):
            read_job(file)


@pytest.mark.slow
def test_encrypted_stores_travel_through_workers(tmp_path: Path, cluster: Cluster) -> None:
    """Workers read and write what is encrypted, either way; the key is on no disk."""
    trained(tmp_path / "plain")
    with (
        ckptstore.open(tmp_path / "plain") as plain,
        ckptstore.open(tmp_path / "sealed", create=True, encryption_key=KEY) as sealed,
        ckptstore.open(tmp_path / "back", create=True, encryption_key=KEY) as back,
    ):
        assert plain.replicate(sealed, executor=cluster.address, workers=2).failures == ()
        assert sealed.verify(executor=cluster.address, workers=2).ok
        assert sealed.replicate(back, executor=cluster.address, workers=2).failures == ()
        found = back.load("gpt@2")
        assert torch.equal(found["w"], torch.full((50_000,), 2.0))
