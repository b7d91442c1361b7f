"""``ckptstore report`` and ``ckptstore top``."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore

Cli = Callable[..., Any]


def test_report_writes_one_file(cli: Cli, history: Path, tmp_path: Path) -> None:
    """The page with the store's data; the document names the file and its bytes."""
    path = tmp_path / "a.html"
    result = cli("report", path, "-s", history)
    assert result.code == 0
    assert result.out.startswith(f"{path}: ")
    assert b'"overview"' in path.read_bytes()
    document = cli("report", path, "--run", "gpt", "--json", "-s", history).document
    assert (document["path"], document["bytes"]) == (str(path), path.stat().st_size)
    assert b'"run lora"' not in path.read_bytes()


@pytest.mark.parametrize(
    ("words", "code"), [(["a.pdf"], 2), (["a.html", "--run", "gtp"], 3), (["no/a.html"], 8)]
)
def test_report_refuses(
    cli: Cli, history: Path, tmp_path: Path, words: list[str], code: int
) -> None:
    """A file of another kind, a run that is not there, a folder that is not there."""
    result = cli("report", tmp_path / words[0], *words[1:], "-s", history)
    assert result.code == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("log", "gpt", "--plot", "a.svg"), ("stats", "--plot", "a.svg")])
def test_pictures_of_before_name_the_report(
    cli: Cli, history: Path, words: tuple[str, ...]
) -> None:
    """The option that is gone says what draws them now."""
    result = cli(*words, "-s", history)
    assert result.code == 2
    assert "ckptstore report FILE.html" in result.err


def test_top_shows_a_frame(cli: Cli, tmp_path: Path) -> None:
    """Runs by their rhythm, the last versions, and what a replica lacks."""
    with ckptstore.open(tmp_path / "s", create=True) as store:
        for step in (1, 2, 3):
            store.run("gpt").save({"w": torch.ones(1000)}, step=step)
        store.run("one").save({"w": torch.ones(9)}, step=7)
        ckptstore.open(tmp_path / "cold", create=True).close()
        store.add_replica("cold", str(tmp_path / "cold"))
    found = cli("top", "--json", "-s", tmp_path / "s").document
    assert [(run["run"], run["step"]) for run in found["runs"]] == [("one", 7), ("gpt", 3)]
    assert found["runs"][0]["state"] == "one version"
    assert found["runs"][1]["interval_s"] >= 0
    assert [version["step"] for version in found["versions"]] == [7, 3, 2, 1]
    assert all(version["bytes_per_s"] > 0 for version in found["versions"])
    assert found["versions"][1]["logical_bytes"] == 4000
    (replica,) = found["replicas"]
    assert (replica["name"], replica["missing"]) == ("cold", 4)
    assert replica["behind_s"] > 0
    text = cli("top", "--once", "-s", tmp_path / "s").out
    for word in ("gpt@3", "LAST SAVE", "REPLICA", "one version"):
        assert word in text


@pytest.mark.usefixtures("ctrl_c")
def test_top_ends_with_one_line(history: Path) -> None:
    """On a terminal it refreshes until Ctrl-C, and then says that nothing was changed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptstore", "top", "--interval", "0.5", "-s", str(history)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    seen = b""
    stopped = False
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:  # a terminal that nobody reads would hold it up
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # it has ended
                    seen += os.read(ours, 1 << 16)
            if seen.count(b"LAST SAVE") >= 2 and not stopped:
                process.send_signal(signal.SIGINT)
                stopped = True
            if process.poll() is not None:
                break
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(ours)
    assert seen.count(b"LAST SAVE") >= 2
    assert (process.returncode, err) == (0, b"stopped; nothing was changed\n")
