"""Side doors of conformance suites: look at what a backend stores, past the backend under test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from buckets import AzureBucket, GcsBucket, S3Bucket, open_bucket

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.testing.side_door import SideDoor

__all__ = ["BucketDoor", "FolderDoor", "MemoryDoor"]


class FolderDoor(SideDoor):
    """Looks at the files of a folder."""

    root: Path

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


class BucketDoor(SideDoor):
    """Looks into a bucket by a client that is not the one under test."""

    bucket: S3Bucket | GcsBucket | AzureBucket

    def opened(self, bucket: S3Bucket | GcsBucket | AzureBucket, **more: Any) -> Iterator[Backend]:  # noqa: ANN401
        """Open a backend on a prefix of a new bucket, without retries; close it at the end."""
        self.bucket = bucket
        with closing(open_bucket(bucket.url, **bucket.options(), **more)) as backend:
            yield backend

    def raw_read(self, key: str) -> bytes | None:
        """Read the object."""
        return self.bucket.read(key)

    def raw_write(self, key: str, data: bytes) -> None:
        """Write the object."""
        self.bucket.write(key, data)

    def raw_keys(self) -> set[str]:
        """List the objects."""
        return self.bucket.keys()


class MemoryDoor(SideDoor):
    """Looks into the dictionary of a memory space that nobody else has."""

    space: MemoryBackend

    def opened(self) -> Backend:
        """Return another backend on the space."""
        return MemoryBackend(self.space.url.partition("://")[2])

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Return a backend on a new space."""
        self.space = MemoryBackend(uuid.uuid4().hex)
        yield self.opened()
        self.space.close()

    def raw_read(self, key: str) -> bytes | None:
        """Look into the dictionary."""
        item = self.space.objects.get(key)
        return None if item is None else item.data

    def raw_write(self, key: str, data: bytes) -> None:
        """Change the dictionary, by the key rules: it holds nothing else."""
        try:
            self.space.put(key, data)
        except ValueError:
            return

    def raw_keys(self) -> set[str]:
        """Return the dictionary's keys."""
        return set(self.space.objects)
