"""Mistakes that people make with file servers: each message names the cause, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from labkit.file_suite import place_of
from labkit.peers import Peer, PeerError
from labkit.saving import Place
from labkit.systems import FileServers, LabPool

WAYS = ["paramiko", "sshfs", "smb", "webdav", "ftp"]
SECRET = "wrong-password"  # noqa: S105 - of no one


@pytest.fixture(scope="module")
def servers(lab_pool: LabPool) -> FileServers:
    """Start the four servers."""
    return lab_pool.get(FileServers)


def told(saver: Peer, place: Place, **options: object) -> tuple[str, str]:
    """Return kind and message of the error that a new store at a place raises."""
    words = place.options | {"single_writer": True} | options
    with pytest.raises(PeerError) as caught:
        saver.ask("create", timeout_s=100, url=place.url, options=words)
    assert SECRET not in str(caught.value)
    return caught.value.kind, str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_password(servers: FileServers, saver: Peer, way: str) -> None:
    """It is a lack of permission, and the login is what to check."""
    kind, text = told(saver, place_of(servers, way, password=SECRET))
    assert (kind, "check the " in text) == ("storage_permission", True), text


@pytest.mark.parametrize("way", WAYS)
def test_misspelt_option(servers: FileServers, saver: Peer, way: str) -> None:
    """The option is named, also where the library would swallow it."""
    kind, text = told(saver, place_of(servers, way), pasword=SECRET)
    assert (kind, "'pasword'" in text) == ("invalid_url", True), text


@pytest.mark.parametrize(
    ("way", "server"),
    [
        ("paramiko", "sshd"), ("sshfs", "sshd"), ("smb", "smbd"), ("webdav", "webdav"),
        ("ftp", "ftpd"),
    ],
)  # fmt: skip
def test_server_away(servers: FileServers, saver: Peer, way: str, server: str) -> None:
    """It is called transient, after the tries of one call."""
    servers.tell("stop", server)
    try:
        kind, text = told(saver, place_of(servers, way))
    finally:
        servers.tell("start", server)
    assert (kind, "tried 8 times" in text) == ("storage_transient", True), text


@pytest.mark.parametrize("way", ["smb", "webdav"])
def test_missing_share(servers: FileServers, saver: Peer, way: str) -> None:
    """Neither a missing share nor a missing base URL is made; the message asks for it."""
    kind, text = told(saver, place_of(servers, way, share="nosuch"))
    cause = {"smb": "is there such a ", "webdav": "ResourceNotFound"}[way]
    assert (kind, cause in text) == ("storage", True), text


@pytest.mark.parametrize("way", WAYS)
def test_missing_folders_are_made(servers: FileServers, saver: Peer, way: str) -> None:
    """As on a disk: the store's folder, and those above it."""
    place = place_of(servers, way, f"no/such/{way}")
    options = place.options | {"single_writer": True}
    assert saver.ask("create", url=place.url, options=options)["url"]


@pytest.mark.parametrize("way", WAYS)
def test_no_right_to_write(servers: FileServers, saver: Peer, way: str) -> None:
    """A folder of somebody else, a share that is read-only, a user who may only read."""
    login = servers.login()
    locked = Path(login["folder"]) / "locked"
    locked.mkdir(mode=0o755, exist_ok=True)
    place = {
        "webdav": lambda: place_of(servers, way, share="reading"),
        "ftp": lambda: place_of(servers, way, username="reader"),
    }.get(way, lambda: place_of(servers, way, "locked/store"))()
    kind, text = told(saver, place)
    assert kind in {"storage_permission", "storage"}, text
    causes = ("check the ", "may you write there?", "550 Not enough privileges")
    assert any(cause in text for cause in causes), text


@pytest.mark.parametrize("way", ["paramiko", "sshfs", "smb"])
def test_no_right_to_list(servers: FileServers, saver: Peer, way: str) -> None:
    """A folder that may be entered and not listed is not an empty one."""
    login = servers.login()
    hidden = Path(login["folder"]) / "hidden" / "commits"
    hidden.mkdir(parents=True, exist_ok=True)
    hidden.chmod(0o711)
    os.chown(hidden, 0, 0)
    kind, text = told(saver, place_of(servers, way, "hidden"))
    assert (kind, "check the " in text) == ("storage_permission", True), text
