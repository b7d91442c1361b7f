"""SFTP, SMB and WebDAV through fsspec, and the handling of each file system class."""

from __future__ import annotations

import errno
import ftplib
import io
import os
from collections.abc import Mapping
from typing import Final

from fsspec.asyn import sync

from ckptstore.backends.fsspec_systems import FileServer, Foreign, Info, System, number_of

# Of one request at 64 KiB each; the library reads and writes at most 8 MiB at once.
_SMB_CREDITS: Final = 128
_NOT_IMPLEMENTED: Final = ("500", "502")
_ABSENT: Final = "550"
_PIECE_BYTES: Final = 1 << 16


class Sftp(FileServer):
    """SFTP by paramiko: one channel, which serves one thread at a time."""

    connections = 4
    defaults: Mapping[str, object] = {"timeout": 20, "banner_timeout": 20, "auth_timeout": 20}

    def opened(self, fs: Foreign, root: str) -> None:
        """Let no call wait for ever."""
        fs.ftp.get_channel().settimeout(60)

    def close(self, fs: Foreign) -> None:
        """End the connection and its thread."""
        fs.client.close()

    def lost(self, fs: Foreign) -> bool:
        """Ask the transport; what a call raises then has neither class nor number."""
        transport = fs.client.get_transport()
        return transport is None or not transport.is_active() or fs.ftp.get_channel().closed

    def read(self, fs: Foreign, path: str, start: int, end: int) -> bytes:
        """Request all pieces of the range at once; beyond the end there would be no answer."""
        with fs.ftp.open(path, "rb") as file:
            size = min(end, file.stat().st_size) - start
            return b"".join(file.readv([(start, size)])) if size > 0 else b""

    def send(self, fs: Foreign, path: str, data: bytes) -> None:
        """Send all pieces at once, and compare the length."""
        fs.ftp.putfo(io.BytesIO(data), path)

    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Rename as SFTP defines it; OpenSSH's extension would replace."""
        fs.ftp.rename(temp, path)

    def link(self, fs: Foreign, temp: str, path: str) -> None:
        """Send OpenSSH's extension, for which paramiko has no method."""
        from paramiko.sftp import CMD_EXTENDED

        fs.ftp._request(CMD_EXTENDED, "hardlink@openssh.com", temp, path)


class SshFs(FileServer):
    """SFTP by the package sshfs, over asyncssh: several channels, for all threads."""

    defaults: Mapping[str, object] = {"connect_timeout": 20, "keepalive_interval": 15}

    def lost(self, fs: Foreign) -> bool:
        """Ask the connection, which keep-alive messages end if nobody answers."""
        return bool(fs.client.is_closed())

    def read(self, fs: Foreign, path: str, start: int, end: int) -> bytes:
        """Seek and read, because its ``cat_file`` ignores the range."""
        with fs.open(path, "rb") as file:
            file.seek(start)
            return bytes(file.read(end - start))

    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Rename as SFTP defines it; OpenSSH's extension would replace."""
        self._call(fs, "rename", temp, path)

    def link(self, fs: Foreign, temp: str, path: str) -> None:
        """Make a hard link."""
        self._call(fs, "link", temp, path)

    def _call(self, fs: Foreign, name: str, temp: str, path: str) -> None:
        async def call() -> None:
            async with fs._pool.get() as channel:
                await getattr(channel, name)(temp, path)

        sync(fs.loop, call)


class Smb(FileServer):
    """SMB by smbprotocol, whose module keeps one connection for all objects of a process."""

    connections = 4
    strict = True
    defaults: Mapping[str, object] = {"timeout": 20, "register_session_retries": 0}
    _forgets = False

    def opened(self, fs: Foreign, root: str) -> None:
        """Share files with other readers, and no connection with forked children.

        Requests at once need credits of the server, without which they fail. A share that is not
        there is found out here: smbclient would ask for it elsewhere, and wait for ever.
        """
        import smbclient
        from smbclient._pool import _SMB_CONNECTIONS
        from smbprotocol.tree import TreeConnect

        login = {"username": fs.username, "password": fs.password, "encrypt": fs.encrypt}
        session = smbclient.register_session(fs.host, port=fs._port, **login)
        session.connection.echo(sid=session.session_id, credit_request=_SMB_CREDITS)
        fs.session = session
        tree = TreeConnect(session, _unc(fs, "/" + root.strip("/").partition("/")[0]))
        tree.connect()
        tree.disconnect()
        fs.share_access = fs.share_access or "rwd"
        if not Smb._forgets:
            os.register_at_fork(after_in_child=_SMB_CONNECTIONS.clear)
            Smb._forgets = True

    def lost(self, fs: Foreign) -> bool:
        """Ask the connection; smbclient makes another one then, without the login."""
        return not fs.session.connection.transport.connected

    def ls(self, fs: Foreign, folder: str) -> list[Info]:
        """List in one request; fsspec asks for each entry, and fails if one vanishes."""
        import smbclient

        with smbclient.scandir(_unc(fs, folder), port=fs._port) as entries:
            return [
                {
                    "name": entry.name,
                    "type": "directory" if entry.is_dir() else "file",
                    "size": entry.smb_info.end_of_file,
                    "mtime": entry.smb_info.last_write_time,
                }
                for entry in entries
            ]

    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Rename; ``replace`` would remove another file of that name."""
        import smbclient

        smbclient.rename(_unc(fs, temp), _unc(fs, path), port=fs._port)

    def link(self, fs: Foreign, temp: str, path: str) -> None:
        """Make a hard link."""
        import smbclient

        smbclient.link(_unc(fs, temp), _unc(fs, path), port=fs._port)


def _unc(fs: Foreign, path: str) -> str:
    return f"\\\\{fs.host}" + path.replace("/", "\\")


class WebDav(FileServer):
    """WebDAV by webdav4, whose servers look and write one after the other."""

    why_single = "WebDAV servers do not create a name atomically"

    def opened(self, fs: Foreign, root: str) -> None:
        """Take the login out of the URL: servers refuse the target of a MOVE with it."""
        url = fs.client.base_url
        if url.userinfo:
            fs.client.http.auth = (url.username, url.password)
            fs.client.base_url = url.copy_with(username="", password="")

    def close(self, fs: Foreign) -> None:
        """End the connections of httpx."""
        fs.client.http.close()

    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Send MOVE; the file system's ``mv`` would copy."""
        fs.client.move(temp, path, overwrite=False)


