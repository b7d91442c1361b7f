"""Links of the documentation lead somewhere, and every page is reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from docpages import ROOT, pages, read_page

if TYPE_CHECKING:
    from docpages import Page

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`]*`")
_NAMED = re.compile(
    r"\b((?:docs|tests|benchmarks|backends|ckptstore)/[\w./-]+\.(?:md|py|sh|svg))\b"
)


def _links(page: Page) -> list[str]:
    return _LINK.findall(_CODE.sub("", page.prose))


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", read_page(path).prose, flags=re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in kept}


def test_links_resolve(page: Page) -> None:
    """A link inside the repository names a file that is there, and a heading that it has."""
    for link in _links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.path}: {link}"
        assert path.is_relative_to(ROOT), f"{page.path}: {link} leads out of the repository"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), f"{page.path}: {link} names no heading"


def test_named_files_exist(page: Page) -> None:
    """A path that the text names in passing is there too."""
    for name in _NAMED.findall(page.prose):
        assert (ROOT / name).exists(), f"{page.path} names {name}"


def test_every_page_is_reached() -> None:
    """From the README, following links, a reader comes to every page."""
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        path = ahead.pop()
        if path in seen:
            continue
        seen.add(path)
        found = [
            (path.parent / link.partition("#")[0]).resolve() for link in _links(read_page(path))
        ]
        ahead += [target for target in found if target.suffix == ".md" and target.is_file()]
    missed = sorted(str(path.relative_to(ROOT)) for path in set(pages()) - seen)
    assert not missed, f"no link leads to {missed}"
