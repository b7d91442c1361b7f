"""The page as one file, with style, script and documents inside, for readers without a server."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ckptstore.errors import CkptStoreError
from ckptstore.jobs.job_outputs import replace_file
from ckptstore.pages.run_documents import POINTS_MAX
from ckptstore.pages.site import DOCUMENTS, asset, encoded
from ckptstore.store import Store

__all__ = ["write_report"]

_BYTES_MAX: Final = 4 << 20
"""Bytes of all documents; what does not fit is left out, the most important come first."""
_POINTS_MAX: Final = 20_000
"""Versions in the curves of all runs: 100 bytes and more each."""
_VERSIONS_MAX: Final = 40
"""Versions whose tensors are inside; each takes a request."""


def write_report(store: Store, path: str | os.PathLike[str], *, run: str | None = None) -> int:
    """Write the page of a store to a file, replacing one of this name whole; return its bytes.

    Parameters
    ----------
    run
        Only this run.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    StorageError
        The store cannot be read, or the file cannot be written.
    """
    data = report(store, run=run)
    replace_file(Path(path), data)
    return len(data)


def report(store: Store, *, run: str | None = None) -> bytes:
    """Return the file that :func:`write_report` writes."""
    if run is not None:
        store.repo.refresh().run(run)
    found: dict[str, Any] = {}
    size = 0
    for key, made in _documents(store, run):
        added = len(encoded(made))
        if not found or size + added <= _BYTES_MAX:
            found[key] = made
            size += added
    data = encoded({"documents": found})
    for char in (b"<", b">", b"&"):  # names may contain the end of a script
        data = data.replace(char, b"\\u%04x" % ord(char))
    style, script = asset("page.css"), asset("page.js")
    parts = {
        b"script-src 'self'": b"script-src " + _hash(script),
        b"style-src 'self'": b"style-src " + _hash(style),
        b'<link rel="stylesheet" href="page/page.css">': b"<style>" + style + b"</style>",
        b'<script src="page/page.js" defer></script>': (
            b'<script type="application/json" id="data">' + data + b"</script>\n"
            b"<script>" + script + b"</script>"
        ),
    }
    html = asset("page.html")
    for before, after in parts.items():
        html = html.replace(before, after)
    return html


def _hash(text: bytes) -> bytes:
    return b"'sha256-" + base64.b64encode(hashlib.sha256(text).digest()) + b"'"


def _documents(store: Store, run: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield documents under the names that the script asks for, the most important first."""
    overview = DOCUMENTS["overview"](store, {})
    overview["runs"] = [one for one in overview["runs"] if run in {None, one["name"]}]
    yield "overview", overview
    for name in ("health", "storage", "lineage") if run is None else ():  # of all runs
        yield name, DOCUMENTS[name](store, {})
    lines = overview["runs"]
    most = str(max(20, min(POINTS_MAX, _POINTS_MAX // max(1, len(lines)))))
    for line in lines:
        yield f"run {line['name']}", DOCUMENTS["run"](store, {"run": line["name"], "most": most})
    heads = {line["head"]["id"]: None for line in lines if line["head"]}
    bests = {one["id"]: None for line in lines for one in line["best"]}
    for version in list(heads | bests)[:_VERSIONS_MAX]:
        yield f"version {version}", DOCUMENTS["version"](store, {"ref": version})
    for line in lines[:_VERSIONS_MAX]:
        for one in line["best"][:1]:
            pair = {"first": one["id"], "second": line["head"]["id"]}
            try:
                made = DOCUMENTS["diff"](store, pair)
            except CkptStoreError as error:  # only records of one of them, say
                made = {"error": error.message, "hint": error.hint, "kind": error.kind}
            yield f"diff {pair['first']} {pair['second']}", made
