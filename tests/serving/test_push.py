"""Versions that are pushed to the Hub and into registries: whole, checked, and with their names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import oras.client
import pytest
import torch
from huggingface_hub import constants as hub_constants
from webserver import serving

import ckptstore
from ckptstore.cli.main import run
from ckptstore.errors import CorruptTensorError, StorageError, StoragePermissionError
from ckptstore.serving import model_file
from ckptstore.serving.model_file import opened_file
from ckptstore.serving.model_folder import open_folder
from ckptstore.serving.push import push

# The Hub's client warns of how it calls its own HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_secret_of_a_test"  # noqa: S105


@dataclass
class Place:
    """What a server has been sent; requests can be refused."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    uploads: int = 0
    word: str = ""
    """Name and password that the token server of the registry wants; empty for no login."""
    token: object = field(default_factory=lambda: {"token": "of the registry"})
    """The answer of the token server."""
    refused: int = 0
    """Status with which uploads are answered; 0 for none."""
    base: str = ""


def _handler(place: Place) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """The parts of both protocols that a push needs."""

        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def answer(self, code: int, body: object = b"", **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            route = _registry if path.startswith("/v2/") else _hub
            route(self, place, path, query, body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = handle_one

    return Handler


def _registry(
    on: Any,  # noqa: ANN401 - the handler
    place: Place,
    path: str,
    query: dict[str, list[str]],
    body: bytes,
) -> None:
    """Answer as a registry does (OCI distribution 1.1): blobs in one PUT, and manifests."""
    kind, _, name = path.rpartition("/")
    if path == "/v2/token":
        known = base64.b64encode(place.word.encode()).decode()
        assert query["scope"] == ["repository:team/gpt:pull,push"]
        good = on.headers.get("Authorization") == f"Basic {known}"
        on.answer(200 if good else 401, place.token if good else {})
    elif place.word and on.headers.get("Authorization") != "Bearer of the registry":
        challenge = f'Bearer realm="{place.base}/v2/token",service="registry"'
        on.answer(401, **{"WWW-Authenticate": challenge})
    elif path.endswith("/blobs/uploads/"):
        on.answer(place.refused or 202, Location="/v2/team/gpt/blobs/uploads/1?state=x")
    elif "/blobs/uploads/" in path:
        digest = query["digest"][0]
        place.uploads += 1
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            on.answer(400, {"errors": [{"code": "DIGEST_INVALID"}]})
        else:
            place.blobs[digest] = body
            on.answer(201)
    elif kind.endswith("/blobs"):
        on.answer(200 if name in place.blobs else 404, place.blobs.get(name, b""))
    elif on.command == "PUT":
        parts = json.loads(body)
        assert all(one["digest"] in place.blobs for one in (parts["config"], *parts["layers"]))
        place.manifests[name] = body
        on.answer(201)
    else:
        type_ = "application/vnd.oci.image.manifest.v1+json"
        on.answer(200, place.manifests[name], **{"Content-Type": type_})


def _hub(
    on: Any,  # noqa: ANN401 - the handler
    place: Place,
    path: str,
    _query: dict[str, list[str]],
    body: bytes,
) -> None:
    """Answer as the Hub's API does to a commit: weights by Git LFS, other files within it."""
    if place.refused or on.headers.get("Authorization") not in {f"Bearer {TOKEN}", None}:
        on.answer(place.refused or 401, {"error": "no"})
    elif path == "/api/repos/create":
        on.answer(200, {"url": f"{place.base}/team/gpt"})
    elif "/preupload/" in path:
        files = json.loads(body)["files"]
        modes = [("lfs" if one["path"].endswith(".safetensors") else "regular") for one in files]
        told = [
            {"path": one["path"], "uploadMode": mode, "shouldIgnore": False}
            for one, mode in zip(files, modes, strict=True)
        ]
        on.answer(200, {"files": told})
    elif path.endswith("/info/lfs/objects/batch"):
        wanted = [
            {
                **one,
                "actions": {}
                if one["oid"] in place.blobs
                else {"upload": {"href": f"{place.base}/lfs/{one['oid']}"}},
            }
            for one in json.loads(body)["objects"]
        ]
        for one in wanted:
            if not one["actions"]:
                del one["actions"]
        on.answer(200, {"transfer": "basic", "objects": wanted})
    elif path.startswith("/lfs/"):
        place.uploads += 1
        digest = path.removeprefix("/lfs/")
        good = hashlib.sha256(body).hexdigest() == digest
        if good:
            place.blobs[digest] = body
        on.answer(200 if good else 400)
    elif "/commit/" in path:
        lines = [json.loads(line) for line in body.splitlines()]
        found: dict[str, list[Any]] = {line["key"]: [] for line in lines}
        for line in lines:
            found[line["key"]].append(line["value"])
        place.commits.append({"branch": path.rpartition("/")[2], **found})
        on.answer(200, {"commitOid": "c" * 40, "commitUrl": f"{place.base}/team/gpt/commit/c"})
    else:
        on.answer(200, {"siblings": [], "id": "team/gpt", "sha": "c" * 40})


@contextmanager
def _served() -> Iterator[Place]:
    place = Place()
    with serving(_handler(place)) as place.base:
        yield place


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    """Return a server that is both, and the Hub for huggingface_hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with _served() as place:
        monkeypatch.setattr(hub_constants, "ENDPOINT", place.base)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield place


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    """Return a store with a version of two tensors of some MiB."""
    state = {"model": {"a": torch.randn(700, 1000), "b": torch.randn(9)}}
    with ckptstore.open(tmp_path / "store", create=True, chunk_bytes=1 << 18) as opened:
        opened.run("gpt", metrics={"val_loss": "min"}).save(
            state, step=3, metrics={"val_loss": 1.5}
        )
        yield opened


def _files(store: ckptstore.Store) -> dict[str, bytes]:
    folder = open_folder(store, store.resolve("gpt@3"))
    return {name: b"".join(folder.read(name)) for name in folder.files}


def test_a_file_can_be_read_from_anywhere(store: ckptstore.Store) -> None:
    """Reads and seeks give the bytes of the file, as of a file on disk."""
    folder = open_folder(store, store.resolve("gpt@3"))
    whole = _files(store)["model.safetensors"]
    seen: list[int] = []
    with opened_file(folder, "model.safetensors", seen.append) as file:
        assert file.read() == whole
        assert file.read(5) == b""
        for start in (0, 1, 4095, 1 << 18, len(whole) - 3, len(whole), len(whole) + 9):
            assert file.seek(start) == start
            assert file.read(70_000) == whole[start : start + 70_000]
        assert file.seek(-4, 2) == len(whole) - 4
        assert file.read() == whole[-4:]
    assert sum(seen) >= len(whole)


def test_push_to_the_hub(store: ckptstore.Store, place: Place) -> None:
    """One commit has every file, byte for byte, and names version and digest."""
    steps: list[ckptstore.Progress] = []
    done = push(store, "gpt@best:val_loss", "hf://team/gpt@trial", progress=steps.append)

    expected = _files(store)
    (commit,) = place.commits
    (header,) = commit["header"]
    assert commit["branch"] == "trial"
    version = store.resolve("gpt@3")
    assert version.id in header["description"]
    assert version.manifest_digest in header["description"]
    small = {one["path"]: base64.b64decode(one["content"]) for one in commit["file"]}
    large = {one["path"]: place.blobs[one["oid"]] for one in commit["lfsFile"]}
    assert {**small, **large} == expected
    assert done.digest == "c" * 40
    assert (steps[-1].done, set(done.files)) == (steps[-1].total, set(expected))
    push(store, "gpt@3", "hf://team/gpt")
    assert place.uploads == len(large), "what is there is not sent again"


def test_push_to_a_registry(store: ckptstore.Store, place: Place, tmp_path: Path) -> None:
    """The client of ORAS pulls every file, byte for byte; the manifest names version and digest."""
    target = f"{place.base.removeprefix('http://')}/team/gpt:1.0"
    done = push(store, "gpt@3", f"oci://{target}")

    expected = _files(store)
    oras.client.OrasClient(insecure=True).pull(target=target, outdir=str(tmp_path / "pulled"))
    pulled = {
        path.relative_to(tmp_path / "pulled").as_posix(): path.read_bytes()
        for path in (tmp_path / "pulled").rglob("*")
        if path.is_file()
    }
    assert pulled == expected
    manifest = json.loads(place.manifests["1.0"])
    assert done.digest == f"sha256:{hashlib.sha256(place.manifests['1.0']).hexdigest()}"
    assert manifest["annotations"]["ckptstore.version"] == store.resolve("gpt@3").id
    assert {one["mediaType"] for one in manifest["layers"]} <= {
        f"application/vnd.cncf.model.{kind}.v1.raw" for kind in ("weight", "weight.config", "doc")
    }
    before = place.uploads
    push(store, "gpt@3", f"oci://{target}-again")
    assert place.uploads == before, "what is there is not sent again"


@pytest.mark.parametrize("kept", ["auths", "credHelpers", "credsStore"])
def test_a_registry_with_tokens(
    store: ckptstore.Store, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """What docker login keeps, in its file or in a helper, buys a token; without it, a refusal."""
    place.word = "team:of the test"
    host = place.base.removeprefix("http://")
    with pytest.raises(StoragePermissionError) as caught:
        push(store, "gpt@3", f"oci://{host}/team/gpt:1")
    assert caught.value.hint == f"docker login {host}"
    known = {
        "auths": {host: {"auth": base64.b64encode(place.word.encode()).decode()}},
        "credHelpers": {host: "kept"},
        "credsStore": "kept",
    }
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({kept: known[kept]}))
    helper = tmp_path / "docker-credential-kept"
    helper.write_text("""#!/bin/sh\necho '{"Username": "team", "Secret": "of the test"}'\n""")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    push(store, "gpt@3", f"oci://{host}/team/gpt:1")

    assert "1" in place.manifests
    answers: list[object] = [b"<html>", [], {}, {"token": None}]
    for answer in answers:
        place.token = answer
        with pytest.raises(StoragePermissionError, match="answered 401"):
            push(store, "gpt@3", f"oci://{host}/team/gpt:2")
    helper.write_text("#!/bin/sh\necho '{}'\n")
    for text in ("[1]", "{", '{"auths": []}', '{"credsStore": "kept"}'):
        (tmp_path / ".docker" / "config.json").write_text(text)
        with pytest.raises(StoragePermissionError, match=r"config\.json"):
            push(store, "gpt@3", f"oci://{host}/team/gpt:2")


def test_damage_is_never_shown(store: ckptstore.Store, place: Place, tmp_path: Path) -> None:
    """Flipped bits end a push before a commit, or a manifest, is sent."""
    for pack in (tmp_path / "store" / "packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    for target in ("hf://team/gpt", f"oci://{place.base.removeprefix('http://')}/team/gpt:1"):
        with pytest.raises(CorruptTensorError):
            push(store, "gpt@3", target)
    assert not place.commits
    assert not place.manifests


def test_damage_that_comes_while_files_are_sent(
    store: ckptstore.Store, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client wraps what happens to its uploads: the error of the store comes through."""

    def seek(self: Any, offset: int, whence: int = 0) -> int:  # noqa: ANN401 - the stream
        if offset == 0 and self.tell():
            raise CorruptTensorError("flipped while it was sent")
        return original(self, offset, whence)

    original = model_file._File.seek
    monkeypatch.setattr(model_file._File, "seek", seek)
    with pytest.raises(CorruptTensorError, match="while it was sent"):
        push(store, "gpt@3", "hf://team/gpt")
    assert not place.commits


@pytest.mark.parametrize(("code", "kind"), [(403, StoragePermissionError), (422, StorageError)])
def test_refusals_are_told(
    store: ckptstore.Store, place: Place, code: int, kind: type[Exception]
) -> None:
    """The error names the target and the next step, and never the token."""
    place.refused = code
    for target in ("hf://team/gpt", f"oci://{place.base.removeprefix('http://')}/team/gpt:1"):
        with pytest.raises(kind) as caught:
            push(store, "gpt@3", target)
        assert target in str(caught.value)
        assert caught.value.hint  # type: ignore[attr-defined]
        assert TOKEN not in str(caught.value)


def test_the_command(
    store: ckptstore.Store, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what was pushed; places that are none, and servers that are away, are told."""
    at = ["-s", str(tmp_path / "store")]
    target = f"oci://{place.base.removeprefix('http://')}/team/gpt:2"
    assert run(["push", "gpt@3", target, "--dtype", "bf16", "--json", *at]) == 0
    document = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", document["digest"])
    assert "model.safetensors" in document["files"]
    for wrong in ("s3://bucket/x", "hf://alone", "oci://host/name"):
        assert run(["push", "gpt@3", wrong, *at]) == 2
        assert "oci://REGISTRY/NAME:TAG" in capsys.readouterr().err
    assert run(["push", "gpt@3", "oci://127.0.0.1:9/team/gpt:1", *at]) not in {0, 1, 2}
    assert "127.0.0.1:9" in capsys.readouterr().err
