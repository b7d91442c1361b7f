"""Shells complete runs, refs, tags and metrics of the store that is named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.cli.main import run

PROGRAM = "import sys; from ckptstore.cli.main import main; main()"


def completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str, line: str
) -> set[str]:
    """Return what the program offers at the end of a line; its words must not be parted."""
    words = line.split(" ")
    monkeypatch.setenv("_CKPTSTORE_COMPLETE", f"complete_{shell}")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        run([])
    assert done.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    if shell == "zsh":  # "name":"help", with colons escaped
        return {name.replace(r"\\:", ":") for name in re.findall(r'(?:\(\(|\n)"([^"]+)"', out)}
    return {line.partition("\t")[0] for line in out.splitlines() if line}


@pytest.fixture
def _url(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_URL", str(history))


@pytest.mark.usefixtures("_url")
@pytest.mark.short(sample=1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_a_store_are_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    """Commands, runs, refs, tags and metrics."""

    def offered(line: str) -> set[str]:
        return completed(capsys, monkeypatch, shell, line)

    assert {"retain", "repair", "replicate"} <= offered("ckptstore re")
    assert {"gpt"} <= offered("ckptstore ls g")
    assert "lora" in offered("ckptstore show ")
    assert not {"lora", "gpt"} & offered("ckptstore show x")
    assert "first" in offered("ckptstore ls --tag f")
    assert "val_loss" in offered("ckptstore ls gpt --sort va")
    assert "val_loss" in offered("ckptstore ls gpt --metric ")
    if shell != "bash":
        found = offered("ckptstore show gpt@")
        assert {"gpt@latest", "gpt@best:val_loss", "gpt@first", "gpt@500"} <= found


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_names_that_a_shell_would_run_are_not_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str
) -> None:
    """A metric in a store of somebody else may be called like a command substitution."""
    with ckptstore.open(tmp_path / "store", create=True) as store:
        names = ["val_loss", "val$(touch x)", "val`touch x`", "val'; touch x; '", "val *", "val\\x"]
        store.run("gpt").save([1], 1, metrics=dict.fromkeys(names, 1.0))
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "store"))
    assert completed(capsys, monkeypatch, shell, "ckptstore ls --sort val") == {"val_loss"}


def test_a_store_that_is_not_there_offers_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No error disturbs the line that is being typed."""
    monkeypatch.setenv("CKPTSTORE_URL", str(tmp_path / "nowhere"))
    assert completed(capsys, monkeypatch, "bash", "ckptstore ls g") == set()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (["show", "gpt", "@", "best", ":", "v"], ["val_loss"]),
        (["show", "gpt", "@", "fi"], ["first"]),
        (["show", "gpt", "@"], ["latest", "best:val_loss", "first", "500"]),
        (["annotate", "gpt", "@", "100", "ac"], ["acc"]),
    ],
)
@pytest.mark.short(sample=1)
def test_bash_parts_refs_and_gets_the_part_at_the_cursor(
    history: Path, tmp_path: Path, words: list[str], reply: list[str]
) -> None:
    """Bash sees ``gpt@best:v`` as five words, and replaces the last one."""
    program = tmp_path / "ckptstore"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    typed = " ".join(f"'{word}'" for word in ("ckptstore", *words))
    script = (
        f"PATH={tmp_path}:$PATH; export CKPTSTORE_URL={history}\n"
        'eval "$(_CKPTSTORE_COMPLETE=source_bash ckptstore)"\n'
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}\n"
        '_ckptstore_completion ckptstore; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
    assert done.stdout.split()[: len(reply)] == reply, done.stderr
