"""The two fields of the metadata that are made: the version, and the README of the package index.

Everything else is in pyproject.toml. A package index shows the README far from the repository, so
its links to files and its pictures become addresses of the repository, at the tag of the version.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")


def read_version() -> str:
    """Return the version that ``ckptstore/__init__.py`` states; importing it needs torch."""
    source = (ROOT / "ckptstore" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise SystemExit("ckptstore/__init__.py states no __version__")
    return found[1]


def read_readme(version: str) -> str:
    """Return the README with absolute links."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    place = settings["project"]["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        if "://" in link["to"]:
            return link[0]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({place}/{kind}/v{version}/{link['to']})"

    return _LINK.sub(absolute, (ROOT / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    setup(
        version=read_version(),
        long_description=read_readme(read_version()),
        long_description_content_type="text/markdown",
    )
