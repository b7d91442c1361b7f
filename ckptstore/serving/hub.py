"""The protocol of the Hugging Face Hub, as its released clients speak it; read-only.

A repository is a run: ``gpt``, ``ANY/gpt``, or a run whose name has one slash. Its revisions are
the refs of the run (``main`` is ``latest``), commit hashes, and whole refs such as
``lr=1e-4/a@best:val_loss``, so that a run of any name can be reached. A revision that can move is
answered by a redirect to its commit, so that a file is never mixed of two versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, quote

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from ckptstore.errors import InvalidRefError, NotFoundError, ObjectNotFoundError
from ckptstore.serving.downloads import Downloads
from ckptstore.serving.model_folder import ModelFolder, split_commit
from ckptstore.serving.serving_limits import BODY_BYTES_MAX, PAGE_ENTRIES
from ckptstore.serving.versions import ServedVersions


class Hub:
    """Answers of the Hub."""

    def __init__(self, versions: ServedVersions, downloads: Downloads) -> None:
        self._versions = versions
        self._downloads = downloads

    async def answer(self, request: Request, parts: Sequence[str]) -> Response | None:
        """Return the answer to a path of the protocol; None if it is none."""
        if parts[:2] == ["api", "models"]:
            return await self._api(request, parts[2:])
        at = parts.index("resolve", 1) if "resolve" in parts[1:3] else 0
        if at < 1 or len(parts) < at + 3:
            return None
        return await self._file(request, parts[:at], parts[at + 1], parts[at + 2 :])

    async def _file(
        self, request: Request, repo: Sequence[str], revision: str, path: Sequence[str]
    ) -> Response:
        folder = await self._folder(repo, revision)
        name = "/".join(path)
        headers = {"X-Repo-Commit": folder.commit}
        if name not in folder.files:
            raise _missing("EntryNotFound", f"there is no file {name!r:.200}", headers)
        if split_commit(revision) is None:
            place = "/".join(quote(part, safe="") for part in (folder.commit, *path))
            start = "/".join(quote(part, safe="") for part in repo)
            return RedirectResponse(f"/{start}/resolve/{place}", 307, headers)
        headers["X-Linked-Size"] = str(folder.files[name].nbytes)
        headers["X-Linked-Etag"] = f'"{folder.files[name].etag}"'
        return await self._downloads.answer(request, folder, name, headers)

    async def _api(self, request: Request, parts: Sequence[str]) -> Response | None:
        words = ("revision", "tree", "paths-info")
        at = next((at for at in (1, 2) if at >= len(parts) or parts[at] in words), 0)
        if not at or not parts:
            return None
        repo, word, rest = parts[:at], "".join(parts[at : at + 1]), parts[at + 1 :]
        folder = await self._folder(repo, rest[0] if rest else "main")
        headers = {"X-Repo-Commit": folder.commit}
        if word == "tree":
            return _tree(request, folder, "/".join(rest[1:]))
        if word == "paths-info":
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise HTTPException(413, "the list of paths is too long")
            paths = parse_qs(body.decode("latin-1")).get("paths", [])
            found = [_entry(folder, name) for name in paths if name in folder.files]
            return JSONResponse(found, headers=headers)
        files = folder.files.values()
        document = {
            "id": "/".join(repo),
            "sha": folder.commit,
            "lastModified": f"{folder.version.created_at:%Y-%m-%dT%H:%M:%S.000Z}",
            "tags": ["ckptstore", *folder.version.tags],
            "siblings": [{"rfilename": file.name, "size": file.nbytes} for file in files],
        }
        return JSONResponse(document, headers=headers)

    async def _folder(self, repo: Sequence[str], revision: str) -> ModelFolder:
        return await run_sync(self._find, repo, revision)

    def _find(self, repo: Sequence[str], revision: str) -> ModelFolder:
        """Return the folder of a revision.

        Raises
        ------
        HTTPException
            There is none; its headers say so as clients of the Hub expect.
        """
        ref, _, query = revision.partition("?")
        try:
            if "@" in ref or ref.startswith("#") or split_commit(ref):
                return self._versions.folder(revision)
            catalog = self._versions.catalog()
            names = [name for name in ("/".join(repo), repo[-1]) if catalog.has_run(name)]
            if not names:
                raise _missing("RepoNotFound", f"the store has no run {repo[-1]!r:.200}")
            if ref == "main" and "main" not in catalog.run(names[0]).tags:
                revision = "latest" + ("?" + query if query else "")
            return self._versions.folder(revision, run=names[0])
        except ObjectNotFoundError:
            raise
        except (NotFoundError, InvalidRefError) as error:
            raise _missing("RevisionNotFound", error.message) from error


def _missing(code: str, message: str, headers: dict[str, str] | None = None) -> HTTPException:
    return HTTPException(404, message, {**(headers or {}), "X-Error-Code": code})


def _entry(folder: ModelFolder, name: str) -> dict[str, Any]:
    file = folder.files.get(name)
    if file is None:
        return {"type": "directory", "path": name, "size": 0, "oid": folder.commit}
    return {"type": "file", "path": name, "size": file.nbytes, "oid": file.etag}


def _tree(request: Request, folder: ModelFolder, below: str) -> Response:
    """Return files, and folders where the listing is not recursive, a page at a time."""
    query, start = request.query_params, f"{below}/" if below else ""
    names = folder.below(below)
    if query.get("recursive", "").lower() in {"true", "1"}:
        names = [name for name in folder.files if name.startswith(start)]
    if not names:
        raise _missing("EntryNotFound", f"there is no folder {below!r:.200}")
    left = [name for name in names if name > query.get("cursor", "")]
    headers = {"X-Repo-Commit": folder.commit}
    if len(left) > PAGE_ENTRIES:
        next_page = request.url.include_query_params(cursor=left[PAGE_ENTRIES - 1])
        headers["Link"] = f'<{next_page}>; rel="next"'
    return JSONResponse([_entry(folder, name) for name in left[:PAGE_ENTRIES]], headers=headers)
