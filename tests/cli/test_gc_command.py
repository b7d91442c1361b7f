"""gc: the table, the document, times as people write them; commands say what happens next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress as Bars

import ckptstore
from ckptstore.cli.main import run
from ckptstore.cli.output import _Stages
from ckptstore.events import Progress
from tests.cli.conftest import Cli


def tally(kinds: dict[str, Any]) -> int:
    """Return how many objects are counted."""
    return sum(kind["count"] for kind in kinds.values())


def test_gc_frees_what_was_removed(cli: Any, store_path: Path) -> None:  # noqa: ANN401
    """The dry run says it, the run does it, and a second run finds nothing."""
    assert cli("rm", "gpt@100", "--force", "--store", store_path).code == 0

    words = ["gc", "--grace", "0", "--no-repack", "--store", store_path]
    planned = cli(*words, "--dry-run", "--json").document
    table = cli(*words, "--dry-run")
    done = cli(*words, "--json").document
    again = cli(*words, "--json").document

    assert planned["dry_run"]
    assert tally(planned["swept"]) == tally(done["condemned"]) >= 1
    assert "would be condemned" in table.out
    assert [row[0] for row in table.rows[:3]] == ["OBJECTS", "packs", "manifests"]
    assert tally(again["condemned"]) == tally(again["swept"]) == 0
    with ckptstore.open(store_path) as store:
        assert store.verify().ok


def test_gc_waits_for_the_grace(cli: Any, store_path: Path) -> None:  # noqa: ANN401
    """What is condemned stays for an hour unless it is said otherwise; it is shown as later."""
    assert cli("rm", "gpt@100", "--force", "--store", store_path).code == 0

    done = cli("gc", "--no-repack", "--store", store_path, "--json").document

    assert tally(done["condemned"]) == tally(done["reclaimable_later"]) >= 1
    assert tally(done["swept"]) == tally(done["reclaimable_now"]) == 0
    assert 3500 < done["again_s"] <= 3600


def test_gc_says_when_to_come_again(cli: Any, store_path: Path) -> None:  # noqa: ANN401
    """Two runs free what was deleted: rm, the dry run and the run say so; the last has no more."""
    removed = cli("rm", "gpt@100", "--force", "--store", store_path)
    planned = cli("gc", "--dry-run", "--grace", "2h", "--store", store_path)
    first = cli("gc", "--grace", "2h", "--no-repack", "--store", store_path)
    second = cli("gc", "--grace", "0", "--store", store_path)

    assert "one 60 min later (--grace) deletes" in removed.out + removed.err
    assert "nothing was changed: ckptstore gc without --dry-run does this" in planned.out
    assert "run ckptstore gc again 2 h later: it deletes" in planned.out
    when = r"run ckptstore gc again 2 h later, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d or"
    assert re.search(when, first.out)
    assert "again" not in second.out
    assert "nothing is left for a second run" in second.out


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
        (["publish"], "the same command again continues"),
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
