"""Shared by the tests of faults: the objects of a small store, and a limit of the system."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator

import pytest
from faultkit.states import state_of
from faultkit.stores import contents, create, memory_with


@pytest.fixture(scope="session")
def base() -> dict[str, bytes]:
    """Return the objects of a store with two versions, of states 1 and 2."""
    backend = memory_with({})
    with create(backend) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for number in (1, 2):
            run.save(state_of(number), step=number, metrics={"loss": 1 / number})
    return contents(backend)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Let no file of this process or its children grow beyond 1 MiB: the kernel answers EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)
