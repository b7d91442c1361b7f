"""The rules of a run of the tests: what CI may skip, and how long a test may take."""

from __future__ import annotations

import cirules
import pytest


def _skipped(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="test_x.py::test_x",
        location=("test_x.py", 1, "test_x"),
        keywords={},
        outcome="skipped",
        longrepr=("test_x.py", 1, f"Skipped: {reason}"),
        when="setup",
    )


@pytest.mark.parametrize(
    ("reason", "ci", "outcome"),
    [
        ("could not import 'distributed'", "true", "failed"),
        ("could not import 'distributed'", "", "skipped"),
        ("needs a CUDA device", "true", "skipped"),
        ("this processor cannot", "1", "failed"),
    ],
)
def test_skips(reason: str, ci: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI is set, only a device that is not there excuses a test or a whole file."""
    monkeypatch.setenv("CI", ci)
    report = cirules.checked(_skipped(reason))
    assert report.outcome == outcome
    assert reason in str(report.longrepr)
    told = ("test_x.py", 1, f"Skipped: {reason}")
    file = cirules.checked(pytest.CollectReport("test_x.py", "skipped", told, []))
    assert file.outcome == outcome


def test_what_is_no_skip_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that are expected are reported as skipped, and are none."""
    monkeypatch.setenv("CI", "true")
    report = _skipped("a known fault")
    report.wasxfail = "a known fault"
    assert cirules.checked(report).outcome == "skipped"


@pytest.mark.parametrize(
    ("marks", "default_s", "expected"),
    [
        (["lab"], 120.0, 600.0),
        (["soak"], 120.0, 7200.0),
        (["lab", "soak"], 120.0, 7200.0),
        (["lab"], 7200.0, 7200.0),
        ([], 120.0, None),
    ],
)
def test_time_limits(
    request: pytest.FixtureRequest, marks: list[str], default_s: float, expected: float | None
) -> None:
    """The lab and the long campaigns get their time by their markers; a mark of one's own stays."""
    for own in (None, 30.0):
        item = pytest.Function.from_parent(
            request.node.parent, name="test_time_limits", callobj=lambda: None
        )
        item.own_markers = [getattr(pytest.mark, name).mark for name in marks]
        if own is not None:
            item.add_marker(pytest.mark.timeout(own))
        cirules.give_time([item], default_s)
        found = item.get_closest_marker("timeout")
        wanted = expected if own is None else own
        assert (None if found is None else found.args[0]) == wanted


def test_others_are_ended_soon(request: pytest.FixtureRequest) -> None:
    """A test that hangs costs two minutes, not ten; a long form may be given more by an option."""
    assert float(request.config.getini("timeout")) >= 120.0
    text = (request.config.rootpath / "pyproject.toml").read_text()
    assert "\ntimeout = 120\n" in text
