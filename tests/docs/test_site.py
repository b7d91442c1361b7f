"""The site of the documentation builds without a warning and has no dead link."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from docpages import ROOT, pages, read_page
from sitekit import Html, build, dead_links, foreign_requests, read_html

import ckptstore
from ckptstore.cli.main import COMMANDS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once; a warning of mkdocs fails it."""
    folder = tmp_path_factory.mktemp("site").resolve()
    done = build(folder, root=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Html]:
    """Return the pages built, by their files."""
    found = {path: read_html(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 50
    return found


@pytest.mark.slow
def test_site_has_every_page(site: Path, built: dict[Path, Html]) -> None:
    """Every page of the documentation is in the site, with its own text in the index of search."""
    missed = []
    for path in pages():
        name = path.relative_to(ROOT).with_suffix(".html")
        place = site / ("index.html" if str(name) == "README.html" else name)
        if place not in built:
            missed.append(str(name))
    assert missed == []
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    words = " ".join(entry["text"] for entry in index["docs"])
    assert "put-if-absent" in words
    assert "Unreleased" in {entry["title"] for entry in index["docs"]}  # of the changelog
    assert "ckptstore gc" in {entry["title"] for entry in index["docs"]}  # a command


@pytest.mark.slow
def test_names_and_commands_have_pages(site: Path) -> None:
    """Each public name and each command has a page, and the search leads to it alone."""
    reference = site / "docs/reference"
    table = (reference / "api.html").read_text("utf-8")
    names = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE
    )
    assert set(ckptstore.__all__) - set(ckptstore.errors.__all__) < set(names)
    for name in names:
        assert f'id="{name.lower()}"' in (reference / f"api/{name}.html").read_text("utf-8"), name
        assert f'href="api/{name}.html"' in table, name
    for name in COMMANDS:
        assert (reference / f"cli/{name}.html").is_file(), name
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"docs/reference/cli/gc.html", "docs/reference/api/Run.html"} <= places
    assert not {"docs/reference/cli.html", "docs/reference/api.html"} & places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "anchor", "told"),
    [
        ("open", "open", ("chunk_bytes: int = 4 * MIB", "InvalidUrlError", "An option is of")),
        ("open", "open", ("Parameters", "Raises", "Example", 'ckptstore.open("ckpts"')),
        ("Run", "runsave", ("step: int", ") -> Version", "UnsafeEncodingError")),
        ("Store", "storeload", ("map_location: MapLocation = None", "RankFailedError")),
        ("Store", "storeurl", ("url: str  # property", "without credentials")),
        ("Version", "version", ("Fields", "metrics: Mapping[str, float]: May contain NaN")),
        ("Encoding", "encodingparse", ("Encoding(", "parse(text: str) -> Encoding")),
        ("PutIfAbsent", "putifabsent", ("ATOMIC = 'atomic': Of any number",)),
        ("Observer", "observer", ("Observer = Callable[[SaveEvent], None]",)),
        ("load_weights", "load_weights", ("Example", "Raises")),
    ],
)
def test_page_of_a_name_has_all_of_its_docstring(
    site: Path, name: str, anchor: str, told: tuple[str, ...]
) -> None:
    """Signature with defaults, parameters, errors, fields, and the example of the module."""
    text = (site / f"docs/reference/api/{name}.html").read_text("utf-8")
    assert f'id="{anchor}"' in text
    plain = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", text)))
    assert [each for each in told if re.sub(r"\s+", " ", each) not in plain] == []


@pytest.mark.slow
def test_name_that_is_not_in_the_source_fails_the_build(tmp_path: Path) -> None:
    """A row of the reference for a name that is gone is no page without text."""
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "ckptstore", root / "ckptstore")
    reference = root / "docs/reference/api.md"
    reference.write_text(reference.read_text().replace("| `Run` |", "| `Gone` |"))
    done = build(tmp_path / "site", root=root)
    assert done.returncode != 0
    assert "the reference lists ckptstore.Gone, which the source lacks" in done.stdout + done.stderr


