"""Plants bugs one at a time in a copy of the tree, and shows which test notices each.

``python tests/planted/plant.py`` runs, for every bug of ``bugs.toml``, the test that is to notice
it. The tests have to pass without any bug first. The working tree is not touched.

Exit codes: 0, every bug was caught; 1, at least one was not; 2, the list does not fit the tree, or
a test fails without a bug; 130, interrupted.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kits"))

from anchors import AnchorError, replaced  # noqa: E402 - from the folder of kits

LIST = Path(__file__).with_name("bugs.toml")
# The tests of this list would notice every bug, by its text.
_WHOLE = ("tests", "--ignore=tests/planted")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py\b.*)$", re.MULTILINE)
_TOLD_CHARS = 200


class ListError(Exception):
    """A bug of the list does not fit the tree, or a test fails without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One bug; ``bugs.toml`` describes the fields."""

    name: str
    property: str
    file: str
    function: str
    old: str
    new: str
    test: str

    def planted(self, text: str) -> str:
        """Return the text of the file with the bug in it.

        Raises
        ------
        ListError
            The function is missing, or the old text does not occur exactly once in it.
        """
        try:
            return replaced(text, self.function, self.old, self.new)
        except AnchorError as error:
            msg = f"bug {self.name}: {self.file}: {error}"
            raise ListError(msg) from error

    def check(self, root: Path) -> None:
        """Return if the bug can be planted in a tree, and its test is there.

        Raises
        ------
        ListError
            The file, the function or the test is missing, or the old text is not there once.
        """
        if not (root / self.file).is_file():
            msg = f"bug {self.name}: there is no {self.file}"
            raise ListError(msg)
        ast.parse(self.planted((root / self.file).read_text()), self.file)
        if not _has_test(root, self.test):
            msg = f"bug {self.name}: there is no test {self.test}"
            raise ListError(msg)


def read_bugs(path: Path = LIST) -> list[Bug]:
    """Return the bugs of a list.

    Raises
    ------
    ListError
        Two bugs have one name.
    """
    bugs = [Bug(**fields) for fields in tomllib.loads(path.read_text())["bugs"]]
    names = [bug.name for bug in bugs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        msg = f"{path.name}: several bugs are called {', '.join(twice)}"
        raise ListError(msg)
    return bugs


def _has_test(root: Path, test: str) -> bool:
    """Return whether the file of a test has the class and the function that its id names."""
    file, *names = test.split("::")
    if not (root / file).is_file():
        return False
    defined = _defined(ast.parse((root / file).read_text()).body)
    classes = {name: node for name, node in defined.items() if isinstance(node, ast.ClassDef)}
    if len(names) < 2:
        return all(name in defined for name in names)
    for path in (root / "ckptstore" / "testing").glob("*.py"):  # suites that classes inherit
        found = _defined(ast.parse(path.read_text()).body)
        classes = {k: v for k, v in found.items() if isinstance(v, ast.ClassDef)} | classes
    waiting, of_class = [names[0]], set[str]()
    while waiting:  # the class, and its bases
        if (one := classes.pop(waiting.pop(), None)) is not None:
            of_class |= _defined(one.body).keys()
            waiting += [base.id for base in one.bases if isinstance(base, ast.Name)]
    return names[1] in of_class and len(names) == 2


def _defined(body: Sequence[ast.stmt]) -> Mapping[str, ast.stmt]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in body if isinstance(node, kinds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run of pytest."""

    code: int | None
    """Exit code of pytest; None if it ran past its time limit."""
    failed: str
    """The first test that failed, and why; empty if none did."""
    output: str

    @property
    def is_caught(self) -> bool:
        """Return whether a test failed, and by itself."""
        return self.code == 1 and bool(self.failed)

    def __str__(self) -> str:
        if self.code is None:
            return "hangs"
        if self.is_caught:
            return self.failed
        return "NOT CAUGHT" if self.code == 0 else f"NOT CAUGHT: pytest ended with {self.code}"


