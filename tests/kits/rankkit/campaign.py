"""Campaign that kills a rank by SIGKILL at drawn calls, and checks the store after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import ckptstore
from rankkit import jobs
from rankkit.groups import Group, Rank

__all__ = ["Figures", "campaign"]

Options = dict[str, Any]
WORLD = 4
CALLS_LOG2 = 7.5
"""Binary logarithm of the most calls before a kill; in a folder a rank saves in 40 to 170."""
HERE = Rank(rank=0, world=1, tell=lambda _value: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts of a campaign; its end proves that no version was partial, and none lost."""

    kills: int
    versions: int
    """That are there, each loaded and compared."""
    acknowledged: int
    """Of them, by how many a rank was told that it is there."""


def round_of_kills(
    url: jobs.Url, options: Options, first: int, dice: np.random.Generator, *, undisturbed: int
) -> set[int]:
    """Let ranks save until one kills itself; return the steps that a rank saw saved.

    `undisturbed` saves come before the one in whose calls the kill may come.
    """
    victim, at = int(dice.integers(WORLD)), int(2 ** dice.uniform(0, CALLS_LOG2))
    doom = (victim, first + undisturbed, at)
    with Group(jobs.save_for_ever, WORLD, url, first, options, doom) as group:
        ends = group.finish()
        assert ends[victim] == ("gone", None)
        for rank, (how, said) in enumerate(ends):
            assert rank == victim or how == "failed", (rank, how, said)
        return {step for told in group.told for what, step in told if what == "saved"}


def campaign(url: jobs.Url, options: Options | None = None, *, rounds: int, seed: int) -> Figures:
    """Kill a rank in each of some rounds; hold after each that every version is whole."""
    dice = np.random.default_rng(seed)
    own, words = (url if isinstance(url, str) else url[0]), options or {}
    ckptstore.open(own, create=True, chunk_bytes=65536, **words).close()
    first, seen = 1, set[int]()
    for turn in range(rounds):
        # As often in the first save of an opened store as in the second, which shares with it.
        seen |= round_of_kills(url, words, first, dice, undisturbed=turn % 2)
        first = jobs.check_killed(HERE, own, sorted(seen), words) + 1
    return Figures(kills=rounds, versions=first - 1, acknowledged=len(seen))
