"""The conformance suite on a shared file system: one mount is tested, the other a side door."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance
from labkit.systems import TwoMounts

__all__ = ["MountSuite"]


class MountSuite(BackendConformance):
    """Subclass in a module that has a fixture ``mounted``, the running file system."""

    backend_name = "parallel"
    root: Path

    @pytest.fixture
    def backend(self, mounted: TwoMounts) -> Iterator[Backend]:
        """Open a new folder through the first mount; the side door is the second."""
        name = f"conformance-{secrets.token_hex(8)}"
        one, two = mounted.mounts
        self.root = two / name
        backend = open_backend(one / name, retry=False)
        assert backend.name == self.backend_name, "the mount table tells what this is"
        yield backend
        backend.close()

    def raw_read(self, key: str) -> bytes | None:
        """Read the file through the other mount."""
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None

    def raw_write(self, key: str, data: bytes) -> None:
        """Write a file through the other mount, and close it there."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def raw_keys(self) -> set[str]:
        """Walk the tree through the other mount, hidden files included."""
        return {
            os.path.relpath(Path(folder) / name, self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
        }
