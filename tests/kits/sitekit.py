"""The site of the documentation: builds it as ``make site`` does, and reads the pages built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Html", "build", "dead_links", "foreign_requests", "read_html"]

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements, and their attributes, that make a browser send a request."""


@dataclass
class Html:
    """Links, requests and anchors of one page."""

    path: Path
    links: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


def build(folder: Path, *, root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the repository at `root` into a folder.

    The environment with mkdocs is the one that ``make`` keeps beside the tests'; the variable
    ``CKPTSTORE_SITE`` names another.
    """
    environment = os.environ.get("CKPTSTORE_SITE") or Path(sys.prefix) / "site"
    python = Path(environment) / "bin" / "python"
    if not python.exists():
        msg = f"{python} is missing: run make site (make test-all does)"
        raise FileNotFoundError(msg)
    return subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": ""}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def read_html(path: Path) -> Html:
    """Return the links, requests and anchors of a page."""
    found = Html(path=path)
    _Reader(found).feed(path.read_text("utf-8"))
    return found


def foreign_requests(page: Html) -> list[str]:
    """Return the addresses on other hosts that a browser would ask for when it opens the page."""
    return [one for one in page.requests if urlsplit(one).netloc]


def dead_links(pages: dict[Path, Html]) -> Iterator[str]:
    """Yield links and requests to files and anchors that are not there."""
    for page in pages.values():
        for link in (*page.links, *page.requests):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = page.path
            if parts.path:
                target = (page.path.parent / unquote(parts.path)).resolve()
            if not target.is_file():
                yield f"{page.path.name}: {link}"
            elif parts.fragment and target in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors and anchor != "__top":
                    yield f"{page.path.name}: {link}"


class _Reader(HTMLParser):
    def __init__(self, found: Html) -> None:
        super().__init__()
        self._found = found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        values = {name: value for name, value in attrs if value is not None}
        self._found.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self._found.links.append(values["href"])
        if values.get("rel") == "canonical":
            return
        address = values.get(_LOADING.get(tag, ""))
        if address is not None and not address.startswith("data:"):
            self._found.requests.append(address)
