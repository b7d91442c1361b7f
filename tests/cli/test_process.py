"""The program as users start it: a process, with pipes, signals, terminals; reports."""

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

PROGRAM = [sys.executable, "-c", "from ckptstore.cli.main import main; main()"]


def _environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    return {**kept, **changes}


@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "--json"], ["ls"], ["show", "gpt"], ["log", "--graph"], ["du"], ["verify"],
        ["ls", "--help"], ["--version"],
    ],
)  # fmt: skip
@pytest.mark.short(sample=2)
def test_reader_that_goes_away_is_no_error(history: Path, arguments: list[str]) -> None:
    """`ckptstore log | head -1`: no traceback, no message, and the exit code of SIGPIPE."""
    assert _unread(*arguments, env=_environment(CKPTSTORE_URL=str(history))) == (141, b"")


def _unread(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Return the exit code and the errors of a command whose output nobody reads."""
    process = subprocess.Popen(
        [*PROGRAM, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    return process.wait(300), errors


def test_an_error_that_nobody_reads_is_no_defect(tmp_path: Path) -> None:
    """An error whose document goes to a closed pipe is told on stderr, without a traceback."""
    code, errors = _unread("ls", "--json", "-s", str(tmp_path / "nowhere"))
    assert code == 141
    assert errors.startswith(b"error: there is no store")
    assert b"Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code"), [(["ls"], 8), (["ls", "--json"], 8), (["show", "nope", "--json"], 3)]
)
@pytest.mark.short(sample=1)
def test_output_to_a_full_disk_is_an_error(history: Path, arguments: list[str], code: int) -> None:
    """`ckptstore ls > FILE` with no room: one error and its exit code, no traceback."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, *arguments],
            env=_environment(CKPTSTORE_URL=str(history)),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    if code == 8:
        assert done.stderr.startswith("error: the output cannot be written: No space left")


def test_without_stdout_there_is_nobody_to_read(history: Path) -> None:
    """`ckptstore ls >&-`: done, in silence; no file that is opened later gets its number."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&-', "sh", *PROGRAM, "ls", "-s", str(history)],
        env=_environment(),
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_an_import(store_path: Path, tmp_path: Path) -> None:
    """SIGINT while a file is read: exit code 130, how to go on, no version."""
    pipe = tmp_path / "slow.safetensors"
    os.mkfifo(pipe)  # opening it waits for a writer that never comes
    process = subprocess.Popen(
        [*PROGRAM, "import", str(pipe), "r", "--step", "1", "-s", str(store_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            deadline = time.monotonic() + 60  # where the kernel does not tell, it has begun by then
            while not _waits_on(process.pid, b"wait_for_partner") and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, out, errors) == (
        130,
        b"",
        b"error: interrupted\nhint: what was committed stays; the same command again continues\n",
    )


def _waits_on(pid: int, place: bytes) -> bool:
    """Return whether the process's main thread sleeps in a kernel function of this name."""
    return place in Path(f"/proc/{pid}/wchan").read_bytes()


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_only_where_wanted(history: Path, no_color: str, coloured: bool) -> None:
    """A terminal gets bold titles and green bests, unless NO_COLOR is set."""
    changes = {"TERM": "xterm-256color", **({"NO_COLOR": no_color} if no_color else {})}
    out = _on_terminal(["ls", "-s", str(history)], changes)
    assert b"val_loss" in out.lower()
    assert (b"[32m" in out or b";32m" in out) is coloured


def test_narrow_terminal_gets_fewer_columns_not_broken_ones(history: Path) -> None:
    """At 70 characters each version is one line still; what went is named, metrics stay."""
    changes = {"TERM": "xterm-256color", "COLUMNS": "70", "NO_COLOR": "1"}
    lines = _on_terminal(["ls", "gpt", "-s", str(history)], changes).decode().splitlines()
    assert len(lines) == 7
    assert "VAL_LOSS" in lines[0]
    assert "SAVED" not in lines[0]
    assert lines[-1].startswith("no room for SAVED")
    assert max(map(len, lines[1:])) <= 70  # the titles hold the codes for bold


@pytest.mark.parametrize(
    ("arguments", "first", "left_out"),
    [
        (["du"], "total", "no room for STORED/SIZE"),
        (["gc", "-n"], "manifests", "no room for YOUNG"),
    ],
)
def test_a_table_of_numbers_keeps_the_names_of_its_rows(
    store_path: Path, arguments: list[str], first: str, left_out: str
) -> None:
    """At 50 characters columns go, and a note says which; what a row is about is never cut."""
    changes = {"TERM": "xterm-256color", "COLUMNS": "50", "NO_COLOR": "1"}
    lines = _on_terminal([*arguments, "-s", str(store_path)], changes).decode().splitlines()
    assert any(line.startswith(f"{first} ") for line in lines)
    assert left_out in lines[-1]


def test_progress_is_drawn_on_a_terminal_and_wiped(history: Path) -> None:
    """Verify draws a bar where stderr is a terminal; the result stands below, --quiet has none."""
    changes = {"TERM": "xterm-256color"}
    out = _on_terminal(["verify", "-s", str(history)], changes)
    assert b"verify" in out
    assert b"no damage" in out
    quiet = _on_terminal(["verify", "-q", "-s", str(history)], changes)
    assert quiet == b""


def _on_terminal(arguments: list[str], changes: dict[str, str]) -> bytes:
    """Run the program on a terminal of its own and return all that it drew."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdin=slave, stdout=slave, stderr=slave, env=_environment(**changes)
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            part = os.read(master, 65_536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        drawn += part
    os.close(master)
    assert process.wait(300) == 0
    return drawn


@pytest.mark.slow
def test_version_and_help(history: Path) -> None:
    """--version names the program; no arguments, -h and --help print the help with exit codes."""
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.startswith("ckptstore 0.")
    for arguments in ([], ["-h"], ["--help"]):
        done = subprocess.run([*PROGRAM, *arguments], capture_output=True, check=True, text=True)
        assert "Exit codes" in done.stdout
        assert "doctor" in done.stdout


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
        _, err = process.communicate()
    finally:
        process.kill()
        os.close(ours)
    assert seen.count(b"LAST SAVE") >= 2
    assert (process.returncode, err) == (0, b"stopped; nothing was changed\n")
