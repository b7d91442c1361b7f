"""Memory keeps the contract, as the oracle; fsspec's file systems, what part of it they can."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from doors import FolderDoor, MemoryDoor

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.fsspec_backend import open_fsspec
from ckptstore.backends.memory import MemoryBackend
from ckptstore.testing.conformance import (
    CreateConformance,
    ListingConformance,
    ObjectConformance,
    ProcessConformance,
)


class TestMemory(MemoryDoor, ObjectConformance, ListingConformance, CreateConformance):
    """Without the tests of processes: a memory store lives in one."""

    backend_name = "memory"

    def test_two_instances_share(self, backend: Backend) -> None:
        """Instances of one name see the same objects; another name sees others."""
        backend.put("a", b"1")
        (info,) = self.opened().list("")
        assert isinstance(info, ObjectInfo)
        assert list(MemoryBackend("another").list("")) == []


class TestFsspecMemory(ObjectConformance, ListingConformance):
    """fsspec's own memory file system, which lives in one process and locks nothing."""

    backend_name = "fsspec"

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Return a backend on a folder of the one memory that fsspec has."""
        self.root = f"/{uuid.uuid4().hex}"
        self.fs = fsspec.filesystem("memory")
        backend = open_fsspec(f"memory:/{self.root}")
        yield backend
        backend.close()
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)

    def raw_read(self, key: str) -> bytes | None:
        """Look into fsspec's dictionary."""
        file = self.fs.store.get(f"{self.root}/{key}")
        return None if file is None else bytes(file.getvalue())

    def raw_write(self, key: str, data: bytes) -> None:
        """Write by another file system object."""
        self.fs.pipe_file(f"{self.root}/{key}", data)

    def raw_keys(self) -> set[str]:
        """Look into fsspec's dictionary."""
        head = f"{self.root}/"
        return {path.removeprefix(head) for path in self.fs.store if path.startswith(head)}


class TestFsspecLocal(FolderDoor, ObjectConformance, ListingConformance):
    """fsspec's own local files, which serve a single writer."""

    backend_name = "fsspec"

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a backend on a folder, through fsspec and not through ours."""
        self.root = tmp_path
        backend = open_fsspec(f"local://{tmp_path}")
        yield backend
        backend.close()

    test_used_in_a_child = ProcessConformance.test_used_in_a_child
