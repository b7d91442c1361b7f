"""Runs failed tests once more by themselves: ``pytest --second-run``, which ``make test`` gives.

A test that fails beside others and passes alone is `unsteady`: a bug of the test or of the product,
to be mended the same day. It does not fail the run, and the last lines of the run name it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Sequence
from typing import Final

import pytest

__all__ = ["SecondRun"]

_FAILED_MAX: Final = 5
"""Failed tests that get a second run; more of them fail the run at once."""


class SecondRun:
    """A plugin of pytest that works with and without xdist, and belongs into its controller.

    Parameters
    ----------
    options
        Options of the first run that choose the tier.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options
        self._failed: dict[str, None] = {}  # a set in order
        self._is_collected = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the tests that fail; xdist reports a test that ended its worker like these."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be read: no second run mends it."""
        self._is_collected &= not report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """After the summary of the first run, run what failed, and set the exit code."""
        yield
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._is_collected:
            return
        failed = list(self._failed)
        if not 0 < len(failed) <= _FAILED_MAX:
            _say(f"no second run: {len(failed)} tests failed, at most {_FAILED_MAX} may")
            return
        unsteady = [test for test in failed if self._passes_alone(test)]
        for test in unsteady:
            _say(f"unsteady: {test}")
        for test in failed:
            if test not in unsteady:
                _say(f"failed again: {test}")
        if unsteady == failed:
            session.exitstatus = pytest.ExitCode.OK

    def _passes_alone(self, test: str) -> bool:
        _say(f"\nonce more, by itself: {test}")
        command = [sys.executable, "-m", "pytest", "-q", "-n0", *self._options, test]
        return subprocess.run(command, check=False).returncode == 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
