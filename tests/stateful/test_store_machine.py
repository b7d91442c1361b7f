"""The machine of ``store_machine``: clients that do everything there is to do to one store."""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest
from shortening import is_short
from store_machine import LONG, run


def test_clients_beside_collections() -> None:
    """Each of thousands of steps ends as the model says; a third of them in the short tier."""
    histories = 20 if is_short() else 60
    figures = run(histories, 110, same=True)

    print(sorted(figures.items()))  # noqa: T201 - shown where the test fails
    assert figures["steps"] > 33 * histories


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_clients_beside_collections_for_long() -> None:
    """At least 100,000 steps, in rounds of new histories until there are so many.

    No kind of step always fails. ``CKPTSTORE_MACHINE_STEPS`` asks for another number. What was
    done is printed as it goes, so that a run that is ended early says how far it came.
    """
    wanted = int(os.environ.get("CKPTSTORE_MACHINE_STEPS", str(LONG)))
    figures: Counter[str] = Counter()
    while figures["steps"] < wanted:
        figures += run(100, 100)
        print(f"{figures['steps']} of {wanted} steps", file=sys.__stderr__, flush=True)

    print(sorted(figures.items()))  # noqa: T201 - the figures of a campaign
    assert figures["steps"] >= wanted
    kinds = ("save", "fork", "rollback", "name", "pin", "unpin", "remove", "undelete", "age")
    for name in (*kinds, "retain", "gc", "gc with grace"):
        assert figures[f"{name}: done"] > 0, name
    assert figures["retain: as foretold"] > 0
    assert figures["records forged"] > 0
    for level in ("weights", "weights-bf16", "weights-int8", "record", "gone"):
        assert figures[f"became {level}"] > 0, level
