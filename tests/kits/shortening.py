"""The short tier of the tests: ``pytest --short``, which ``make test`` runs.

The short tier covers every promise once; the whole one is every test but those of the lab and of
``make soak``. A test of the whole tier alone bears ``slow``. A grid that tries every place of a
kind takes a fifth of its places in the short tier; which fifth follows from the name of the test,
so it is the same in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import pytest

__all__ = ["ENVIRONMENT", "is_short", "places", "sampled"]

ENVIRONMENT = "CKPTSTORE_TESTS_SHORT"
_EVERY = 5


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


def sampled(cases: Sequence[Any], keep: int, *, seed: int = 1) -> list[Any]:
    """Return parameters of which `keep` belong to the short tier; the others are ``slow``.

    Parameters
    ----------
    cases
        Values for ``pytest.mark.parametrize``.
    keep
        How many are in the short tier, drawn with a fixed seed.
    seed
        Another seed draws others.
    """
    drawn = sorted(range(len(cases)), key=lambda index: crc32(f"{seed}/{index}".encode()))
    kept = set(drawn[:keep])
    slow = pytest.mark.slow
    return [
        case if index in kept else pytest.param(case, marks=slow)
        for index, case in enumerate(cases)
    ]
