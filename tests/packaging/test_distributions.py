"""What is built and shipped: the sdist, the wheel made from it, and the wheel alone."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from distkit import build_sdist, build_wheel, call
from docpages import ROOT
from packaging.metadata import Metadata

import ckptstore

pytestmark = pytest.mark.timeout(600)


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
    """Return an sdist of the repository."""
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built from the sdist."""
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


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
        "mkdocs.yml",
        "setup.py",
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
    others = ("py.typed", "guesses.toml", "maintenance/reports/store_page.html")
    page = (f"pages/page.{suffix}" for suffix in ("html", "js", "css"))
    data = {f"ckptstore/{name}" for name in (*others, *page)}
    assert inside == _modules() | data
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
assert run(["report", "page.html", "--store", "ckpts"]) == 0
"""
    call(code, tmp_path)


@pytest.mark.slow
def test_a_package_index_takes_the_metadata(sdist: Path, wheel: Path) -> None:
    """Both files have the same valid metadata, with the version and its addresses."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(archive.read(name))
    with tarfile.open(sdist) as source:
        (info,) = (each for each in source.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", each))
        stream = source.extractfile(info)
        assert stream is not None
        assert bytes(Metadata.from_email(stream.read()).as_rfc822()) == bytes(found.as_rfc822())
    assert str(found.version) == ckptstore.__version__
    assert found.description_content_type == "text/markdown"
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(found.project_urls or {})
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    titles = re.findall(r"^## (.+)$", changes, re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert titles[1].startswith(f"{ckptstore.__version__} - ")


@pytest.mark.slow
def test_links_of_the_description_leave_the_index(wheel: Path) -> None:
    """Each link and picture of the README is an address there, and those of files are of files."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(archive.read(name))
    urls = found.project_urls or {}
    here = re.compile(rf"{re.escape(urls['Repository'])}/(blob|raw)/v{found.version}/([^#]+)")
    links = re.findall(r"\]\(([^)]+)\)", found.description or "")
    assert len(links) > 30
    assert [link for link in links if not link.startswith("https://")] == []
    paths = [match[2] for link in links if (match := here.match(link))]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert any(path.endswith(".svg") for path in paths)