class Tree:
    """A copy of the working tree, in which bugs are planted and tests are run.

    Parameters
    ----------
    folder
        Empty; for the copy and for whatever the tests write.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            stdout=subprocess.PIPE,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (source / name).is_file() or (source / name).is_symlink():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name, follow_symlinks=False)

    def with_bug(self, bug: Bug, arguments: Sequence[str], limit_s: float) -> Outcome:
        """Run tests with one bug in the tree, which is sound again on return."""
        path = self.root / bug.file
        sound = path.read_text()
        try:
            self._write(path, bug.planted(sound))
            return self.run(arguments, limit_s)
        finally:
            self._write(path, sound)

    def run(self, arguments: Sequence[str], limit_s: float) -> Outcome:
        """Run pytest until the first failure; end it, and what it started, after `limit_s`."""
        paths = filter(None, [str(self.root), os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(self._temporary),
            "COLUMNS": "1000",  # ids of tests are not cut
        }
        output = self._temporary / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-x", "-q", *arguments], cwd=self.root,
                env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            code = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass  # told by the missing code
            finally:
                if code is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = output.read_text(errors="replace")
        found = _FAILED.search(text)
        return Outcome(code=code, failed=found[1][:_TOLD_CHARS] if found else "", output=text)

    def _write(self, path: Path, text: str) -> None:
        """Write a module; Python may take one of the same second and length for unchanged."""
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def plant(bugs: Sequence[Bug], source: Path, *, short: bool, whole: bool, limit_s: float) -> int:
    """Run the tests of each bug, print a table, and return the exit code.

    Raises
    ------
    ListError
        A bug does not fit the tree, or the tests fail without any.
    """
    for bug in bugs:
        bug.check(source)
    options = ["-m", "not lab and not soak", *(["--short"] if short else [])]
    began = time.monotonic()
    missed = 0
    with TemporaryDirectory(prefix="planted-") as folder:
        tree = Tree(source, Path(folder))
        tests = _WHOLE if whole else tuple(dict.fromkeys(bug.test for bug in bugs))
        sound = tree.run([*options, *tests], limit_s * len(tests))
        if sound.code != 0:
            msg = f"without any bug: {sound.failed or sound}\n{sound.output[-4000:]}"
            raise ListError(msg)
        _say(f"without any bug: the tests of {len(bugs)} bugs pass ({_since(began)})")
        for bug in bugs:
            start = time.monotonic()
            found = tree.with_bug(bug, [*options, *(_WHOLE if whole else [bug.test])], limit_s)
            _say(f"{bug.name:28}{bug.property}\n{_since(start):>26}  {found}")
            missed += not found.is_caught
            if found.code not in {0, 1, None}:
                _say(found.output[-4000:])
    _say(f"{len(bugs)} bugs, {missed} of them not caught ({_since(began)})")
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="this bug; may be repeated")
    parser.add_argument("--all", action="store_true", help="the long tier of the tests too")
    parser.add_argument("--whole", action="store_true", help="run all tests, not the named one")
    parser.add_argument("--limit", metavar="S", type=float, help="seconds that one bug may take")
    parser.add_argument("--list", action="store_true", help="print the bugs, and plant none")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    limit_s = given.limit or (3600.0 if given.whole else 300.0)
    try:
        bugs = read_bugs()
        unknown = set(given.only or ()) - {bug.name for bug in bugs}
        if unknown:
            msg = f"no bug is called {', '.join(sorted(unknown))}; --list prints the names"
            raise ListError(msg)
        bugs = [bug for bug in bugs if not given.only or bug.name in given.only]
        if given.list:
            for bug in bugs:
                place = f"{bug.file}: {bug.function}: {bug.test}"
                _say(f"{bug.name:28}{bug.property}\n{'':28}{place}")
            return 0
        return plant(bugs, ROOT, short=not given.all, whole=given.whole, limit_s=limit_s)
    except ListError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
