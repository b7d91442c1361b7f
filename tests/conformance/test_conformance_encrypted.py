"""An encrypted backend keeps the contract of the backend below it: memory, files, S3."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from buckets import S3Bucket
from local_servers import SECRET

from ckptstore.backends.base import Backend
from ckptstore.backends.encrypted import EncryptedBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.posix import open_posix
from ckptstore.backends.registry import open_backend
from ckptstore.backends.sealing import DataKey, salt_of
from ckptstore.format.keys import KEYS_PREFIX, STORE_KEY
from ckptstore.format.segments import HEADER_BYTES, SegmentLayout
from ckptstore.testing.conformance import (
    BackendConformance,
    CreateConformance,
    ListingConformance,
    ObjectConformance,
)

MATERIAL = bytes(range(32))
SEGMENT_BYTES = 4096
"""Small, so that the objects of the suite have many."""


class SealedSideDoor:
    """Looks at what is stored through a key, but not through the backend under test."""

    secrets: ClassVar[tuple[str, ...]] = (MATERIAL.hex(), repr(MATERIAL))
    layout = SegmentLayout(segment_bytes=SEGMENT_BYTES)

    def stored(self, key: str) -> bytes | None:
        """Return the bytes as they are stored."""
        raise NotImplementedError

    def store(self, key: str, data: bytes) -> None:
        """Store bytes as they are."""
        raise NotImplementedError

    def raw_read(self, key: str) -> bytes | None:
        """Decrypt segment by segment."""
        data = self.stored(key)
        if data is None or key == STORE_KEY or key.startswith(KEYS_PREFIX):
            return data
        sealer = DataKey(MATERIAL).sealer(key, salt_of(data[:HEADER_BYTES], where=key))
        step = SEGMENT_BYTES + 16
        parts = [data[at : at + step] for at in range(HEADER_BYTES, len(data), step)]
        return b"".join(
            sealer.open(index, part, last=index + 1 == len(parts))
            for index, part in enumerate(parts)
        )

    def raw_write(self, key: str, data: bytes) -> None:
        """Encrypt segment by segment, with a salt of our own."""
        if key == STORE_KEY or key.startswith(KEYS_PREFIX):
            self.store(key, data)
            return
        sealer = DataKey(MATERIAL).sealer(key, uuid.uuid4().bytes * 2)
        starts = range(0, max(len(data), 1), SEGMENT_BYTES)
        parts = [
            sealer.seal(
                index, data[at : at + SEGMENT_BYTES], last=at + SEGMENT_BYTES >= max(len(data), 1)
            )
            for index, at in enumerate(starts)
        ]
        self.store(key, b"".join((sealer.header, *parts)))


def encrypted(inner: Backend) -> EncryptedBackend:
    """Return the backend under test."""
    return EncryptedBackend(inner, DataKey(MATERIAL), segment_bytes=SEGMENT_BYTES)


class TestEncryptedMemory(SealedSideDoor, ObjectConformance, ListingConformance, CreateConformance):
    """Over memory."""

    backend_name = "memory"

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Return a backend on a space that nobody else has."""
        self.space = MemoryBackend(uuid.uuid4().hex)
        yield encrypted(MemoryBackend(self.space.url.partition("://")[2]))
        self.space.close()

    def stored(self, key: str) -> bytes | None:
        """Look into the dictionary."""
        item = self.space.objects.get(key)
        return None if item is None else item.data

    def store(self, key: str, data: bytes) -> None:
        """Change the dictionary, by the key rules: it holds nothing else."""
        try:
            self.space.put(key, data)
        except ValueError:
            return

    def raw_keys(self) -> set[str]:
        """Return the dictionary's keys."""
        return set(self.space.objects)


class TestEncryptedLocal(SealedSideDoor, BackendConformance):
    """Over files, with processes."""

    backend_name = "local"
    kind = ""
    root: Path

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a backend on a folder that is not there yet."""
        self.root = tmp_path / "not" / "yet"
        backend = encrypted(open_posix(str(self.root), kind=self.kind))
        yield backend
        backend.close()

    def stored(self, key: str) -> bytes | None:
        """Read the file."""
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def store(self, key: str, data: bytes) -> None:
        """Write the file."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_keys(self) -> set[str]:
        """Walk the tree, hidden files included."""
        return {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file()
        }


class TestEncryptedNfsSettings(TestEncryptedLocal):
    """Over files, with the settings for NFS."""

    backend_name = "nfs"
    kind = "nfs"


@pytest.mark.short(sample=1)
class TestEncryptedS3(SealedSideDoor, BackendConformance):
    """Over S3, the server another process."""

    backend_name = "s3"
    secrets = (*SealedSideDoor.secrets, SECRET, "labaccess")

    @pytest.fixture
    def backend(self, s3_bucket: S3Bucket) -> Iterator[Backend]:
        """Return a backend on a prefix of a new bucket, without retries."""
        self.bucket = s3_bucket
        backend = encrypted(open_backend(s3_bucket.url, retry=False, **s3_bucket.options()))
        yield backend
        backend.close()

    def stored(self, key: str) -> bytes | None:
        """Read by boto3."""
        return self.bucket.read(key)

    def store(self, key: str, data: bytes) -> None:
        """Write by boto3."""
        self.bucket.write(key, data)

    def raw_keys(self) -> set[str]:
        """List by boto3."""
        return self.bucket.keys()
