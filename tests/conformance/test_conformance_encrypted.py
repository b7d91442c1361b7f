"""An encrypted backend keeps the contract of the backend below it: memory, files, S3."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from buckets import S3Bucket
from doors import BucketDoor, FolderDoor, MemoryDoor
from local_servers import SECRET

from ckptstore.backends.base import Backend
from ckptstore.backends.encrypted import EncryptedBackend
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
from ckptstore.testing.side_door import SideDoor

MATERIAL = bytes(range(32))
SEGMENT_BYTES = 4096
"""Small, so that the objects of the suite have many."""


class SealedSideDoor(SideDoor):
    """Looks at what is stored through a key, but not through the backend under test."""

    secrets: ClassVar[tuple[str, ...]] = (MATERIAL.hex(), repr(MATERIAL))
    layout = SegmentLayout(segment_bytes=SEGMENT_BYTES)

    def raw_read(self, key: str) -> bytes | None:
        """Decrypt segment by segment."""
        data = super().raw_read(key)
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
            super().raw_write(key, data)
            return
        sealer = DataKey(MATERIAL).sealer(key, uuid.uuid4().bytes * 2)
        starts = range(0, max(len(data), 1), SEGMENT_BYTES)
        parts = [
            sealer.seal(
                index, data[at : at + SEGMENT_BYTES], last=at + SEGMENT_BYTES >= max(len(data), 1)
            )
            for index, at in enumerate(starts)
        ]
        super().raw_write(key, b"".join((sealer.header, *parts)))


def encrypted(inner: Backend) -> EncryptedBackend:
    """Return the backend under test."""
    return EncryptedBackend(inner, DataKey(MATERIAL), segment_bytes=SEGMENT_BYTES)


class TestEncryptedMemory(
    SealedSideDoor, MemoryDoor, ObjectConformance, ListingConformance, CreateConformance
):
    """Over memory."""

    backend_name = "memory"

    def opened(self) -> Backend:
        """Return the backend under test."""
        return encrypted(super().opened())


class TestEncryptedLocal(SealedSideDoor, FolderDoor, BackendConformance):
    """Over files, with processes."""

    backend_name = "local"
    kind = ""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Return a backend on a folder that is not there yet."""
        self.root = tmp_path / "not" / "yet"
        backend = encrypted(open_posix(str(self.root), kind=self.kind))
        yield backend
        backend.close()


class TestEncryptedNfsSettings(TestEncryptedLocal):
    """Over files, with the settings for NFS."""

    backend_name = "nfs"
    kind = "nfs"


@pytest.mark.short(sample=1)
class TestEncryptedS3(SealedSideDoor, BucketDoor, BackendConformance):
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
