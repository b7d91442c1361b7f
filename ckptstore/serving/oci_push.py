"""Pushes the files of a version into an OCI registry: an artifact of the ModelPack specification.

Each file is a layer of its own, which ORAS and ModelPack clients write under its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from posixpath import splitext
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from ckptstore.errors import InvalidInputError, StorageError, StoragePermissionError
from ckptstore.serving.model_file import opened_file
from ckptstore.serving.model_folder import ModelFolder
from ckptstore.serving.oci_login import Login
from ckptstore.serving.serving_limits import WINDOW_BYTES

# Source: the ModelPack specification of the CNCF, media types and annotations of version 1.
_TYPE: Final = "application/vnd.cncf.model.{}"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_FILE_PATH: Final = "org.cncf.model.filepath"
_TITLE: Final = "org.opencontainers.image.title"
_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_TIMEOUT: Final = Timeout(connect=10, read=300)
# Also for PUT and POST: a body seeks to its beginning, and the same blob may come twice.
_TRIES: Final = Retry(
    4,
    connect=1,
    backoff_factor=0.5,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)


def push_to_registry(
    folder: ModelFolder, place: str, *, sent: Callable[[int], object]
) -> tuple[str, str]:
    """Send what the registry lacks, the manifest last; return its digest and the reference."""
    if ":" not in place.rpartition("/")[2]:
        raise InvalidInputError(f"oci://{place} has no tag", hint="oci://REGISTRY/NAME:TAG")
    registry = _Registry(place)
    layers = [_layer(folder, name, sent) for name in folder.files]
    for layer, name in zip(layers, folder.files, strict=True):
        registry.send(layer, partial(opened_file, folder, name, sent))
    data = json.dumps(_config(folder, layers)).encode()
    config = _described(_TYPE.format("config.v1+json"), hashlib.sha256(data).hexdigest(), len(data))
    registry.send(config, lambda: data)
    version = folder.version
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "artifactType": _TYPE.format("manifest.v1+json"),
        "config": config,
        "layers": layers,
        "annotations": {
            "org.opencontainers.image.created": version.created_at.isoformat(),
            "org.opencontainers.image.version": version.label,
            "ckptstore.version": version.id,
            "ckptstore.manifest": f"blake3:{version.manifest_digest}",
        },
    }
    return registry.show(manifest), f"oci://{place}"


def _layer(folder: ModelFolder, name: str, sent: Callable[[int], object]) -> dict[str, Any]:
    """Describe a file; reads all of it for its SHA-256."""
    digest = hashlib.sha256()
    with opened_file(folder, name, sent) as file:
        while data := file.read(WINDOW_BYTES):
            digest.update(data)
    kind = {".safetensors": "weight", ".md": "doc"}.get(splitext(name)[1], "weight.config")
    found = _described(_TYPE.format(f"{kind}.v1.raw"), digest.hexdigest(), folder.file(name).nbytes)
    return {**found, "annotations": {_FILE_PATH: name, _TITLE: name}}


def _described(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _config(folder: ModelFolder, layers: list[dict[str, Any]]) -> dict[str, Any]:
    version = folder.version
    described = {
        "name": version.run,
        "version": version.label,
        "createdAt": version.created_at.isoformat(),
    }
    files = {"type": "layers", "diffIds": [layer["digest"] for layer in layers]}
    return {"descriptor": described, "config": {"format": "safetensors"}, "modelfs": files}


class _Registry:
    """A repository of a registry, by the OCI distribution specification."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._host, _, rest = place.partition("/")
        self._name, _, self._tag = rest.rpartition(":")
        here = urlsplit(f"//{place}").hostname in _HERE
        self._base = f"{'http' if here else 'https'}://{self._host}"
        self._pool = PoolManager(retries=_TRIES, timeout=_TIMEOUT)
        self._login = Login(self._pool, self._base, f"repository:{self._name}:pull,push")

    def send(self, layer: dict[str, Any], body: Callable[[], Any]) -> None:
        """Send a blob, unless it is there."""
        blobs = f"{self._base}/v2/{self._name}/blobs"
        if self._call("HEAD", f"{blobs}/{layer['digest']}").status == 200:
            return
        answer = self._expect("POST", f"{blobs}/uploads/")
        where = urljoin(self._base, answer.headers["Location"])
        joint = "&" if "?" in where else "?"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(layer["size"])}
        place = f"{where}{joint}digest={layer['digest']}"
        self._expect("PUT", place, body=body(), headers=headers)

    def show(self, manifest: dict[str, Any]) -> str:
        """Send the manifest, which makes the artifact visible; return its digest."""
        data = json.dumps(manifest).encode()
        where = f"{self._base}/v2/{self._name}/manifests/{self._tag}"
        self._expect("PUT", where, body=data, headers={"Content-Type": _MANIFEST})
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _expect(self, method: str, url: str, **given: Any) -> BaseHTTPResponse:  # noqa: ANN401
        answer = self._call(method, url, **given)
        if answer.status in {200, 201, 202}:
            return answer
        msg = f"oci://{self._place}: {method} was answered {answer.status}"
        if answer.status in {401, 403}:
            raise StoragePermissionError(msg, hint=f"docker login {self._host}")
        said = answer.data[:300].decode(errors="replace")
        raise StorageError(f"{msg}: {said}", hint="is it REGISTRY/NAME:TAG?")

    def _call(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,  # noqa: ANN401 - bytes, or a stream
        headers: Mapping[str, str] | None = None,
    ) -> BaseHTTPResponse:
        """Send a request; log in when it is asked for, before any stream is sent."""
        # An upload may go elsewhere: no secret there.
        login = self._login if urlsplit(url).netloc == self._host else None
        given = dict(headers or {})
        try:
            known = login.header if login else {}
            answer = self._pool.request(method, url, body=body, headers={**given, **known})
            streams = hasattr(body, "read")  # sent behind other requests, which have logged in
            challenge = answer.headers.get("WWW-Authenticate", "")
            if answer.status == 401 and login and not streams and login.answer(challenge):
                known = login.header
                answer = self._pool.request(method, url, body=body, headers={**given, **known})
        except HTTPError as error:
            why = getattr(error, "reason", error)  # of all tries, the last one's
            hint = "is the registry up, and its address right?"
            raise StorageError(f"oci://{self._place}: {why!s:.300}", hint=hint) from error
        return answer
