"""How long the campaigns of ``make soak`` are, and with which chance; in pieces where asked for.

``CKPTSTORE_SOAK_ROUNDS`` is the number of rounds of each campaign, ``CKPTSTORE_SOAK_SEED`` what its
chance begins with. Pieces of different seeds are as good as one long campaign.
"""

from __future__ import annotations

import os

__all__ = ["soak_rounds", "soak_seed"]


def soak_rounds(usual: int) -> int:
    """Return how many rounds a campaign has: `usual`, or what the environment says."""
    return int(os.environ.get("CKPTSTORE_SOAK_ROUNDS") or usual)


def soak_seed(usual: int) -> int:
    """Return the seed of a campaign: `usual`, or what the environment says."""
    return int(os.environ.get("CKPTSTORE_SOAK_SEED") or usual)
