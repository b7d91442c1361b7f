"""A read-only bucket ``store`` in the protocol of S3: keys are ``RUN/REF/FILE``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from xml.sax.saxutils import escape

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import Response

from ckptstore.errors import CkptStoreError, InvalidInputError, NotFoundError
from ckptstore.serving.downloads import Downloads
from ckptstore.serving.model_folder import ModelFolder, ServedFile
from ckptstore.serving.serving_limits import PAGE_ENTRIES
from ckptstore.serving.versions import ServedVersions

BUCKET = "store"
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


def is_s3(request: Request) -> bool:
    """Return True for a request of a client of S3, by the headers that these send."""
    names = request.headers.keys()
    signed = request.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256")
    return signed or any(name.startswith(("x-amz-", "amz-sdk-")) for name in names)


def s3_error(status: int, code: str, message: str) -> Response:
    """Return an error as S3 does."""
    return _xml(f"<Error>{_tags({'Code': code, 'Message': message})}</Error>", status)


def _tags(values: Mapping[str, object]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def _xml(text: str, status: int = 200) -> Response:
    return Response(
        f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', status, None, "application/xml"
    )


class S3Bucket:
    """Answers of the bucket."""

    def __init__(self, versions: ServedVersions, downloads: Downloads) -> None:
        self._versions = versions
        self._downloads = downloads

    async def answer(self, request: Request, parts: Sequence[str]) -> Response:
        """Return the answer to any request."""
        query = request.query_params
        if parts and parts[0] != BUCKET:
            return s3_error(404, "NoSuchBucket", f"the only bucket is {BUCKET}")
        if request.method not in {"GET", "HEAD"}:
            return s3_error(403, "AccessDenied", "the store is read-only here")
        if not parts:
            date = "<CreationDate>1970-01-01T00:00:00.000Z</CreationDate>"
            buckets = f"<Buckets><Bucket><Name>{BUCKET}</Name>{date}</Bucket></Buckets>"
            tag = "ListAllMyBucketsResult"
            return _xml(f'<{tag} xmlns="{_XMLNS}"><Owner/>{buckets}</{tag}>')
        if "location" in query:
            return _xml(f'<LocationConstraint xmlns="{_XMLNS}"/>')
        key = "/".join(parts[1:])
        if key:
            found = await run_sync(self._find, key)
            if found is None or not found[2]:
                return s3_error(404, "NoSuchKey", "there is no such key")
            return await self._downloads.answer(request, found[0], found[2], {})
        if request.method == "HEAD":
            return Response(headers={"x-amz-bucket-region": "us-east-1"})
        return await run_sync(self._list, request)

    def _find(self, key: str) -> tuple[ModelFolder, str, str] | None:
        """Return the folder of a key, its prefix, and the file; an empty one for none of them."""
        for run, rest in self._versions.split(key.split("/")):
            try:
                folder, ref, name = self._versions.below(run, rest)
            except (NotFoundError, InvalidInputError):
                continue
            return folder, f"{run}/{ref}/", name if name in folder.files else ""
        return None

    def _list(self, request: Request) -> Response:
        query = request.query_params
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get(key, "") for key in ("continuation-token", "start-after", "marker"))
        most = query.get("max-keys", str(PAGE_ENTRIES))
        count = min(int(most), PAGE_ENTRIES) if most.isdecimal() else PAGE_ENTRIES
        page = list(islice(self._entries(prefix, delimiter, after), count + 1))
        more, page = len(page) > count > 0, page[:count]
        told = {"Name": BUCKET, "Prefix": prefix, "Delimiter": delimiter, "MaxKeys": count}
        told |= {"KeyCount": len(page), "IsTruncated": str(more).lower()}
        if more:  # the latter in version 1
            told |= dict.fromkeys(("NextContinuationToken", "NextMarker"), page[-1][0])
        parts = [_tags(told)]
        for key, found in page:
            if found is None:
                parts.append(f"<CommonPrefixes>{_tags({'Prefix': key})}</CommonPrefixes>")
                continue
            folder, file = found
            time = f"{folder.version.created_at:%Y-%m-%dT%H:%M:%S.000Z}"
            about = {"Key": key, "LastModified": time, "ETag": f'"{file.etag}"'}
            about |= {"Size": str(file.nbytes), "StorageClass": "STANDARD"}
            parts.append(f"<Contents>{_tags(about)}</Contents>")
        return _xml(f'<ListBucketResult xmlns="{_XMLNS}">{"".join(parts)}</ListBucketResult>')

    def _entries(
        self, prefix: str, delimiter: str, after: str
    ) -> Iterator[tuple[str, tuple[ModelFolder, ServedFile] | None]]:
        """Yield keys with their files, and common prefixes, in order, after a place."""
        last = ""
        for start, run, ref in self._starts(prefix):
            at = start.find(delimiter, len(prefix)) if delimiter else -1
            if at >= 0:
                common = start[: at + len(delimiter)]
                if common > after and common != last:
                    yield common, None
                last = common
                continue
            if start + "\U0010ffff" <= after:
                continue
            try:
                folder = self._versions.folder(ref, run=run)
            except CkptStoreError:  # a version without weights, or whose data is gone
                continue
            for name, file in folder.files.items():
                key = start + name
                if not key.startswith(prefix) or key <= after:
                    continue
                at = key.find(delimiter, len(prefix)) if delimiter else -1
                if at < 0:
                    yield key, (folder, file)
                elif (common := key[: at + len(delimiter)]) not in {last, after}:
                    last = common
                    yield common, None

    def _starts(self, prefix: str) -> Iterator[tuple[str, str, str]]:
        """Yield what the keys of each version begin with, its run and its ref, in order."""
        found = self._find(prefix)
        if found is not None and prefix.startswith(found[1]):
            run, _, ref = found[1][:-1].partition(f"{found[0].version.run}/")
            yield found[1], run or found[0].version.run, ref
            return
        starts = [
            (f"{run}/{ref}/", run, ref)
            for run in self._versions.runs()
            if f"{run}/".startswith(prefix) or prefix.startswith(f"{run}/")
            for ref in self._versions.refs(run)
        ]
        yield from sorted(one for one in starts if one[0].startswith(prefix))
