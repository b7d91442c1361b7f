"""A rank is killed by SIGKILL in the middle of saves: a version is there whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from rankkit.campaign import campaign
from shortening import is_short
from soaking import soak_rounds, soak_seed


@pytest.mark.timeout(600)
def test_a_killed_rank_leaves_no_half_version(tmp_path: Path) -> None:
    """After each of a few kills all versions load bit-identical, and none that was seen is lost."""
    assert campaign(str(tmp_path / "store"), rounds=2 if is_short() else 5, seed=7).acknowledged > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_killed_ranks(tmp_path: Path) -> None:
    """The long form: fifty kills at drawn calls, of any rank, the coordinator too."""
    rounds = soak_rounds(50)
    figures = campaign(str(tmp_path / "store"), rounds=rounds, seed=soak_seed(2026))

    print(figures)  # noqa: T201 - for docs/reference/campaigns.md
    assert figures.acknowledged > rounds // 5
