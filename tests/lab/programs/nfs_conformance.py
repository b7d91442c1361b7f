"""The conformance suite on NFS, run by pytest inside a client; the folder comes from outside.

Not collected by the lab itself: its name does not begin with ``test_``. The side door is a file
descriptor of the client's own: what the other host sees is the subject of test_nfs.py.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.registry import open_backend
from ckptstore.testing.conformance import BackendConformance

MOUNT = Path("/mnt/a")


class TestNfs(BackendConformance):
    """A real NFS client."""

    backend_name = "nfs"
    root: Path

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Open a new folder of the export."""
        self.root = MOUNT / f"conformance-{secrets.token_hex(8)}"
        backend = open_backend(self.root, retry=False)
        assert backend.name == self.backend_name, "the mount table tells what this is"
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
        """Walk the tree, hidden files included."""
        return {
            os.path.relpath(Path(folder) / name, self.root)
            for folder, _, names in os.walk(self.root)
            for name in names
        }
