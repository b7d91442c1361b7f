"""FTP through fsspec and ftplib: listings, ranges and refusals, which fsspec hides."""

from __future__ import annotations

import errno
import ftplib
import io
from typing import Final

from ckptstore.backends.fsspec_errors import number_of
from ckptstore.backends.fsspec_systems import FileServer, Foreign, Info

_NOT_IMPLEMENTED: Final = ("500", "502")
_ABSENT: Final = "550"
_PIECE_BYTES: Final = 1 << 16


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
