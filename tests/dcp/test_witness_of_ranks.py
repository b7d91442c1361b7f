"""Ranks that resume are compared with the ranks that saved, one by one."""

from __future__ import annotations

from pathlib import Path

from rankkit import witnessing
from rankkit.groups import run_ranks

import ckptstore


def test_the_rank_that_forgot_is_named(tmp_path: Path) -> None:
    """All ranks report the same: exact, or the rank and what it forgot; other sizes are unknown."""
    url = str(tmp_path / "store")
    ckptstore.open(url, create=True).close()
    run_ranks(witnessing.save, 2, url)
    for ranks, forgetful, verdict, names in (
        (2, -1, "exact", ()),
        (2, 1, "differs", ("rank 1: generator",)),
        (1, -1, "unknown", ("not compared, as 2 ranks saved it and 1 go on",)),
    ):
        for report in run_ranks(witnessing.resume, ranks, url, forgetful):
            assert (report.verdict, report.names) == (verdict, names)
    with ckptstore.open(url) as store:
        told = store.resolve("r").metadata["resumed"]
    assert told == {"verdict": "differs", "steps": 0, "names": ["rank 1: generator"]}


def test_a_rank_that_fails_stops_all(tmp_path: Path) -> None:
    """No rank waits for one that has raised; the others name it and its error."""
    url = str(tmp_path / "store")
    ckptstore.open(url, create=True).close()
    victim, other = run_ranks(witnessing.fail, 2, url, 0)
    assert victim[0] == "RuntimeError: no state today"
    assert victim[1].startswith("RuntimeError: ")
    for mine, theirs in zip(victim, other, strict=True):
        assert theirs.startswith(f"RankFailedError: the witness of rank 0 failed: {mine}"[:90])
