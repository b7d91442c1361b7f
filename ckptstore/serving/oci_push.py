"""Pushes the files of a version into an OCI registry: an artifact of the ModelPack specification.

Each file is a layer of its own, which ORAS and ModelPack clients write under its name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from posixpath import splitext
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from ckptstore.errors import InvalidInputError, StorageError, StoragePermissionError
from ckptstore.serving.model_file import opened_file
from ckptstore.serving.model_folder import ModelFolder
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
    created = version.created_at.isoformat()
    described = {"name": version.run, "version": version.label, "createdAt": created}
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
        where = urljoin(self._base, answer.headers.get("Location", ""))
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


_HELPER_S: Final = 30.0
_UNLIKE: Final = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of JSON that is not what it should be."""
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')


class Login:
    """Answers the challenges of one registry: Basic, or a token of its token server.

    Parameters
    ----------
    base
        ``https://HOST``, or ``http`` for a registry on this machine.
    scope
        What the token is for, as ``repository:NAME:pull,push``.
    """

    def __init__(self, pool: PoolManager, base: str, scope: str) -> None:
        self._pool = pool
        self._scheme, _, self._host = base.partition("://")
        self._scope = scope
        self.header: dict[str, str] = {}
        """For all requests; empty before a challenge."""

    def answer(self, challenge: str) -> bool:
        """Set the header that a ``WWW-Authenticate`` asks for; return whether there is one.

        Raises
        ------
        StoragePermissionError
            The configuration of Docker cannot be read, or its helper fails.
        """
        scheme, _, rest = challenge.partition(" ")
        basic = self._basic()
        if scheme.lower() == "basic" and basic:
            self.header = basic
        elif scheme.lower() == "bearer":
            self.header = self._token(dict(_PARAMETER.findall(rest)), basic)
        else:
            return False
        return bool(self.header)

    def _token(self, asked: dict[str, str], basic: dict[str, str]) -> dict[str, str]:
        realm = asked.get("realm", "")
        if not realm.startswith(f"{self._scheme}://"):  # the password would go out in the clear
            return {}
        fields = {"service": asked.get("service", ""), "scope": self._scope}
        answer = self._pool.request("GET", realm, fields=fields, headers=basic)
        word = None
        with suppress(*_UNLIKE):  # what is no token is as none
            found: dict[str, Any] = json.loads(answer.data) if answer.status == 200 else {}
            word = found.get("token") or found.get("access_token")
        return {"Authorization": f"Bearer {word}"} if word else {}

    def _basic(self) -> dict[str, str]:
        """Return the header of name and password; empty if none are kept."""
        file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
        try:
            kept = json.loads(file.read_text()) if file.exists() else {}
            helper = kept.get("credHelpers", {}).get(self._host) or kept.get("credsStore")
            word = kept.get("auths", {}).get(self._host, {}).get("auth")
            if not word and helper:
                word = self._ask(helper)
        except (OSError, *_UNLIKE, subprocess.SubprocessError) as error:
            msg = f"the login to {self._host} cannot be read from {file}: {error!s:.200}"
            raise StoragePermissionError(msg, hint=f"docker login {self._host}") from error
        return {"Authorization": f"Basic {word}"} if word else {}

    def _ask(self, helper: str) -> str:
        """Return what a credential helper of Docker keeps; empty if that is nothing."""
        command = [f"docker-credential-{helper}", "get"]
        done = subprocess.run(  # noqa: S603 - as Docker does
            command, input=self._host.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
        if done.returncode:
            return ""
        found = json.loads(done.stdout)
        return base64.b64encode(f"{found['Username']}:{found['Secret']}".encode()).decode()
