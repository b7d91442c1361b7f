"""The conformance suite on a shared file system: one mount is tested, the other a side door."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from doors import FolderDoor

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance
from labkit.systems import TwoMounts

__all__ = ["MountSuite"]


class MountSuite(FolderDoor, BackendConformance):
    """Subclass in a module that has a fixture ``mounted``, the running file system."""

    backend_name = "parallel"

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

    def raw_write(self, key: str, data: bytes) -> None:
        """Write a file through the other mount, and close it there."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
