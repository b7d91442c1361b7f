"""How often to save: the interval that loses the least time to saves and to failures together.

With a save that takes C seconds and failures that come at random, M seconds apart on average:

- J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974),
  530-531: ``sqrt(2 C M)``.
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22
  (2006), 303-312, equation 37: ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C`` for C < 2M,
  else ``M``. Its equation 20 is the whole time that work of one second takes at an interval t, with
  R seconds to start again: ``M exp(R / M) (exp((t + C) / M) - 1) / t``.

An interval is the time of training between the end of one save and the beginning of the next. C is
the time for which training stands still.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckptstore.catalog.catalog import Catalog
from ckptstore.catalog.commits import Commit
from ckptstore.catalog.run_ops import Save
from ckptstore.errors import InvalidInputError, VersionNotFoundError
from ckptstore.model import Version

__all__ = ["Advice", "Observed", "advise", "daly", "lost_share", "observe_failures", "young"]

_RECENT = 20
"""Versions that are looked at. Source: enough for a median that one slow save does not move."""


def young(save_s: float, mtbf_s: float) -> float:
    """Return the interval after Young, in seconds.

    Raises
    ------
    InvalidInputError
        A time is not a positive number.
    """
    _check(save_s, mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the interval after Daly, in seconds.

    Raises
    ------
    InvalidInputError
        A time is not a positive number.
    """
    _check(save_s, mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - save_s


def lost_share(interval_s: float, save_s: float, mtbf_s: float, *, restart_s: float = 0.0) -> float:
    """Return the time lost to saves, repeated work and restarts, as a share of the training's own.

    0.1: training takes 1.1 times as long as without saves and failures. Infinite beyond 10^300.
    """
    _check(interval_s, save_s, mtbf_s)
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 690:
        return math.inf
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent) / interval_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the log of a run says about its failures."""

    restarts_count: int
    """How often a save came from another process than the one before it."""
    span_s: float
    """From the first save to the last, in seconds."""

    @property
    def mtbf_s(self) -> float | None:
        """Seconds between failures; None if there was none."""
        return self.span_s / self.restarts_count if self.restarts_count else None


def observe_failures(commits: Iterable[Commit], run: str) -> Observed:
    """Return how often the writer of a run changed: an upper bound of its failures.

    A restart that was planned counts too, and one before the first save does not.
    """
    saves = [
        (commit.body.at_ms, commit.body.by)
        for commit in commits
        for op in commit.ops
        if isinstance(op, Save) and op.run == run
    ]
    writers = [by for _, by in saves]
    changes = sum(a != b for a, b in pairwise(writers))
    span = (saves[-1][0] - saves[0][0]) / 1000 if saves else 0.0
    return Observed(restarts_count=changes, span_s=max(span, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often a run should save."""

    save_s: float
    """What a save takes: the median of the last versions' receipts."""
    mtbf_s: float
    young_s: float
    daly_s: float
    lost: float
    """Share of time that is lost at Daly's interval; see :func:`lost_share`."""
    interval_s: float | None
    """The median interval of the last versions; None for fewer than two."""
    interval_lost: float | None
    """Share of time that is lost at that."""
    steps: int | None
    """Daly's interval in steps of the training, at the pace of the last versions; None if there is
    no pace to be seen."""


def advise(
    catalog: Catalog,
    run: str,
    *,
    mtbf_s: float,
    save_s: float | None = None,
    restart_s: float = 0.0,
) -> Advice:
    """Return how often a run should save, from what its saves took.

    Parameters
    ----------
    mtbf_s
        Seconds between failures, of the whole training: of n machines, a machine's divided by n.
    save_s
        What a save takes, if the receipts are not to be believed (training goes on meanwhile).
    restart_s
        From a failure until the training is back where the last save was loaded.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    VersionNotFoundError
        No version of it says what its save took.
    InvalidInputError
        A time is not a positive number.
    """
    versions = list(catalog.versions(run))[-_RECENT:]
    times = [taken for version in versions if (taken := _save_seconds(version.receipt)) > 0]
    if save_s is None:
        if not times:
            msg = f"no version of run {run!r} says what its save took"
            raise VersionNotFoundError(msg, hint="give it: --save 30s")
        save_s = median(times)
    best = daly(save_s, mtbf_s)
    pairs = list(pairwise(versions))
    gaps = [_gap_s(a, b) for a, b in pairs]
    # A save's own time is no part of the interval between two.
    interval = max(median(gaps) - save_s, 0.0) if gaps else 0.0
    pace = [_gap_s(a, b) / (b.step - a.step) for a, b in pairs if b.step > a.step]
    per_step = median(pace) if pace else 0.0
    return Advice(
        save_s=save_s,
        mtbf_s=mtbf_s,
        young_s=young(save_s, mtbf_s),
        daly_s=best,
        lost=lost_share(best, save_s, mtbf_s, restart_s=restart_s),
        interval_s=interval or None,
        interval_lost=(
            lost_share(interval, save_s, mtbf_s, restart_s=restart_s) if interval else None
        ),
        steps=max(1, round(best / per_step)) if per_step > 0 else None,
    )


def _save_seconds(receipt: Mapping[str, float]) -> float:
    """Return for how many seconds training stood still; of old receipts, those of all stages."""
    for name in ("blocked_s", "durable_s"):
        if name in receipt:
            return receipt[name]
    return sum(value for name, value in receipt.items() if name.endswith("_s"))


def _gap_s(before: Version, after: Version) -> float:
    return max((after.created_at - before.created_at).total_seconds(), 0.0)


def _check(*times_s: float) -> None:
    for each in times_s:
        if not 0 < each < math.inf:
            msg = f"a time of {each} s"
            raise InvalidInputError(msg, hint="times are positive")
