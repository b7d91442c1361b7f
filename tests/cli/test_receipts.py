"""What saves took, from the command line: in show, as text for Prometheus, as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


def test_show_prints_the_receipt_and_its_state(cli: Cli, history: Path) -> None:
    """Seconds of each stage and bytes, in units; how far the version has come."""
    out = cli("show", "gpt@400", "--receipt", "-s", history).out
    receipt = out.split("RECEIPT\n")[1]
    assert re.search(r"^state +durable$", receipt, re.MULTILINE)
    for name in ("blocked", "staging", "hashing", "encoding", "writing", "committing"):
        assert re.search(rf"^{name}_s +[\d.]+ m?s$", receipt, re.MULTILINE), name
    for name in ("logical", "new", "shared", "stored"):
        assert re.search(rf"^{name}_bytes +[\d.]+ [KM]?i?B$", receipt, re.MULTILINE), name
    assert re.search(r"^auto +(raw|planes)$", receipt, re.MULTILINE)
    assert "auto_planes" not in receipt
    version = cli("show", "gpt@400", "--json", "-s", history).document["version"]
    assert version["state"] == "durable"
    assert version["receipt"]["new_bytes"] == version["new_bytes"]


def test_stats_for_prometheus(cli: Cli, history: Path) -> None:
    """The text alone, ready for a collector; the same in the document."""
    outcome = cli("stats", "--prometheus", "-s", history)
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    assert 'ckptstore_versions{run="gpt",state="durable"} 5' in lines
    assert 'ckptstore_last_save_step{run="lora"} 7' in lines
    document = cli("stats", "--prometheus", "--json", "-s", history).document
    assert document["prometheus"] == outcome.out


def test_stats_shows_what_saves_wrote(cli: Cli, history: Path) -> None:
    """A line a version, oldest first, in units; of all runs, or of one; zeros only in JSON."""
    outcome = cli("stats", "--transfers", "--run", "gpt", "-s", history)
    assert outcome.code == 0
    title, *lines = outcome.out.splitlines()
    assert title.split("  ")[0] == "VERSION"
    assert [line.split()[0] for line in lines] == [f"gpt@{n}00" for n in range(1, 6)]
    assert re.search(r"[\d.]+ [KM]iB +[\d.]+ m?s +[\d.]+ [KMG]iB/s +\d+ +\d+ +0 +0 +0$", lines[0])
    saves = cli("stats", "--transfers", "--json", "-s", history).document["saves"]
    assert [save["run"] for save in saves] == ["gpt"] * 5 + ["lora"]
    assert all(save["requests_bytes"] > 0 and save["limit_count"] == 0 for save in saves)


def test_stats_of_saves_without_figures(cli: Cli, tmp_path: Path) -> None:
    """Versions of earlier releases have dashes."""
    golden = Path(__file__).parents[1] / "compat" / "golden" / "v1"
    outcome = cli("stats", "--transfers", "-s", golden)
    assert outcome.code == 0
    assert {tuple(line.split()[1:]) for line in outcome.out.splitlines()[1:]} == {("-",) * 8}


@pytest.mark.parametrize("command", [["verify"], ["gc", "--dry-run"]])
def test_commands_that_read_much_tell_what_they_moved(
    cli: Cli, history: Path, command: list[str]
) -> None:
    """In the document: requests, bytes, seconds and requests at once, by direction."""
    moved = cli(*command, "--json", "-s", history).document["transfers"]["read"]
    assert moved["requests_count"] >= moved["at_once_count"] >= 1
    assert moved["bytes_per_s"] == moved["requests_bytes"] / moved["requests_s"] > 0


@pytest.mark.parametrize(
    "words", [["--run", "gpt"], ["--prometheus", "--transfers"], ["--prometheus", "--run", "gpt"]]
)
def test_stats_refuses_what_does_not_fit(cli: Cli, history: Path, words: list[str]) -> None:
    """Two views at once, a run without the view that takes one."""
    assert cli("stats", *words, "-s", history).code == 2
