"""The conformance suites on file servers of fsspec; the side door is the served folder."""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from doors import FolderDoor
from ports import LOOPBACK

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import ListingConformance, ObjectConformance
from labkit.saving import Place
from labkit.systems import FileServers

__all__ = ["PLACES", "FileSuite", "place_of"]

# The package sshfs takes the name sftp over where it is installed; fsspec's own has this one here.
fsspec.register_implementation("paramiko", "fsspec.implementations.sftp.SFTPFileSystem")

PLACES: Mapping[str, str] = {
    "paramiko": "paramiko://{host}:{SFTP_PORT}{folder}/{name}",
    "sshfs": "sftp://{host}:{SFTP_PORT}{folder}/{name}",
    "smb": "smb://{host}:{SMB_PORT}/data/{name}",
    "webdav": "webdav://{name}",
    "ftp": "ftp://{host}:{FTP_PORT}/data/{name}",
}
"""URL of a new folder by the way to reach it."""


def place_of(
    servers: FileServers, way: str, name: str = "", share: str = "data", **changed: str
) -> Place:
    """Return the location of a folder by one of the ways; new if it has no name.

    Parameters
    ----------
    share
        Folder of the servers in which it lies.
    changed
        Parts of the login that differ.
    """
    login: dict[str, Any] = servers.login() | changed
    folder = login.pop("folder")
    name = name or f"store-{secrets.token_hex(8)}"
    url = PLACES[way].format(host=LOOPBACK, folder=folder, name=name, **servers.ports)
    if way == "webdav":
        user = f"{login['username']}:{login['password']}"
        port = servers.ports["WEBDAV_PORT"]
        login = {"base_url": f"http://{user}@{LOOPBACK}:{port}/{share}"}
    return Place(url=url.replace("/data/", f"/{share}/"), options=login)


class FileSuite(FolderDoor, ObjectConformance, ListingConformance):
    """Subclass in a module that has a fixture ``servers``, and set the way."""

    backend_name = "fsspec"
    secrets = ("fish+chips",)
    way: str

    @pytest.fixture
    def backend(self, servers: FileServers) -> Iterator[Backend]:
        """Open a new folder through its server."""
        name = f"conformance-{secrets.token_hex(8)}"
        login = servers.login()
        self.root = Path(login["folder"]) / name
        self.owner = pwd.getpwnam(login["username"]).pw_uid
        place = place_of(servers, self.way, name)
        backend = open_backend(place.url, retry=False, **place.options)
        yield backend
        backend.close()

    def raw_write(self, key: str, data: bytes) -> None:
        """Write a file that belongs to the user of the servers, in folders of that user."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        while path != self.root.parent:
            os.chown(path, self.owner, -1)
            path = path.parent
