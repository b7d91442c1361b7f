"""Length and seed of the campaigns of ``make soak``, which can be run in pieces.

``CKPTSTORE_SOAK_ROUNDS`` is the number of rounds of each campaign, ``CKPTSTORE_SOAK_SEED`` the
first seed of its random numbers. Pieces of different seeds are as good as one long campaign.
"""

from __future__ import annotations

import os

__all__ = ["soak_rounds", "soak_seed"]


def soak_rounds(usual: int) -> int:
    """Return the number of rounds of a campaign: `usual`, or the environment's value."""
    return int(os.environ.get("CKPTSTORE_SOAK_ROUNDS") or usual)


def soak_seed(usual: int) -> int:
    """Return the seed of a campaign: `usual`, or the environment's value."""
    return int(os.environ.get("CKPTSTORE_SOAK_SEED") or usual)
