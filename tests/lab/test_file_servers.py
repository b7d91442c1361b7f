"""SFTP, SMB, WebDAV and FTP through fsspec on real servers, as docs/howto/file-servers.md says."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
from labkit.campaign import moment, rounds
from labkit.file_suite import FileSuite, place_of
from labkit.peers import Peer, PeerError
from labkit.saving import Place, Promises, assert_kept, collect, note, start_writers
from labkit.systems import FileServers, LabPool

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.probe import probe
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import CreateConformance, ProcessConformance

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "file-servers.md"


def rows() -> dict[str, tuple[str, str]]:
    """Return put-if-absent and the writers of each way, by the table of the page."""
    table: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and "://" in cells[0]:
            scheme, package = cells[0].strip("`").partition(":")[0], cells[1].strip("`")
            table[package if scheme == "sftp" else scheme] = (cells[2], cells[3])
    return table


@pytest.fixture(scope="module")
def servers(lab_pool: LabPool) -> FileServers:
    """Start the four servers."""
    return lab_pool.get(FileServers)


def kill_savers(saver: Peer, place: Place, count: int) -> Promises:
    """Kill savers of a store, one after the other, each at another moment; return the promises."""
    promises = Promises()
    for turn in range(count):
        (call,) = start_writers(saver, place, [turn], saves=0)
        pid = call.next()["pid"]
        call.next()  # the first promise: the store is open
        time.sleep(moment(turn, 0.0, 1.0))  # the moment itself is what is varied
        saver.ask("kill", pid=pid)
        note([call], promises)
    return promises


@pytest.fixture(params=["paramiko", "sshfs", "smb", "webdav", "ftp"])
def way(request: pytest.FixtureRequest) -> str:
    """Return one of the ways to reach a server."""
    name: str = request.param
    return name


def test_doctor_says_what_the_page_says(servers: FileServers, way: str) -> None:
    """The probe finds what the table promises, no more and no less; all other checks hold."""
    place = place_of(servers, way)
    with closing(open_backend(place.url, **place.options)) as backend:
        report = probe(backend)
    verdict, writers = rows()[way]
    assert report.put_if_absent.value == verdict
    assert report.passed is (writers == "many")
    failed = {check.name for check in report.checks if not check.passed}
    assert failed == (set() if writers == "many" else {"create twice"})


def test_writers_of_the_page(servers: FileServers, saver: Peer, way: str) -> None:
    """Four processes save at once where the table says many; elsewhere that is refused."""
    place = place_of(servers, way)
    if rows()[way][1] == "many":
        promises = collect(start_writers(saver, place, range(4), saves=6))
        assert promises.failed == []
        found = assert_kept(saver, place, promises.acked)
        assert found["versions"] == len(promises.acked) == 24
        return
    with pytest.raises(PeerError) as refused:
        start_writers(saver, place, [0], saves=1)[0].result()
    assert refused.value.kind == "unsafe_backend"
    alone = Place(url=place.url, options=place.options | {"single_writer": True})
    promises = collect(start_writers(saver, alone, [0], saves=6))
    assert promises.failed == []
    assert assert_kept(saver, alone, promises.acked)["versions"] == 6


SERVERS = {"paramiko": "sshd", "sshfs": "sshd", "smb": "smbd", "webdav": "webdav", "ftp": "ftpd"}


def test_a_server_is_restarted(servers: FileServers, way: str) -> None:
    """An open store goes on: lost connections are made again, with the login."""
    place = place_of(servers, way)
    alone = rows()[way][1] != "many"
    with ckptstore.open(place.url, create=True, single_writer=alone, **place.options) as store:
        for step in (1, 2):
            store.run("r").save({"w": step}, step=step)
            servers.tell("stop", SERVERS[way])
            servers.tell("start", SERVERS[way])
        assert store.load("r@1") == {"w": 1}
        assert store.load("r") == {"w": 2}


def test_kills(servers: FileServers, saver: Peer, way: str) -> None:
    """Savers are killed: what they acknowledged is there, whole, and the next one can save.

    A collection removes the temporary files that they left.
    """
    place = place_of(servers, way)
    if rows()[way][1] != "many":
        place = Place(url=place.url, options=place.options | {"single_writer": True})
    promises = kill_savers(saver, place, rounds(5, 50))
    assert len(promises.acked) >= 5
    assert_kept(saver, place, promises.acked)
    with ckptstore.open(place.url, **place.options) as store:
        store.repo.backend.remove_leftovers(modified_before=store.repo.environment.now_ms())
        name = place.url.rpartition("/")[2]
    folder = Path(servers.login()["folder"]) / name
    assert [path for path in folder.rglob(".tmp-*") if path.is_file()] == []


class TestParamiko(FileSuite, CreateConformance):
    """SFTP through fsspec's own implementation."""

    way = "paramiko"
    test_race_of_processes = ProcessConformance.test_race_of_processes

    def test_used_in_a_forked_child(self, backend: Backend) -> None:
        """A forked child works; a spawned one does not know the scheme, which is the lab's own."""
        ProcessConformance.test_used_in_a_child(self, backend, "fork")  # type: ignore[arg-type]


class TestSshfs(FileSuite, CreateConformance):
    """SFTP through the package sshfs."""

    way = "sshfs"
    test_used_in_a_child = ProcessConformance.test_used_in_a_child
    test_race_of_processes = ProcessConformance.test_race_of_processes


class TestSmb(FileSuite, CreateConformance):
    """SMB through smbprotocol."""

    way = "smb"
    test_used_in_a_child = ProcessConformance.test_used_in_a_child
    test_race_of_processes = ProcessConformance.test_race_of_processes


class TestWebDav(FileSuite):
    """WebDAV through webdav4: a single writer."""

    way = "webdav"
    test_used_in_a_child = ProcessConformance.test_used_in_a_child


class TestFtp(FileSuite):
    """FTP through ftplib: a single writer."""

    way = "ftp"
    test_used_in_a_child = ProcessConformance.test_used_in_a_child
