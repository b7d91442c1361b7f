"""What the log says of each operation."""

from __future__ import annotations

from pathlib import Path

from ckptstore.catalog.commits import OPS
from ckptstore.cli import log_cmd
from tests.cli.conftest import Cli


def test_every_operation_has_words() -> None:
    """No operation of the format is without a description in ``ckptstore log``."""
    assert set(OPS) == set(log_cmd._DESCRIBE)


def test_copies_name_the_other_store(cli: Cli, store_path: Path, tmp_path: Path) -> None:
    """Who has a version is told by the name of the replica, on the other side by its id."""
    other = tmp_path / "other"
    assert cli("replicate", "gpt@500", "-s", store_path, "--to", other).code == 0
    assert cli("replica", "add", "cold", other, "-s", store_path).code == 0
    here = cli("log", "-s", store_path).out
    there = cli("log", "-s", other).out
    assert "cold has gpt@500 " in here
    store = cli("ls", "-s", store_path, "--json").document["store"]
    assert store == str(store_path)
    assert "gpt@500 " in there
    assert " from store " in there


def test_policies_are_rules_not_json(cli: Cli, store_path: Path) -> None:
    """A policy is told as its rules, and one that was taken away as none."""
    cli("retain", "gpt", "--full", "last 3", "--set", "-s", store_path)
    cli("retain", "gpt", "--clear", "-s", store_path)
    out = cli("log", "-s", store_path).out
    assert "gpt: full: last 3" in out
    assert "gpt: no policy" in out
