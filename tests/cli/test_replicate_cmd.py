"""replicate from the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptstore
from tests.cli.conftest import Cli


def test_a_whole_store(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """It makes the target, says what it did, and a repetition brings nothing."""
    to = tmp_path / "cold"
    foreseen = cli("replicate", "--to", to, "--dry-run", "-s", store_path)
    assert foreseen.code == 0
    assert "would copy 6 versions" in foreseen.out
    assert not to.exists()

    done = cli("replicate", "--to", to, "--json", "-s", store_path)
    assert done.code == 0
    assert len(done.document["copied"]) == 6
    assert done.document["checked"] is True
    assert done.document["noted"] is True
    again = cli("replicate", "--to", to, "-s", store_path)
    assert "copied 0 versions" in again.out
    assert "6 versions there already" in again.out
    listed = [cli("ls", "gpt", "--json", "-s", place).document for place in (store_path, to)]
    ids = [[version["id"] for version in document["versions"]] for document in listed]
    assert ids[0] == ids[1]


def test_refs_runs_and_rules(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """What is named travels; the rest comes as records or not at all."""
    to = tmp_path / "cold"
    done = cli("replicate", "gpt@best:val_loss", "--to", to, "--json", "-s", store_path)
    assert done.document["records_count"] == 3
    ruled = cli(
        "replicate", "--run", "gpt", "--keep", "tagged", "--to", to, "--json", "-s", store_path
    )
    assert len(ruled.document["copied"]) == 1
    limited = cli(
        "replicate", "--run", "lora", "--limit-rate", "1GiB", "--to", to, "-s", store_path
    )
    assert limited.code == 0
    assert "read back" in limited.out


def test_what_is_refused(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Wrong arguments, one store twice, and unrelated runs of a name have exit codes."""
    to = tmp_path / "cold"
    assert cli("replicate", "gpt@77", "--to", to, "-s", store_path).code == 3
    assert cli("replicate", "--run", "nope", "--to", to, "-s", store_path).code == 3
    assert cli("replicate", "--keep", "nonsense", "--to", to, "-s", store_path).code == 2
    assert not to.exists()  # no store was made for what is not there
    assert cli("replicate", "--to", store_path, "-s", store_path).code == 4
    with ckptstore.open(tmp_path / "other", create=True) as other:
        other.run("gpt").save({"x": 1}, step=1)
    refused = cli("replicate", "--to", tmp_path / "other", "-s", store_path)
    assert refused.code == 4
    assert "fork" in refused.err


def test_damage_is_told(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """A damaged version makes the exit code 5; the others are there."""
    damaged = tmp_path / "damaged"
    shutil.copytree(store_path, damaged)
    with ckptstore.open(damaged) as store:
        pack = store.version("lora@7")._content.manifest.pieces.packs[0]
    (damaged / "packs" / pack[:2] / f"{pack}.pack").unlink()
    done = cli("replicate", "--to", tmp_path / "cold", "-s", damaged)
    assert done.code == 5
    assert "not copied: lora@7" in done.out
    with ckptstore.open(tmp_path / "cold") as store:
        assert len(store.versions("gpt")) == 5
        assert store.resolve("lora@7").level == "record"


@pytest.mark.parametrize("flag", ["--no-check"])
def test_unchecked(cli: Cli, store_path: Path, tmp_path: Path, flag: str) -> None:
    """Without reading back nothing is noted in the source."""
    done = cli("replicate", flag, "--to", tmp_path / "cold", "--json", "-s", store_path)
    assert done.document["checked"] is False
    assert done.document["noted"] is False
