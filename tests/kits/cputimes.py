"""Reports the tests of the short tier that take more processor time than they should.

The figures are of the test and of the processes that it started and waited for. No test fails by
them: on a busy machine a second of work takes longer.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

__all__ = ["CpuTimes"]

_LIMIT_S = 1.0
_PROPERTY = "cpu_s"


def _spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """A plugin of pytest that works with and without xdist.

    Parameters
    ----------
    path
        File that gets a line ``seconds<TAB>test`` for every test, or None.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._began = 0.0
        self._spent: dict[str, float] = {}
        self._slow: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Record the time before the first fixture of a test."""
        self._began = _spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the time to the last report of a test, from a worker of xdist too."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_PROPERTY, _spent() - self._began))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the times."""
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self._spent[report.nodeid] = float(str(value))
                if "slow" in report.keywords:
                    self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the tests that should be marked ``slow``, and write the file if one was named."""
        ordered = sorted(self._spent.items(), key=lambda item: -item[1])
        if self._path is not None:
            with open(self._path, "w", encoding="utf-8") as out:  # noqa: PTH123 - a user's path
                out.writelines(f"{spent:.3f}\t{name}\n" for name, spent in ordered)
        late = [(name, s) for name, s in ordered if s > _LIMIT_S and name not in self._slow]
        if not late:
            return
        terminalreporter.section(f"over {_LIMIT_S:g} CPU s and not slow: {len(late)}")
        for name, spent in late[:20]:
            terminalreporter.line(f"{spent:6.1f} {name}")
