"""Published stores behind a real nginx: ranges, compression, a login, a cache that keeps 404s."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from labkit.systems import SCRIPTS
from ports import free_port

import ckptstore
from ckptstore.errors import ReadOnlyError, StoragePermissionError, StoreNotFoundError

pytestmark = pytest.mark.lab

KEPT_S = 3
"""Seconds for which the cache keeps a 404."""
CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log; client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2;
  fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  types {{ text/html html; application/json json; }}
  proxy_cache_path {folder}/cache keys_zone=one:1m;
  gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any;
  server {{
    listen 127.0.0.1:{port}; root {folder}/www;
    location /login/ {{ alias {folder}/www/; auth_basic "x"; auth_basic_user_file {folder}/users; }}
    location /moved/ {{ return 301 /; }}
    location /old/ {{ rewrite ^/old/(.*)$ /$1 redirect; }}
    location = /cached/store/published.json {{ alias {folder}/www/store/published.json; }}
    location /cached/ {{
      proxy_pass http://127.0.0.1:{port}/; proxy_cache one; proxy_cache_valid 200 1h;
      proxy_cache_valid 404 {kept_s}s; slice 1m; proxy_cache_key $uri$slice_range;
      proxy_set_header Range $slice_range;
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server, with a user and a store below ``www``."""
    found = tmp_path_factory.mktemp("nginx")
    (found / "www").mkdir()
    (found / "users").write_text("reader:{PLAIN}of the lab\n")
    with ckptstore.open(found / "www" / "store", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(1, 121):
            run.save({"w": torch.full((1000,), float(step))}, step=step, metrics={"loss": 1 / step})
        run.save({"big": torch.arange(3_000_000.0)}, step=1000)
        store.publish()
    return found


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Start nginx on a loopback port, and end it."""
    packages = f". {SCRIPTS}/packages.sh; install_packages nginx-light"
    subprocess.run(["bash", "-euc", packages], check=True)
    port = free_port()
    text = CONFIGURATION.format(folder=folder, port=port, kept_s=KEPT_S)
    (folder / "nginx.conf").write_text(text)
    server = subprocess.Popen(["nginx", "-c", folder / "nginx.conf"])
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: _answers(address))
        yield address
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/store/store.json", timeout=5) as answer:  # noqa: S310 - loopback
            return bool(answer.status == 200)
    except URLError:
        return False


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("path", ["store", "old/store", "cached/store", "store/index.html"])
def test_everything_loads(url: str, path: str) -> None:
    """Directly, by a redirect and through a cache: listed, loaded, sliced and checked."""
    with ckptstore.open(f"{url}/{path}") as store:
        assert len(store.versions()) == 121
        assert torch.equal(store.load("gpt@latest")["big"], torch.arange(3_000_000.0))
        rows = store.version("gpt@1000")["big"][2_000_000:2_000_003]
        assert rows.tolist() == [2_000_000.0, 2_000_001.0, 2_000_002.0]
        assert store.load("gpt@best:loss")["w"][0] == 120.0
        assert store.verify(["gpt@1000", "gpt@7"]).ok
        with pytest.raises(ReadOnlyError):
            store.tag("gpt@7", "mine")


def test_a_login(url: str) -> None:
    """Without a password nothing is read, with it everything."""
    place = f"{url}/login/store"
    with pytest.raises(StoragePermissionError, match="HTTP 401"):
        ckptstore.open(place)
    with pytest.raises(StoragePermissionError, match="HTTP 401"):
        ckptstore.open(place, username="reader", password="wrong")  # noqa: S106
    with ckptstore.open(place, username="reader", password="of the lab") as store:  # noqa: S106
        assert store.load("gpt@3")["w"][0] == 3.0


def test_what_is_no_store(url: str) -> None:
    """A missing folder, and a redirect that loses the name, are told apart from a store."""
    with pytest.raises(StoreNotFoundError, match=r"folder with store\.json"):
        ckptstore.open(f"{url}/none")
    with pytest.raises(ckptstore.CkptStoreError):
        ckptstore.open(f"{url}/moved/store")


def test_a_log_that_grows_behind_a_cache(url: str, folder: Path) -> None:
    """A cache that keeps 404s only delays a reader; a new index is never contradicted for long."""
    with (
        ckptstore.open(f"{url}/cached/store") as reader,
        ckptstore.open(folder / "www" / "store") as writer,
    ):
        before = len(reader.versions())  # the cache keeps now that there is no further commit
        for step in range(2000, 2005):
            writer.run("gpt").save({"w": torch.zeros(9)}, step=step)
            assert before <= len(reader.versions()) <= before + 5
        _wait(lambda: len(reader.versions()) == before + 5)
        writer.run("gpt").save({"w": torch.zeros(9)}, step=2005)
        writer.publish()  # its index names a commit that the cache says is missing
        with ckptstore.open(f"{url}/cached/store") as fresh:
            assert len(fresh.versions()) == before + 6


def test_packs_are_read_by_ranges(url: str, folder: Path) -> None:
    """The log of the server has 206s only for packs: none was sent whole."""
    with ckptstore.open(f"{url}/store") as store:
        store.load("gpt@1000")
    lines = (folder / "access.log").read_text().splitlines()
    packs = [line for line in lines if "GET /store/packs/" in line]
    assert packs
    assert all('" 206 ' in line for line in packs)
