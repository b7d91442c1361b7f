"""``ckptstore gc``: the table, the document, the dry run, and times as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckptstore


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
    for said in (planned, first):
        assert "run ckptstore gc again 2 h later" in said.out
    assert "again" not in second.out


def test_gc_refuses_times_that_are_none(cli: Any, store_path: Path) -> None:  # noqa: ANN401
    """A number without a unit could be anything."""
    for words in (["--grace", "10"], ["--orphan-age", "soon"], ["--repack-below", "2"]):
        assert cli("gc", *words, "--store", store_path).code == 2
