"""Rules for a run of the tests: no test is skipped unseen, and none hangs for long."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import Final, TypeVar

import pytest

__all__ = ["checked", "give_time", "slowness"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

_ALLOWED: Final = {
    "CUDA": "a GPU, which few machines have",
    "the lab installs": "a server or client that only the lab installs",
    "user-mode Linux cannot run on this processor": "a processor that runs the lab's small hosts",
}
"""Words in the reasons of the skips that CI accepts, and what is missing then."""
_SLOWNESS: Final = "CKPTSTORE_TESTS_SLOWNESS"
_WORK: Final = 20_000_000
_WORK_S: Final = 1.0
"""Seconds that the measured loop takes on an idle machine with 3 GHz."""
_TIMES_S: Final = {"lab": 600.0, "soak": 7200.0}


def checked(report: Report) -> Report:
    """Turn a skip into a failure if ``CI`` is set, unless its reason is an allowed one.

    Nobody sees skips in CI: a package that is not installed would switch its tests off.
    """
    if report.outcome == "skipped" and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        told = report.longrepr
        reason = str(told[2] if isinstance(told, tuple) else told)
        if not any(re.search(rf"\b{word}\b", reason) for word in _ALLOWED):
            report.outcome = "failed"
            allowed = "; ".join(_ALLOWED.values())
            report.longrepr = f"skipped in CI, where only this may be missing: {allowed}: {reason}"
    return report


def give_time(items: Iterable[pytest.Item], default_s: float, slowness: float = 1.0) -> None:
    """Mark the tests with their time limits: 10 minutes in the lab, 2 hours in the long campaigns.

    Parameters
    ----------
    default_s
        Limit of all other tests; if it is longer, it counts for these too.
    slowness
        Factor of every limit, those of the tests' own marks too.
    """
    for item in items:
        own = item.get_closest_marker("timeout")
        limits_s = [limit for name, limit in _TIMES_S.items() if item.get_closest_marker(name)]
        limit_s = own.args[0] if own is not None else max([default_s, *limits_s])
        item.add_marker(pytest.mark.timeout(limit_s * slowness), append=False)


def slowness(workers: int = 1) -> float:
    """Return how many times slower this machine is than an idle one with 3 GHz, at least 1.

    The first process of a run measures it, before the others come, and tells them by the
    environment.

    Parameters
    ----------
    workers
        Processes that will test at once: each takes time from the others.
    """
    known = os.environ.get(_SLOWNESS)
    if known is None:
        began = time.monotonic()
        sum(number * number for number in range(_WORK))
        alone = max(1.0, (time.monotonic() - began) / _WORK_S)
        beside = (workers - 1) / (os.cpu_count() or 1)
        known = os.environ[_SLOWNESS] = f"{alone + beside:.2f}"
    return float(known)
