"""Commands say what happens next, and when; progress says how fast it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.progress import Progress as Bars

from ckptstore.cli.main import run
from ckptstore.cli.output import _Stages
from ckptstore.events import Progress
from tests.cli.conftest import Cli


def test_gc_says_when_to_run_it_again(cli: Cli, store_path: Path) -> None:
    """A dry run changes nothing and says so; a run names the time of the next, the last none."""
    cli("rm", "gpt@200", "gpt@300", "-s", store_path)
    dry = cli("gc", "--dry-run", "-s", store_path).out
    assert "nothing was changed: ckptstore gc without --dry-run does this" in dry
    assert "run ckptstore gc again 1 h later: it deletes" in dry.replace("60 min", "1 h")
    first = cli("gc", "--grace", "2h", "-s", store_path).out
    assert re.search(
        r"run ckptstore gc again 2 h later, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d or", first
    )
    last = cli("gc", "--grace", "0", "-s", store_path).out
    assert "nothing is left for a second run" in last


def test_retain_says_what_frees_the_space(cli: Cli, store_path: Path) -> None:
    """A preview names --apply; afterwards gc frees the space, and undelete works until then."""
    rules = ("retain", "gpt", "--full", "last 2", "-s", store_path)
    assert "--apply does it" in cli(*rules).err
    done = cli(*rules, "--apply").err
    assert "one run condemns" in done
    assert "until the first, ckptstore undelete restores them" in done
    assert "nothing for ckptstore gc to free" in cli(*rules, "--apply").err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["verify"], "with --resume FILE it keeps its progress"),
        (["gc"], "the same command again continues"),
        (["ls"], "nothing was changed"),
        (["export", "gpt", "x.safetensors"], "no file appeared"),
    ],
)
def test_after_ctrl_c_one_line_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store_path: Path,
    words: list[str],
    hint: str,
) -> None:
    """The error is one line, and the hint another; the exit code is that of Ctrl-C."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptstore.repo.Repo.refresh", interrupted)
    assert run([*words, "-s", str(store_path)]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: interrupted"
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]
    assert len(lines) == 2


def test_progress_has_a_rate() -> None:
    """Bytes a second of the last steps stand behind the amount; other units have none."""
    now = [0.0]
    bars = Bars(get_time=lambda: now[0], disable=True)
    stages = _Stages(bars)
    for second in range(4):
        now[0] = float(second)
        stages(Progress(stage="read", done=second << 20, total=10 << 20))
        stages(Progress(stage="list", done=second, total=10, unit="objects"))
    read, listed = (task.fields["amount"] for task in bars.tasks)
    assert read == "3.00 MiB of 10.0 MiB, 1.00 MiB/s"
    assert listed == "3 of 10 objects"
