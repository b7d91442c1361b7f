"""Every kind of settings of the POSIX backend keeps the contract, on a disk and in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import FolderDoor

from ckptstore.backends.base import Backend
from ckptstore.backends.posix import PosixBackend, open_posix
from ckptstore.errors import ObjectExistsError
from ckptstore.testing.conformance import BackendConformance


class PosixSuite(FolderDoor, BackendConformance):
    """Looks at the files themselves."""

    @pytest.mark.parametrize("other", [b"else", b"", b"longer than the first"])
    def test_put_keeps_what_is_there(self, backend: Backend, other: bytes) -> None:
        """Where names are created by ``link()``, other content under a taken key is refused."""
        backend.put("a/b", b"same")
        with pytest.raises(ObjectExistsError):
            backend.put("a/b", other)
        assert backend.get("a/b", bytes_max=100) == b"same"


class TestLocal(PosixSuite):
    """A file system on a disk."""

    backend_name = "local"
    kind = ""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a backend on a folder that is not there yet."""
        self.root = tmp_path / "not" / "yet"
        backend = open_posix(str(self.root), kind=self.kind)
        yield backend
        backend.close()

    def test_file_system_is_told(self, backend: Backend) -> None:
        """The file system's type is known, for doctor."""
        assert isinstance(backend, PosixBackend)
        assert backend.fs_type not in {"", "unknown"}


class TestTmpfs(PosixSuite):
    """A file system in memory, without fsync worth the name and with O_DIRECT of its own."""

    backend_name = "local"

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Return a backend in /dev/shm."""
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        backend = open_posix(f"file://{self.root}")
        assert backend.fs_type == "tmpfs"
        yield backend
        backend.close()
        shutil.rmtree(self.root)


class TestNfsSettingsOnDisk(TestLocal):
    """The settings for NFS, on a disk; on real NFS they run in the lab."""

    backend_name = "nfs"
    kind = "nfs"


class TestParallelSettingsOnDisk(TestLocal):
    """The settings for parallel file systems, on a disk; on real ones they run in the lab."""

    backend_name = "parallel"
    kind = "parallel"
