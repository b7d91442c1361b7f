"""The storage systems of the lab: started by the scripts of tests/lab/systems, and always ended.

Each script keeps all that belongs to one running system below one folder, so that ``down`` ends
exactly what ``up`` started. A system that does not start raises: the tests fail. Only small hosts
are skipped, where the processor cannot run them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from ports import free_port

from labkit import processor

__all__ = [
    "Ceph", "FileServers", "Gluster", "LabError", "LabPool", "LabSystem", "Linux", "LoopDisk",
    "MooseFs", "Mounts", "Nfs", "S3Server", "Swift", "TwoMounts",
]  # fmt: skip

SCRIPTS = Path(__file__).parents[2] / "lab" / "systems"


System = TypeVar("System", bound="LabSystem")


class LabError(Exception):
    """A system did not obey a command; the message holds its output."""


class LabSystem:
    """One system, running between ``start`` and ``stop``.

    Parameters
    ----------
    folder
        Folder of this system; must not exist yet.
    environment
        Settings of the script, as it documents them.
    """

    script: ClassVar[str]
    """File name in tests/lab/systems."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._environment = {
            **os.environ, "LAB": str(folder), "PYTHON": sys.executable, **environment,
        }  # fmt: skip

    def up_words(self) -> tuple[str, ...]:
        """Return the script's arguments for starting it."""
        return ("up",)

    def command(self, *words: str) -> list[str]:
        """Return the command line that gives `words` to the script."""
        return [str(SCRIPTS / self.script), *words]

    def tell(self, *words: str, timeout_s: float = 240) -> str:
        """Run the script with `words` and return its output.

        Raises
        ------
        LabError
            The script fails or takes longer.
        """
        # A file and not a pipe: daemons that it leaves behind would keep a pipe open.
        with (self.folder.parent / f"{self.folder.name}.said").open("w+b") as said:
            try:
                status = subprocess.run(
                    self.command(*words), env=self._environment, stdin=subprocess.DEVNULL,
                    stdout=said, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = -1
            said.seek(0)
            text = said.read().decode(errors="replace")
        if status:
            msg = f"{self.script} {' '.join(words)}: status {status}\n{text[-4000:]}{self._logs()}"
            raise LabError(msg)
        return text

    def popen(self, *words: str) -> subprocess.Popen[bytes]:
        """Run the script with `words`, its standard input and output being pipes."""
        return subprocess.Popen(
            self.command(*words), env=self._environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self) -> None:
        """Install missing parts and start; stops everything again if that fails."""
        self.tell("install", timeout_s=1200)
        try:
            self.tell(*self.up_words())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of this system and remove its folder; harmless when repeated."""
        if self.folder.exists():
            self.tell("down")

    def _logs(self) -> str:
        """Return the last lines of each log, for the error message."""
        texts = []
        for log in sorted((self.folder / "log").glob("*.out")):
            tail = log.read_text(errors="replace")[-800:]
            if tail.strip():
                texts.append(f"\n--- {log.name}\n{tail}")
        return "".join(texts)


class S3Server(LabSystem):
    """A system that speaks S3."""

    def options(self) -> dict[str, str]:
        """Return ``endpoint_url``, ``key`` and ``secret``, as storage options."""
        lines = self.tell("env").split()
        return dict(line.split("=", 1) for line in lines)


class TwoMounts(LabSystem):
    """A shared file system, mounted twice on this machine by clients that cache separately."""

    @property
    def mounts(self) -> tuple[Path, Path]:
        """Return the two mount points."""
        return self.folder / "mnt1", self.folder / "mnt2"


class Ceph(S3Server, TwoMounts):
    """Ceph with its S3 gateway and CephFS by two ceph-fuse mounts."""

    script = "ceph.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        ports = {"RGW_PORT": str(free_port()), "MON_PORT": str(free_port())}
        super().__init__(folder, **(ports | environment))

    def up_words(self) -> tuple[str, ...]:
        """Start all parts."""
        return ("up", "rgw", "fs", "mgr")


class Gluster(TwoMounts):
    """GlusterFS; ``LAYOUT`` is ``replica`` (3 copies) or ``disperse`` (4+2)."""

    script = "gluster.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder, **environment)
        self._layout = environment["LAYOUT"]

    def up_words(self) -> tuple[str, ...]:
        """Start with the layout in the settings."""
        return ("up", self._layout)


class MooseFs(TwoMounts):
    """MooseFS with two chunkservers."""

    script = "moosefs.sh"


class Mounts(TwoMounts):
    """One kind of mount, ``KIND`` of the script's; only sshfs has a second one."""

    script = "mounts.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder, **({"PORT": str(free_port())} | environment))
        self._kind = environment["KIND"]

    def up_words(self) -> tuple[str, ...]:
        """Start with the kind in the settings."""
        return ("up", self._kind)


class Swift(S3Server):
    """OpenStack Swift's s3api, which refuses the conditions of a write."""

    script = "swift.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        ports = {"PORT": str(free_port()), "BASE": str(free_port(0, 1, 2, 9))}
        super().__init__(folder, **(ports | environment))


class FileServers(LabSystem):
    """SFTP, SMB, WebDAV and FTP servers of one folder, which fsspec reaches."""

    script = "fileservers.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        names = ("SFTP_PORT", "SMB_PORT", "WEBDAV_PORT", "FTP_PORT")
        self.ports = {name: free_port() for name in names}
        ports = {name: str(port) for name, port in self.ports.items()}
        super().__init__(folder, **(ports | environment))

    def login(self) -> dict[str, str]:
        """Return ``username``, ``password`` and ``folder``, which the servers serve."""
        return dict(line.split("=", 1) for line in self.tell("env").split())


class LoopDisk(LabSystem):
    """A file system of its own, ``FS`` of the script's; power cuts on ext4 and xfs only."""

    script = "loop_disk.sh"

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder, **environment)
        self._fs = environment["FS"]
        self._megabytes = environment.get("MB", "640")

    @property
    def mount(self) -> Path:
        """Return the mount point."""
        return self.folder / "mnt"

    def up_words(self) -> tuple[str, ...]:
        """Start with the file system and the ``MB`` in the settings; xfs needs 300 at least."""
        return ("up", self._fs, self._megabytes)


