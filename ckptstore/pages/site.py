"""The page of a store: paths to answers, for any server. Reads only; all paths are relative.

::

    /, /page              the page
    /page/page.js, .css   its assets
    /page/NAME.json       a document; errors have ``error``, ``hint`` and ``kind``

Texts of the store reach a reader as JSON alone, and the script writes them as text, never as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import msgspec

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError
from ckptstore.pages.run_documents import lineage, overview, run
from ckptstore.pages.store_documents import health, storage
from ckptstore.pages.version_documents import diff, values, version
from ckptstore.store import Store

__all__ = ["PageAnswer", "page"]

Document = Callable[[Store, Mapping[str, str]], dict[str, Any]]
DOCUMENTS: Final[Mapping[str, Document]] = {
    one.__name__: one for one in (overview, run, lineage, version, values, diff, storage, health)
}
_JSON: Final = "application/json"
_ASSETS: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page": ("page.html", "text/html; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """One answer, for any server."""

    status: int
    media_type: str
    body: bytes


def page(opening: Store, path: str, query: Mapping[str, str]) -> PageAnswer | None:
    """Return the answer to a request of the page; None for paths that are not its own.

    Safe from any thread, as the store is. Errors are answers too: 400 for an invalid request, 404
    for names that do not exist, 503 if the storage fails or data is damaged.
    """
    if path in _ASSETS:
        name, media_type = _ASSETS[path]
        return PageAnswer(status=200, media_type=media_type, body=asset(name))
    found = DOCUMENTS.get(path.removeprefix("/page/").removesuffix(".json"))
    if found is None or path != f"/page/{found.__name__}.json":
        return None
    try:
        return PageAnswer(status=200, media_type=_JSON, body=encoded(found(opening, query)))
    except CkptStoreError as error:
        asked = isinstance(error, InvalidInputError)
        status = 400 if asked else 404 if isinstance(error, NotFoundError) else 503
        said = {"error": error.message, "hint": error.hint, "kind": error.kind}
        return PageAnswer(status=status, media_type=_JSON, body=encoded(said))


def asset(name: str) -> bytes:
    """Return a file of the page."""
    return files("ckptstore.pages").joinpath(name).read_bytes()


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON; paths may hold lone surrogates, which UTF-8 has not."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(document, str_keys=True)).encode()
