"""The rules of a run: skips that CI accepts, time limits, and the second run of what failed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import cirules
import pytest
from labkit import processor


def _skipped(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="test_x.py::test_x", location=("test_x.py", 1, "test_x"), keywords={},
        outcome="skipped", longrepr=("test_x.py", 1, f"Skipped: {reason}"), when="setup",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "ci", "outcome"),
    [
        ("could not import 'distributed'", "true", "failed"),
        ("could not import 'distributed'", "", "skipped"),
        ("needs a CUDA device", "true", "skipped"),
        ("the lab installs smbprotocol", "true", "skipped"),
        (processor.told(lambda _: errno.EFAULT), "true", "skipped"),
        ("the lab does not start", "true", "failed"),
        ("this processor cannot", "1", "failed"),
    ],
)
def test_skips(reason: str, ci: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI is set, an allowed reason excuses a test or a whole file, no other does."""
    monkeypatch.setenv("CI", ci)
    report = cirules.checked(_skipped(reason))
    assert report.outcome == outcome
    assert reason in str(report.longrepr)
    told = ("test_x.py", 1, f"Skipped: {reason}")
    file = cirules.checked(pytest.CollectReport("test_x.py", "skipped", told, []))
    assert file.outcome == outcome


@pytest.mark.parametrize(
    ("get", "put", "reason"),
    [
        (0, 0, ""),
        (0, errno.EFAULT, "cannot run on this processor (PTRACE_SETREGSET: Bad address)"),
        (0, errno.EINVAL, "cannot run on this processor (PTRACE_SETREGSET: Invalid argument)"),
        (errno.EINVAL, 0, "cannot run on this processor (PTRACE_GETREGSET: Invalid argument)"),
        (0, errno.ESRCH, ""),
        (errno.EPERM, errno.EPERM, ""),
    ],
)
def test_processors_that_run_no_host(get: int, put: int, reason: str) -> None:
    """Hosts are skipped where the extended registers cannot be set; other errors let them start."""
    said = processor.told({"PTRACE_GETREGSET": get, "PTRACE_SETREGSET": put}.__getitem__)
    assert said == (reason and f"the lab's hosts: user-mode Linux {reason}")


def test_what_is_no_skip_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that are expected are reported as skipped, and are none."""
    monkeypatch.setenv("CI", "true")
    report = _skipped("a known fault")
    report.wasxfail = "a known fault"
    assert cirules.checked(report).outcome == "skipped"


@pytest.mark.parametrize(
    ("marks", "default_s", "expected"),
    [
        (["lab"], 120.0, 600.0), (["soak"], 120.0, 7200.0), (["lab", "soak"], 120.0, 7200.0),
        (["lab"], 7200.0, 7200.0), ([], 120.0, 120.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("slowness", [1.0, 3.5])
def test_time_limits(
    request: pytest.FixtureRequest,
    marks: list[str],
    default_s: float,
    expected: float,
    slowness: float,
) -> None:
    """A limit is the test's own or that of its tier, times the slowness of the machine."""
    for own in (None, 30.0):
        item = pytest.Function.from_parent(
            request.node.parent, name="test_time_limits", callobj=lambda: None
        )
        item.own_markers = [getattr(pytest.mark, name).mark for name in marks]
        if own is not None:
            item.add_marker(pytest.mark.timeout(own))
        cirules.give_time([item], default_s, slowness)
        found = item.get_closest_marker("timeout")
        assert found is not None
        assert found.args == ((expected if own is None else own) * slowness,)


def test_slowness_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a run starts take the figure of the first one; no machine counts as faster."""
    monkeypatch.delenv("CKPTSTORE_TESTS_SLOWNESS", raising=False)
    measured = cirules.slowness(workers=3)
    assert measured >= round(1.0 + 2 / (os.cpu_count() or 1), 2)
    assert float(os.environ["CKPTSTORE_TESTS_SLOWNESS"]) == measured

    monkeypatch.setenv("CKPTSTORE_TESTS_SLOWNESS", "2.5")
    assert cirules.slowness() == 2.5


def test_others_are_ended_soon(request: pytest.FixtureRequest) -> None:
    """A test that hangs costs two minutes, not ten; a long form may be given more by an option."""
    assert float(request.config.getini("timeout")) >= 120.0
    text = (request.config.rootpath / "pyproject.toml").read_text()
    assert "\ntimeout = 120\n" in text


_STEADY = "def test_steady(): pass"
_BROKEN = "def test_broken(): raise AssertionError"
# Fails in the first process that runs it, and passes in the second.
_UNSTEADY = """
import os, pathlib
def test_unsteady{0}():
    seen = pathlib.Path(__file__).with_suffix(".{0}")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
_KILLED = _UNSTEADY.replace("assert was_seen", "was_seen or os._exit(3)")


@pytest.mark.short("killed|broken|many|unreadable")
@pytest.mark.parametrize(
    ("tests", "options", "code", "lines"),
    [
        ([_STEADY, _UNSTEADY.format(1)], ["-n2"], 0, ["unsteady: test_them.py::test_unsteady1"]),
        ([_STEADY, _KILLED.format(2)], ["-n2"], 0, ["unsteady: test_them.py::test_unsteady2"]),
        (
            [_UNSTEADY.format(1), _BROKEN],
            [],
            1,
            ["unsteady: test_them.py::test_unsteady1", "failed again: test_them.py::test_broken"],
        ),
        (
            [_UNSTEADY.format(i) for i in range(6)],
            [],
            1,
            ["no second run: 6 tests failed, at most 5 may"],
        ),
        ([_STEADY, "import missing_module"], [], 2, []),
    ],
    ids=["xdist", "killed", "broken", "many", "unreadable"],
)
def test_a_failed_test_runs_once_more(
    tests: list[str], options: list[str], code: int, lines: list[str], tmp_path: Path
) -> None:
    """The run passes if at most five tests failed and each passes alone; its last lines name them.

    A file that cannot be read is no test that failed, and stays an error.
    """
    (tmp_path / "conftest.py").write_text(
        "from second_run import SecondRun\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--second-run', action='store_true')\n"
        "def pytest_configure(config):\n"
        "    if config.getoption('--second-run') and not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(SecondRun())\n"
    )
    (tmp_path / "test_them.py").write_text("\n".join(tests))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--second-run", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stdout + found.stderr
    assert found.stdout.splitlines()[len(found.stdout.splitlines()) - len(lines) :] == lines
