"""Memory keeps the contract; it is the oracle, so this comes first."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.testing.conformance import CreateConformance, ListingConformance, ObjectConformance


class TestMemory(ObjectConformance, ListingConformance, CreateConformance):
    """Without the tests of processes: a memory store lives in one."""

    backend_name = "memory"

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Return a backend on a space that nobody else has."""
        self.space = MemoryBackend(uuid.uuid4().hex)
        yield MemoryBackend(self.space.url.partition("://")[2])
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

    def test_two_instances_share(self, backend: Backend) -> None:
        """Instances of one name see the same objects; another name sees others."""
        backend.put("a", b"1")
        (info,) = MemoryBackend(self.space.url.partition("://")[2]).list("")
        assert isinstance(info, ObjectInfo)
        assert list(MemoryBackend("another").list("")) == []
