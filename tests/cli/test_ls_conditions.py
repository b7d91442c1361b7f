"""``ckptstore ls`` sorts and chooses versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def _steps(cli: Cli, history: Path, *options: str) -> list[int]:
    document = cli("ls", "gpt", *options, "--json", "-s", history).document
    assert document["versions_count"] == len(document["versions"])
    return [version["step"] for version in document["versions"]]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--sort", "val_loss"], [400, 500, 200, 100, 300]),  # NaN comes last
        (["--sort", "acc"], [100, 200, 300, 400, 500]),  # no direction: the lowest first
        (["--sort", "step"], [500, 400, 300, 200, 100]),
        (["--where", "val_loss<2.5"], [500, 400]),
        (["--where", "val_loss <= 2.5", "--where", "step!=400"], [500, 200]),
        (["--where", "val_loss!=3"], [500, 400, 300, 200]),
        (["--where", "step>=400", "--sort", "val_loss"], [400, 500]),
        (["--tag", "first"], [100]),
        (["--tag", "nothing"], []),
        (["--where", "size>1e12"], []),
    ],
)
def test_versions_are_chosen_and_sorted(
    cli: Cli, history: Path, options: list[str], steps: list[int]
) -> None:
    """By metrics in the direction that the run declared, by step, size and tag."""
    assert _steps(cli, history, *options) == steps


def test_the_sorted_metric_has_a_column_and_the_rest_is_counted(cli: Cli, history: Path) -> None:
    """Of what fits, some are shown, and a note says how many there are."""
    done = cli("ls", "--sort", "acc", "--where", "acc<0.5", "-n", 2, "-s", history)
    titles, first, second = done.rows[-3:]
    assert titles.index(" ACC".strip()) if "ACC" in titles else any("ACC" in t for t in titles)
    assert "100" in " ".join(first)
    assert "200" in " ".join(second)
    assert "2 of 4 versions" in done.err
    assert "no version fits" in cli("ls", "--tag", "x", "-s", history).err
