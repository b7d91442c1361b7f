"""The list of planted bugs fits the tree, and the script that plants them tells the truth."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
SOUND = "def double(number):\n    return 2 * number\n"
TESTS = """
def test_double():
    from double import double

    assert double(2) == 4

class Suite:
    def test_inherited(self):
        pass

class TestOne(Suite):
    pass
"""
SHORT = "def pytest_addoption(parser):\n    parser.addoption('--short', action='store_true')\n"


@cache
def plant() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("plant", HERE / "plant.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["plant"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bug(**fields: str) -> Any:  # noqa: ANN401 - a class of the script
    """Return a bug of the tree that :func:`tree` makes: 2 becomes 3."""
    usual = {"name": "three", "property": "It is twice.", "file": "double.py"}
    usual |= {"function": "double", "old": "2 *", "new": "3 *"}
    test = "tests/test_double.py::test_double"
    return plant().Bug(**{**usual, "test": test, **fields})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tree of one module and its tests, which uses no plugin of pytest."""
    files = {"double.py": SOUND, "tests/test_double.py": TESTS, "conftest.py": SHORT}
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def test_every_bug_can_be_planted_and_its_test_is_there() -> None:
    """The old text occurs once in its function, the new file parses, and the test is defined."""
    bugs = plant().read_bugs()
    assert len(bugs) >= 20
    for one in bugs:
        one.check(plant().ROOT)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"old": "number"}, "bug three: double.py: its old text occurs 2 times in double"),
        ({"old": "4 *"}, "bug three: double.py: its old text occurs 0 times in double"),
        ({"function": "halve"}, "bug three: double.py: there is no halve"),
        ({"file": "gone.py"}, "bug three: there is no gone.py"),
        ({"test": "gone.py::test_double"}, "bug three: there is no test gone.py"),
        ({"test": "tests/test_double.py::test_gone"}, "bug three: there is no test"),
        ({"test": "tests/test_double.py::TestOne::test_double"}, "bug three: there is no test"),
    ],
    ids=["twice", "nowhere", "function", "file", "file of the test", "test", "method"],
)
def test_a_bug_that_does_not_fit_is_named(tree: Path, wrong: dict[str, str], said: str) -> None:
    """A list that fell behind the tree says which bug and which file."""
    with pytest.raises(plant().ListError, match=said):
        bug(**wrong).check(tree)
    bug(test="tests/test_double.py::TestOne::test_inherited").check(tree)


@pytest.mark.slow
def test_bugs_are_told_apart(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug is caught or not, and the exit code tells; tests that fail anyway catch nothing."""

    def run(one: object, *, whole: bool = False) -> tuple[int, str]:
        code = plant().plant([one], tree, short=True, whole=whole, limit_s=60.0)
        return code, capsys.readouterr().out

    code, told = run(bug(), whole=True)
    assert (code, "1 bugs, 0 of them not caught" in told) == (0, True)
    assert "tests/test_double.py::test_double - assert 6 == 4\n" in told
    code, told = run(bug(new="0 + 2 *"))
    assert (code, "NOT CAUGHT\n" in told) == (1, True)
    assert (tree / "double.py").read_text() == SOUND

    (tree / "tests/test_double.py").write_text("def test_double():\n    assert 0\n")
    with pytest.raises(
        plant().ListError, match=r"without any bug: tests/test_double\.py::test_double"
    ):
        run(bug())


def test_a_bug_that_hangs_is_ended(tree: Path) -> None:
    """After its time a test is killed, and that is no catch."""
    (tree.parent / "work").mkdir()
    copy = plant().Tree(tree, tree.parent / "work")
    waits = bug(old="return", new="import signal; signal.pause(); return")
    outcome = copy.with_bug(waits, [waits.test], 1.0)
    assert (str(outcome), outcome.is_caught) == ("hangs", False)
    assert (copy.root / "double.py").read_text() == SOUND