@pytest.mark.slow
def test_notebook_is_a_page(site: Path) -> None:
    """Its code and its tables can be read without a kernel, and the file be downloaded."""
    page = (site / "docs/notebooks/first-run.html").read_text("utf-8")
    assert "<caption>no damage: 4 versions" in page
    assert page.count("<table>") >= 4
    assert 'href="first-run.ipynb"' in page
    assert (site / "docs/notebooks/first-run.ipynb").is_file()
    assert 'href="notebooks/first-run.html"' in (site / "docs/index.html").read_text("utf-8")


@pytest.mark.slow
def test_site_has_no_dead_link(built: dict[Path, Html]) -> None:
    """Each link and picture leads to a file of the site, and to an anchor that it has."""
    assert list(dead_links(built)) == []


@pytest.mark.slow
def test_site_asks_no_other_host(built: dict[Path, Html]) -> None:
    """No page loads a script, style, font or picture from elsewhere."""
    assert {path.name: foreign_requests(page) for path, page in built.items()} == {
        path.name: [] for path in built
    }
    assert all(page.requests for page in built.values())


@pytest.mark.slow
def test_every_block_is_shown_as_code(site: Path) -> None:
    """Each fenced block is a block of the site too, without its reason for not being run."""
    shown = 0
    for path in pages():
        name = path.relative_to(ROOT).with_suffix(".html")
        text = (site / ("index.html" if str(name) == "README.html" else name)).read_text("utf-8")
        blocks = read_page(path).blocks
        # Blocks by indentation come on top.
        assert len(re.findall(r'<div class="[a-z -]*highlight"><pre>', text)) >= len(blocks), name
        assert "<p>```" not in text, name
        reasons = {f"no-run: {block.reason}" for block in blocks if block.reason}
        assert not [reason for reason in reasons if reason in text], name
        shown += len(blocks)
    assert shown > 100


@pytest.mark.slow
def test_dead_link_in_a_page_fails_the_build(tmp_path: Path) -> None:
    """A link to a missing page or heading is found, and a page outside the navigation."""
    root = tmp_path / "repository"
    root.mkdir()
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        (root / name).write_text(f"# {name}\n\n[index](docs/index.md)\n")
    (root / "docs").mkdir()
    shutil.copytree(ROOT / "docs/site", root / "docs/site")
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav, rest = text.index("nav:\n"), text.index("theme:\n")
    listed = "nav: [README.md, CHANGELOG.md, CONTRIBUTING.md, docs/index.md, docs/gone.md]\n"
    (root / "mkdocs.yml").write_text(text[:nav] + listed + text[rest:])
    (root / "docs/index.md").write_text("# Index\n\n[a](nowhere.md) [b](#no-heading) [c](odd.md)\n")
    (root / "docs/odd.md").write_text("# Odd\n")
    done = build(tmp_path / "site", root=root)
    assert done.returncode != 0
    for told in ("nowhere.md", "#no-heading", "docs/odd.md", "docs/gone.md"):
        assert told in done.stdout + done.stderr


def test_reader_of_pages_finds_faults(tmp_path: Path) -> None:
    """The checks see a dead link, a missing anchor, a missing picture and a foreign script."""
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    one.write_text(
        '<a href="two.html#there">1</a> <a href="two.html#gone">2</a> <a href="three.html">3</a>'
        '<img src="no.svg"> <script src="//cdn.example/x.js"></script> <a href="https://x.y/">4</a>'
    )
    two.write_text('<h1 id="there">Two</h1><link rel="stylesheet" href="https://x.example/a.css">')
    read = {path: read_html(path) for path in (one, two)}
    assert list(dead_links(read)) == [
        "one.html: two.html#gone",
        "one.html: three.html",
        "one.html: no.svg",
    ]
    assert foreign_requests(read[one]) == ["//cdn.example/x.js"]
    assert foreign_requests(read[two]) == ["https://x.example/a.css"]
