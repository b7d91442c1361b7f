"""The short tier of the tests: ``pytest --short``, which ``make test`` runs.

The short tier covers every promise once; the whole tier is every test but those of the lab and of
``make soak``. A test that only the whole tier runs is marked ``slow``; ``short`` names the
parameters that a test has in the short tier, or says how many of them. A grid that tries every
place of a kind takes a fifth of its places there. Both choices follow from the names of the tests,
so they are the same in every run.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar
from zlib import crc32

import pytest

__all__ = ["ENVIRONMENT", "examples", "is_short", "mark_grids", "places", "sampled"]

ENVIRONMENT = "CKPTSTORE_TESTS_SHORT"
_EVERY = 5

T = TypeVar("T")


def is_short() -> bool:
    """Return True in the short tier."""
    return os.environ.get(ENVIRONMENT) == "1"


def places(count: int, name: str, *, every: int = _EVERY) -> Iterable[int]:
    """Return the places 1 to `count` of a grid; in the short tier one of `every`, and the last.

    Parameters
    ----------
    count
        Places of the grid, which must be positive.
    name
        Name of the grid; the first place follows from it.
    every
        Distance of two places in the short tier.
    """
    assert count > 0, f"the grid {name} has no places"
    if not is_short():
        return range(1, count + 1)
    first = 1 + crc32(name.encode()) % min(every, count)
    return sorted({*range(first, count + 1, every), count})


def sampled(items: Sequence[T], name: str) -> list[T]:
    """Return the items at the :func:`places` of the grid that they make."""
    return [items[place - 1] for place in places(len(items), name)]


def examples(whole: int) -> int:
    """Return the number of examples of a Hypothesis test: `whole`, or a quarter of it."""
    return max(5, whole // 4) if is_short() else whole


def mark_grids(items: Iterable[pytest.Item]) -> None:
    """Mark ``slow`` the parameters that ``short(pattern)`` and ``short(sample=N)`` leave out.

    The mark of a class or a module counts for each of its tests.
    """
    grids: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        only = item.get_closest_marker("short")
        if only is None or not parameters:
            continue
        if "sample" in only.kwargs:
            grids[test, only.kwargs["sample"]].append(item)
        elif not re.match(only.args[0], parameters):
            item.add_marker(pytest.mark.slow)
    for (_, sample), grid in grids.items():
        assert sample > 0, "a sample of nothing"
        for item in sorted(grid, key=lambda item: crc32(item.nodeid.encode()))[sample:]:
            item.add_marker(pytest.mark.slow)
