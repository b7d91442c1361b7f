"""Collections beside savers and forks in processes of their own, all killed at drawn calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from soaking import soak_rounds, soak_seed


def campaign(**plan: Any) -> dict[str, Any]:  # noqa: ANN401 - as gc_driver.Plan takes them
    """Return what a campaign found."""
    printed = run_program("faultkit.gc_driver", given=json.dumps(plan), timeout_s=3600)
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_stays(tmp_path: Path) -> None:
    """6 savers, a forker, 2 collectors without grace: what was acknowledged loads, bit by bit.

    After a last collection the store holds the live bytes and no others.
    """
    needed = ["saved", "removing", "collected", "kills", "objects swept"]
    found = campaign(urls=[str(tmp_path / "store")], kills=60, seed=1, needed=needed)

    assert found["problems"] == []
    for what in needed:
        assert found["figures"].get(what, 0) > 0, found["figures"]
    assert found["versions"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_stays_after_a_thousand_kills(tmp_path: Path) -> None:
    """The long form."""
    urls = [str(tmp_path / "store")]
    found = campaign(urls=urls, kills=soak_rounds(1000), seed=soak_seed(2))

    print(found)  # noqa: T201 - the figures of a campaign
    assert found["problems"] == []
    assert found["figures"]["objects swept"] > 0
