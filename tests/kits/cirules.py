"""Rules for a run of the tests: no test is skipped unseen, and none hangs for long."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TypeVar

import pytest

__all__ = ["checked", "give_time"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

_ALLOWED: Final = "CUDA"
_TIMES_S: Final = {"lab": 600.0, "soak": 7200.0}


def checked(report: Report) -> Report:
    """Turn a skip into a failure if ``CI`` is set, unless a CUDA device is missing.

    Nobody sees skips in CI: a package that is not installed would switch its tests off.
    """
    if report.outcome == "skipped" and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        told = report.longrepr
        reason = str(told[2] if isinstance(told, tuple) else told)
        if _ALLOWED not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where only {_ALLOWED} may be missing: {reason}"
    return report


def give_time(items: Iterable[pytest.Item], default_s: float) -> None:
    """Mark the tests of the lab, and the long campaigns, that have no time limit of their own.

    Parameters
    ----------
    default_s
        Limit of all other tests; if it is longer, it counts for these too.
    """
    for item in items:
        limits_s = [limit for name, limit in _TIMES_S.items() if item.get_closest_marker(name)]
        if limits_s and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(*limits_s, default_s)))
