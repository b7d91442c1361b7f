"""The sdist and the wheel, built as ``python -m build`` does, and environments to try them in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from docpages import ROOT

__all__ = ["build_sdist", "build_wheel", "call", "make_environment"]

SHIPPED = ("ckptstore", "backends", "tests", "benchmarks", "docs")


def call(code: str, folder: Path) -> None:
    """Run `code` in a fresh interpreter in a folder."""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def build_sdist(folder: Path) -> Path:
    """Return an sdist, built from a copy: a build leaves folders that would change later ones."""
    copy = folder / "source"
    copy.mkdir()
    for name in SHIPPED:
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    call("from setuptools import build_meta; build_meta.build_sdist('dist')", copy)
    (built,) = (copy / "dist").glob("ckptstore-*.tar.gz")
    return built


def build_wheel(sdist: Path, folder: Path) -> Path:
    """Return a wheel that was built from an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    call("from setuptools import build_meta; build_meta.build_wheel('dist')", source)
    (built,) = (source / "dist").glob("ckptstore-*.whl")
    return built


def make_environment(folder: Path) -> None:
    """Lend an environment all packages of this one, except ckptstore, without copying them."""
    lent = folder / "lent"
    lent.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "ckptstore" not in path.name and path.suffix != ".pth":
            (lent / path.name).symlink_to(path)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in site.glob("setuptools*"):  # of venv, before Python 3.12, and too old for torch
        shutil.rmtree(path)
    (site / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