class Ftp(FileServer):
    """FTP by ftplib: one command at a time, and one reply for all that fails."""

    connections = 4
    strict = True
    why_single = "FTP cannot create a name only if it is absent"

    def close(self, fs: Foreign) -> None:
        """Hang up."""
        fs.ftp.close()

    def ls(self, fs: Foreign, folder: str) -> list[Info]:
        """List, and tell an absent folder from one that may not be read; fsspec hides failures."""
        try:
            found = self._listed(fs, folder or "/")
        except ftplib.error_perm as error:
            raise self._refused(fs, folder, "directory") from error
        kinds = {"dir": "directory", "file": "file"}
        times = ((facts.get("modify", ""), name, facts) for name, facts in found)
        return [
            {
                "name": name,
                "type": kinds.get(facts.get("type", ""), "other"),
                "size": int(facts.get("size", 0)),
                "modified": f"{time[:8]}T{time[8:14]}+0000",
            }
            for time, name, facts in times
        ]

    def _listed(self, fs: Foreign, folder: str) -> list[tuple[str, dict[str, str]]]:
        """Return names and facts, by LIST from a server without MLSD."""
        from fsspec.implementations.ftp import _mlsd2

        try:
            return list(fs.ftp.mlsd(folder))
        except ftplib.error_perm as error:
            if not str(error).startswith(_NOT_IMPLEMENTED):
                raise
            return list(_mlsd2(fs.ftp, folder))

    def info(self, fs: Foreign, path: str) -> Info:
        """Look into the listing of the folder, as fsspec does."""
        folder, _, name = path.rpartition("/")
        for entry in self.ls(fs, folder):
            if entry["name"].rpartition("/")[2] == name:
                return entry
        raise FileNotFoundError(path)

    def _refused(self, fs: Foreign, path: str, kind: str) -> OSError:
        """Return the error for a path that the server refuses with one reply for many reasons."""
        path = path.rstrip("/")
        try:
            if not path or self.info(fs, path)["type"] == kind:
                return PermissionError(errno.EACCES, "it is there, but refused")
        except FileNotFoundError as error:
            return error
        return FileNotFoundError(errno.ENOENT, f"no {kind}")

    def read(self, fs: Foreign, path: str, start: int, end: int) -> bytes:
        """Receive from `start` on, and hang up at `end`."""
        data = bytearray()
        try:
            fs.ftp.voidcmd("TYPE I")
            with fs.ftp.transfercmd(f"RETR {path}", rest=start or None) as connection:
                while piece := connection.recv(min(_PIECE_BYTES, end - start - len(data))):
                    data += piece
        except ftplib.error_perm as error:
            refused = self._refused(fs, path, "file")
            there = isinstance(refused, PermissionError)
            if start and there and self.info(fs, path)["size"] <= start:
                return b""  # servers refuse to begin beyond the end
            raise refused from error
        try:
            fs.ftp.voidresp()
        except ftplib.error_temp:  # it was hung up on, or has failed
            if len(data) < end - start:
                raise
        return bytes(data)

    def send(self, fs: Foreign, path: str, data: bytes) -> None:
        """Send the file as one transfer."""
        try:
            fs.ftp.storbinary(f"STOR {path}", io.BytesIO(data))
        except ftplib.error_perm as error:
            if number_of(error) is not None:
                raise
            raise self._refused(fs, path.rpartition("/")[0], "directory") from error

    def rename(self, fs: Foreign, temp: str, path: str) -> None:
        """Look, then rename: most servers replace."""
        if self._is_taken(fs, path):
            raise FileExistsError(errno.EEXIST, "taken")
        fs.ftp.rename(temp, path)

    def _is_taken(self, fs: Foreign, path: str) -> bool:
        """Ask for the size, or look into the listing on a server that does not tell sizes."""
        try:
            fs.ftp.voidcmd("TYPE I")  # sizes of texts are refused
            return fs.ftp.size(path) is not None
        except ftplib.error_perm as error:
            if str(error).startswith(_ABSENT):
                return False
        folder, _, name = path.rpartition("/")
        return name in [entry["name"] for entry in self.ls(fs, folder)]


class OneReader(System):
    """OneReaders, whose readers share one position in one file."""

    connections = 1


_SYSTEMS: Final[Mapping[str, type[System]]] = {
    "fsspec.implementations.sftp.SFTPFileSystem": Sftp,
    "sshfs.spec.SSHFileSystem": SshFs,
    "fsspec.implementations.smb.SMBFileSystem": Smb,
    "webdav4.fsspec.WebdavFileSystem": WebDav,
    "fsspec.implementations.ftp.FTPFileSystem": Ftp,
    "fsspec.implementations.tar.TarFileSystem": OneReader,
    "fsspec.implementations.zip.ZipFileSystem": OneReader,
    "fsspec.implementations.libarchive.LibOneReaderFileSystem": OneReader,
}
"""Systems by the name of the file system's class, which is not imported for that."""


def system_of(kind: type) -> System:
    """Return the handling of a file system class."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_SYSTEMS[name] for name in names if name in _SYSTEMS), System)()
