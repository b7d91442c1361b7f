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
    out = cli("show", "gpt@400", "-s", history).out
    receipt = out.split("RECEIPT\n")[1]
    assert re.search(r"^state +durable$", receipt, re.MULTILINE)
    for name in ("blocked", "staging", "hashing", "encoding", "writing", "committing"):
        assert re.search(rf"^{name}_s +[\d.]+ m?s$", receipt, re.MULTILINE), name
    for name in ("logical", "new", "shared", "stored"):
        assert re.search(rf"^{name}_bytes +[\d.]+ [KM]?i?B$", receipt, re.MULTILINE), name
    assert re.search(r"^auto +(raw|planes) \(not both measured\)$", receipt, re.MULTILINE)
    assert "auto_measured" not in receipt
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


def test_stats_draws_what_saves_took(cli: Cli, history: Path, tmp_path: Path) -> None:
    """Of all runs, or of one; the file is named."""
    picture = tmp_path / "saves.svg"
    outcome = cli("stats", "--plot", picture, "--run", "gpt", "-s", history)
    assert (outcome.code, outcome.out) == (0, f"drawn to {picture}\n")
    assert "encoding" in picture.read_text()
    document = cli("stats", "--plot", picture, "--json", "-s", history).document
    assert document["plot"] == str(picture)


@pytest.mark.parametrize(
    "words", [["--run", "gpt"], ["--prometheus", "--plot", "a.svg"], ["--plot", "a.gif"]]
)
def test_stats_refuses_what_does_not_fit(cli: Cli, history: Path, words: list[str]) -> None:
    """Two views at once, a run without a picture, a kind of picture that there is not."""
    assert cli("stats", *words, "-s", history).code == 2
