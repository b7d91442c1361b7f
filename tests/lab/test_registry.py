"""Versions pushed into the registry of Docker, with a login, and pulled by the client of ORAS."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import bcrypt
import oras.client
import pytest
import torch
from labkit.systems import SCRIPTS
from ports import free_port

import ckptstore
from ckptstore.errors import StoragePermissionError
from ckptstore.serving.model_folder import open_folder
from ckptstore.serving.push import push

pytestmark = pytest.mark.lab

USER, WORD = "team", "of the lab"
CONFIGURATION = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/blobs}}}}
http: {{addr: "127.0.0.1:{port}"}}
auth: {{htpasswd: {{realm: lab, path: {folder}/users}}}}
"""


@dataclass(frozen=True)
class Registry:
    """A running registry."""

    address: str


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Start the registry on a loopback port, and end it."""
    packages = f". {SCRIPTS}/packages.sh; install_packages docker-registry"
    subprocess.run(["bash", "-euc", packages], check=True)
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    word = bcrypt.hashpw(WORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "users").write_text(f"{USER}:{word}\n")
    (folder / "config.yml").write_text(CONFIGURATION.format(folder=folder, port=port))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            ["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log
        )
        try:
            end = time.monotonic() + 60
            while not _answers(f"http://127.0.0.1:{port}/v2/"):
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end
                time.sleep(0.1)
            yield Registry(f"127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5):  # noqa: S310 - loopback
            return True
    except HTTPError as error:
        return error.code == 401
    except URLError:
        return False


def test_a_version_is_pushed_with_a_login_and_pulled(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the login it is refused with the command; with it every file arrives, once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    target = f"{registry.address}/team/gpt:1.0"
    with ckptstore.open(tmp_path / "store", create=True) as store:
        store.run("gpt").save({"model": {"w": torch.randn(3_000_000)}}, step=7)
        with pytest.raises(StoragePermissionError) as caught:
            push(store, "gpt@7", f"oci://{target}")
        assert caught.value.hint == f"docker login {registry.address}"
        login = base64.b64encode(f"{USER}:{WORD}".encode()).decode()
        (tmp_path / ".docker").mkdir()
        known = {"auths": {registry.address: {"auth": login}}}
        (tmp_path / ".docker" / "config.json").write_text(json.dumps(known))

        done = push(store, "gpt@7", f"oci://{target}")
        again = push(store, "gpt@7", f"oci://{registry.address}/team/gpt:2.0")

        folder = open_folder(store, store.resolve("gpt@7"))
        expected = {name: b"".join(folder.read(name)) for name in folder.files}
    assert done.digest.startswith("sha256:")
    assert set(again.files) == set(expected)
    client = oras.client.OrasClient(insecure=True, auth_backend="basic")
    client.login(hostname=registry.address, username=USER, password=WORD)
    client.pull(target=target, outdir=str(tmp_path / "pulled"))
    pulled = {path.name: path.read_bytes() for path in (tmp_path / "pulled").iterdir()}
    assert pulled == expected
