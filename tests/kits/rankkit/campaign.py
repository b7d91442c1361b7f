"""Campaign that kills a rank by SIGKILL during saves, again and again, and checks the store."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import ckptstore
from rankkit import jobs
from rankkit.groups import Group, Rank

__all__ = ["Figures", "campaign"]

Options = dict[str, Any]
WORLD = 4
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
    url: jobs.Url,
    options: Options,
    first: int,
    dice: np.random.Generator,
    last_s: float,
    *,
    undisturbed: int,
) -> set[int]:
    """Let ranks save until one is killed; return the steps that a rank saw saved.

    `undisturbed` saves come before the one in which the kill may come, on any machine.
    """
    with Group(jobs.save_for_ever, WORLD, url, first, options) as group:
        while not all(("begins", first + undisturbed) in told for told in group.told):
            assert group.step(300), group.ended
        victim = int(dice.integers(WORLD))
        until = time.monotonic() + dice.uniform(0.0, last_s)
        while (left := until - time.monotonic()) > 0:
            group.step(left)  # the random moment
        group.kill(victim)
        while None in group.ended:
            assert group.step(300), "the others wait for ever for a rank that is gone"
        assert group.ended[victim] == ("gone", None)
        for rank, end in enumerate(group.ended):
            assert rank == victim or (end is not None and end[0] == "failed"), (rank, end)
        return {step for told in group.told for what, step in told if what == "saved"}


def campaign(
    url: jobs.Url, options: Options | None = None, *, rounds: int, seed: int, last_s: float = 0.4
) -> Figures:
    """Kill a rank in each of some rounds; hold after each that every version is whole.

    Parameters
    ----------
    last_s
        Seconds after the first or second save of a round begins: the kill comes up to then.
    """
    dice = np.random.default_rng(seed)
    own, words = (url if isinstance(url, str) else url[0]), options or {}
    ckptstore.open(own, create=True, chunk_bytes=65536, **words).close()
    first, seen = 1, set[int]()
    for turn in range(rounds):
        # As often in the first save of an opened store as in the second, which shares with it.
        seen |= round_of_kills(url, words, first, dice, last_s, undisturbed=turn % 2)
        first = jobs.check_killed(HERE, own, sorted(seen), words) + 1
    return Figures(kills=rounds, versions=first - 1, acknowledged=len(seen))
