"""Shared by the tests of encrypted stores."""

from __future__ import annotations

import uuid

import pytest

from ckptstore.backends.memory import MemoryBackend

KEY = bytes(range(1, 33))
OTHER = bytes(range(101, 133))


@pytest.fixture
def key() -> bytes:
    """Return a user's key."""
    return KEY


@pytest.fixture
def other() -> bytes:
    """Return a key that nothing is encrypted with."""
    return OTHER


@pytest.fixture
def memory() -> MemoryBackend:
    """Return a memory backend of this test alone."""
    return MemoryBackend(f"encryption-{uuid.uuid4().hex}")
