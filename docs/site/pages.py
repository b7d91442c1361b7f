"""Hook of mkdocs that shows pages at the paths that they have in the repository.

The README, the changelog and every file that a page links to belong to the site, also those outside
of ``docs/``. All keep their paths, so one relative link works in the repository and in the site.
A notebook becomes a page with its code and its results. Each public name and each command gets a
page of its own: a name from its docstrings, a command from its section of the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import api_pages  # beside this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FIRST = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SCRIPT = "docs/site/iframe-worker.js"
_FENCE = re.compile(r"^( *```\w+) no-run:.*$", re.MULTILINE)
_BLOCK = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
API = "docs/reference/api.md"
COMMANDS = "docs/reference/cli.md"
HEADING = "## ckptstore "
"""Beginning of the headings whose sections are pages of commands."""
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of ``docs/`` by all files of the site, and complete the navigation."""
    root = Path(config.config_file_path).parent
    theme = [file for file in files if file.src_dir != config.docs_dir]
    names = sorted(_reached(root))
    made = {_page_of(name): _notebook(root / name) for name in names if name.endswith(".ipynb")}
    if COMMANDS in names:
        made |= _sections(root / COMMANDS)
    if API in names:
        texts = api_pages.rendered(root, (root / API).read_text("utf-8"))
        made |= {f"docs/reference/api/{name}.md": text for name, text in texts.items()}
    pages = sorted([*(name for name in names if name.endswith(".md")), *made])
    if config.nav is not None:
        named = set(_names(config.nav))
        config.nav = _expanded(config.nav, [name for name in pages if name not in named])
    return Files(
        [
            *theme,
            *(File(name, str(root), config.site_dir, use_directory_urls=False) for name in names),
            *(File.generated(config, name, content=text) for name, text in made.items()),
        ]
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:  # noqa: ANN401 - mkdocs
    """Remove the reasons for which tests leave out blocks, and links to folders; link names."""
    if page.file.src_uri in (API, COMMANDS):  # the search finds the pages made of them
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri == API:
        markdown = api_pages.linked(markdown, "api")
    folder = (Path(config.config_file_path).parent / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        if link[2].endswith(".ipynb") and not page.file.generated_by:
            return f"[{link[1]}]({_page_of(link[2])})"
        return link[1] if (folder / link[2]).is_dir() else link[0]

    return _LINK.sub(plain, _FENCE.sub(r"\1", markdown))


def _reached(root: Path) -> set[str]:
    """Return the paths of all pages, and of the files that they link to."""
    ahead = [root / name for name in FIRST]
    ahead += (path for path in (root / "docs").rglob("*") if path.suffix in (".md", ".svg", ".png"))
    found = {SCRIPT}
    while ahead:
        path = ahead.pop().resolve()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        found.add(name)
        if path.suffix == ".md":
            ahead += (to for to in _links(path) if to.is_file() and to.is_relative_to(root))
    return found


def _links(path: Path) -> Iterator[Path]:
    for _, link in _LINK.findall(_BLOCK.sub("", path.read_text("utf-8"))):
        if "://" not in link and not link.startswith("#"):
            yield (path.parent / link.partition("#")[0]).resolve()


def _page_of(notebook: str) -> str:
    return f"{notebook.removesuffix('.ipynb')}.md"


def _notebook(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and its results as tables or text."""
    parts: list[str] = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            forms = {name: "".join(lines) for name, lines in output["data"].items()}
            table = forms.get("text/html")
            parts.append(table or f"```text\n{forms['text/plain']}\n```")
    parts.insert(1, f"[Download the notebook]({path.name}).")
    return "\n\n".join(parts)


def _sections(path: Path) -> dict[str, str]:
    """Return the sections of the page of commands as pages of a folder, by their paths."""

    def outward(link: re.Match[str]) -> str:
        to = link[2] if not link[2].startswith("#") else path.name + link[2]
        return link[0].replace(f"({link[2]})", f"({to if '://' in to else f'../{to}'})")

    found: dict[str, str] = {}
    for section in re.split(rf"^(?={HEADING})", path.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        body = re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0]
        page = f"{COMMANDS.removesuffix('.md')}/{title.removeprefix(HEADING)}.md"
        found.setdefault(page, f"# {title.lstrip('# ')}\n{_LINK.sub(outward, body)}")
    return found


def _names(nav: Any) -> Iterator[str]:  # noqa: ANN401 - lists, dicts and text
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _names(part)


def _expanded(nav: list[Any], others: list[str]) -> list[Any]:
    """Return the navigation with patterns replaced by those of the other pages that match."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            depth = entry.count("/")
            found += (n for n in others if fnmatchcase(n, entry) and n.count("/") == depth)
        elif isinstance(entry, dict):
            found.append(
                {
                    title: _expanded(part, others) if isinstance(part, list) else part
                    for title, part in entry.items()
                }
            )
        else:
            found.append(entry)
    return found
