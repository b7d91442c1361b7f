"""What is built and shipped: the sdist, the wheel made from it, and the wheel alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("ckptstore", "backends", "tests", "benchmarks", "docs")


def _call(code: str, folder: Path) -> None:
    """Run `code` in a fresh interpreter that sees no environment of ours."""
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, timeout=300
    )


def _modules() -> set[str]:
    """Return the path in a wheel of every module of the two source folders."""
    found = {
        f"ckptstore/{path.relative_to(ROOT / 'ckptstore')}"
        for path in (ROOT / "ckptstore").rglob("*.py")
        if (ROOT / "ckptstore" / "backends") not in path.parents
    }
    return found | {f"ckptstore/backends/{path.name}" for path in (ROOT / "backends").glob("*.py")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an sdist, built in a copy: building leaves folders that would change later builds."""
    copy = tmp_path_factory.mktemp("sdist") / "source"
    copy.mkdir()
    for folder in SHIPPED:
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    _call("from setuptools import build_meta; build_meta.build_sdist('dist')", copy)
    (built,) = (copy / "dist").glob("ckptstore-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built from the sdist, as `python -m build` does it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    _call("from setuptools import build_meta; build_meta.build_wheel('dist')", source)
    (built,) = (source / "dist").glob("ckptstore-*.whl")
    return built


@pytest.mark.slow
def test_sdist_holds_everything_once(sdist: Path) -> None:
    """Sources, tests and documentation are in it, the backends once and not as a link."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = [member.name.partition("/")[2] for member in members]
    assert len(names) == len(set(names))
    assert not [member.name for member in members if member.issym() or member.islnk()]
    for wanted in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "constraints-dev.txt",
        "backends/base.py",
        "ckptstore/py.typed",
        "tests/conftest.py",
        "docs/index.md",
    ):
        assert wanted in names, f"{wanted} is missing from the sdist"


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module is in it under its import name, with the marker of types and the license."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == _modules() | {"ckptstore/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, it saves and loads, and its command answers."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")  # noqa: S202 - we built it
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import ckptstore, ckptstore.backends.registry as registry
assert ckptstore.__file__.startswith({str(tmp_path)!r}), ckptstore.__file__
assert registry.__file__.startswith({str(tmp_path)!r}), registry.__file__
with ckptstore.open("ckpts", create=True) as store:
    run = store.run("small")
    run.save({{"step": 7}}, step=7)
    assert run.load("latest") == {{"step": 7}}
from ckptstore.cli.main import run
assert run(["ls", "--store", "ckpts"]) == 0
"""
    _call(code, tmp_path)
