"""The site of the documentation in a real browser: light, dark, narrow, and without a network."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import Browser
from docpages import ROOT
from sitekit import build
from webserver import serving

pytestmark = pytest.mark.lab

WIDE, PHONE = (1280, 900), (390, 844)
LOOKS = {"light": (WIDE, False), "dark": (WIDE, True), "phone": (PHONE, False)}
PAGES = {
    "index.html": "stores training checkpoints", "docs/index.html": "How to",
    "docs/quickstart.html": "In ten minutes you create a store",
    "docs/cheat-sheet.html": "Cheat sheet", "docs/howto/coming-from.html": "torch.save",
    "docs/concepts/pictures.html": "Pictures", "docs/concepts/cost-on-s3.html": "requests",
    "docs/reference/cli.html": "ckptstore gc", "docs/reference/api.html": "ckptstore.open",
    "CHANGELOG.html": "Unreleased",
}  # fmt: skip
"""Main pages, each with a text that a reader sees on it."""
SEARCH = """new Promise((resolve, reject) => {
  const input = document.querySelector('.md-search__input')
  const found = document.querySelector('.md-search-result__list')
  input.focus(); input.value = 'put-if-absent'
  input.dispatchEvent(new KeyboardEvent('keyup', { key: 't' }))
  input.dispatchEvent(new InputEvent('input'))
  const look = () => { if (found.children.length) resolve(found.innerText) }
  new MutationObserver(look).observe(found, { childList: true })
  look()
  setTimeout(() => reject(new Error('the search found nothing')), 60000)
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder, root=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """Serve the site on loopback, and return its address."""
    with serving(partial(_Quiet, directory=str(site))) as address:
        yield address


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of a request."""


@pytest.mark.parametrize("look", LOOKS)
def test_pages_in_a_browser(served: str, chromium: Browser, pictures: Path, look: str) -> None:
    """Main pages show their text and all pictures, fit the window, and ask no other host."""
    (width, height), dark = LOOKS[look]
    chromium.show(width=width, height=height, dark=dark)
    shades = set()
    for page, text in PAGES.items():
        chromium.open(f"{served}/{page}")
        assert text in chromium.run("document.body.innerText"), page
        broken = "[...document.images].filter(one => !one.naturalWidth).map(one => one.src)"
        assert chromium.run(broken) == [], page
        assert chromium.run("document.documentElement.scrollWidth") <= width, page
        shade = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
        shades.add(sum(chromium.run(shade)[:3]) < 3 * 128)
        name = page.removesuffix(".html").replace("/", "-")
        target = pictures / f"{name}-{look}.png"
        chromium.picture(target)
        assert target.stat().st_size > 5000
    assert shades == {dark}
    assert chromium.problems == []
    assert chromium.requests
    assert [url for url in chromium.requests if not _is_here(url, served)] == []


@pytest.mark.parametrize("place", ["server", "folder"])
def test_search_in_a_browser(
    served: str, site: Path, chromium: Browser, pictures: Path, place: str
) -> None:
    """The search finds a page, on a server and in a folder, and asks no other host."""
    start = served if place == "server" else site.as_uri()
    chromium.show(width=WIDE[0], height=WIDE[1], dark=False)
    chromium.open(f"{start}/docs/quickstart.html")
    assert "Commits" in chromium.run(SEARCH)
    chromium.picture(pictures / f"search-{place}.png")
    assert chromium.problems == []
    assert [url for url in chromium.requests if not _is_here(url, start)] == []


def test_browser_that_asks_elsewhere_is_noticed(tmp_path: Path, chromium: Browser) -> None:
    """A picture from another host, and an error of a script, are seen by the checks above."""
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>throw Error('odd')</script>")
    chromium.open(page.as_uri())
    foreign = [url for url in chromium.requests if not _is_here(url, tmp_path.as_uri())]
    assert foreign == ["http://127.0.0.1:9/x.png"]
    assert any("odd" in problem for problem in chromium.problems)


def _is_here(url: str, start: str) -> bool:
    return urlsplit(url).scheme in ("data", "blob", "about") or url.startswith(start + "/")
