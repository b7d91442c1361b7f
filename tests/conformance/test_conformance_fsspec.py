"""The generic fsspec backend keeps what part of the contract its file systems can keep."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.fsspec_backend import open_fsspec
from ckptstore.testing.conformance import ListingConformance, ObjectConformance, ProcessConformance


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


class TestFsspecLocal(ObjectConformance, ListingConformance):
    """fsspec's own local files, which serve a single writer."""

    backend_name = "fsspec"

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a backend on a folder, through fsspec and not through ours."""
        self.root = tmp_path
        backend = open_fsspec(f"local://{tmp_path}")
        yield backend
        backend.close()

    def raw_read(self, key: str) -> bytes | None:
        """Read the file."""
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def raw_write(self, key: str, data: bytes) -> None:
        """Write the file."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_keys(self) -> set[str]:
        """Walk the tree."""
        return {
            os.path.relpath(Path(folder) / name, self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
        }

    test_used_in_a_child = ProcessConformance.test_used_in_a_child