class Hosts(LabSystem):
    """Small Linux hosts of their own: user-mode Linux."""

    def start(self) -> None:
        """Start, or skip the test where the processor can run no host."""
        if reason := processor.refusal():
            pytest.skip(reason)
        super().start()


class Linux(Hosts):
    """Small hosts, started one by one."""

    script = "uml.sh"

    def up_words(self) -> tuple[str, ...]:
        """Start no host yet."""
        return ("prepare",)


class Nfs(Hosts):
    """A Linux NFS server and two Linux clients c1 and c2, each with a kernel of its own.

    Settings besides the script's: ``VERSION`` is 4.2 or 3.
    """

    script = "nfs.sh"
    mount = "/mnt/a"
    """Mount point of the export on both clients."""

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder, **environment)
        self._version = environment["VERSION"]

    def up_words(self) -> tuple[str, ...]:
        """Start with the version in the settings."""
        return ("up", self._version)


class LabPool:
    """Keeps at most one system running: the machine is small, and they are heavy.

    Getting the system that runs already is free, so tests of one system should be consecutive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: LabSystem | None = None
        self._key: tuple[object, ...] = ()
        self._count = 0

    def get(self, kind: type[System], **environment: str) -> System:
        """Return the running system of this kind and settings, after ending any other."""
        key = (kind, *sorted(environment.items()))
        if not isinstance(self._running, kind) or key != self._key:
            self.close()
            self._count += 1
            system = kind(self._folder / f"{self._count}-{kind.__name__.lower()}", **environment)
            system.start()
            self._running, self._key = system, key
            return system
        return self._running

    def close(self) -> None:
        """End the running system."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@contextmanager
def pool(folder: Path) -> Iterator[LabPool]:
    """Yield a pool that is always closed."""
    made = LabPool(folder)
    try:
        yield made
    finally:
        made.close()
