"""A load keeps its memory within ``host_bytes``, by count: threads times what each may hold."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ckptstore.backends.base import Capabilities
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.config import Options
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.threads import in_threads
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

CHUNK_BYTES = 1 << 16
READ_BYTES = 1 << 17
"""Of one request at most: here one chunk, since two and their headers are more."""


class _Wide(WrapperBackend):
    """A storage that serves 64 requests at once; the first ones wait until all threads read."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.together = threading.Barrier(1)
        self.in_flight = 0
        self.most = 0
        self._turns = itertools.count()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, concurrency=64, read_bytes_max=READ_BYTES)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Count the bytes that are asked for until all of the first ones have come."""
        size = sum(len(part) for part in buffers)
        with self._lock:
            self.in_flight += size
            self.most = max(self.most, self.in_flight)
        if next(self._turns) < self.together.parties:
            self.together.wait(60)
        self.inner.read_into(key, offset, buffers)
        with self._lock:
            self.in_flight -= size


@pytest.mark.parametrize("codec", ["raw", "planes", "delta"])
@pytest.mark.parametrize("budget", [1, 1 << 20, 5 << 20])
def test_bytes_in_flight_stay_within_the_budget(
    codec: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many threads as the budget allows, whatever concurrency the storage likes; at least one.

    Each holds what it decodes; of deltas a request and a chunk, and as much again for bases. Raw
    chunks are received where they belong, and take no memory besides.
    """
    memory = MemoryBackend(f"bound/{codec}/{budget}")
    noise = torch.Generator().manual_seed(1)
    state = {"w": torch.randn(48 * CHUNK_BYTES // 4, generator=noise)}
    options = Options(codec=codec, workers=2)
    with Store(create_on(memory, chunk_bytes=CHUNK_BYTES, options=options)) as store:
        for step in range(2):
            state["w"] += torch.randn(len(state["w"]), generator=noise) * 1e-4
            version = store.run("gpt").save(state, step=step)
        pieces = store.repo.manifests.load(version).pieces
    assert (pieces.base is not None) == (codec == "delta")
    two = 2 * int(pieces.stored.max()) * 9 // 8  # of chunks that one request fetches
    spans, held = {"raw": (48, 1), "planes": (24, two), "delta": (48, 4 * READ_BYTES)}[codec]
    wide = _Wide(memory)

    def counted(count: int, *args: object, **names: object) -> None:
        """Let the first reads wait for as many threads as there are."""
        wide.together = threading.Barrier(count)
        in_threads(count, *args, **names)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptstore.objects.piece_reader.in_threads", counted)
    with Store(open_on(wide, options=Options(host_bytes=budget, workers=2))) as store:
        assert torch.equal(store.load("gpt@1")["w"], state["w"])

    threads = wide.together.parties
    allowed = max(1, min(spans, budget // held))
    assert threads in {allowed, min(spans, allowed + 1)}  # chunks differ by a few bytes
    if codec == "planes" and threads > 1:
        assert wide.most - 2 * threads * CHUNK_HEADER_BYTES <= budget
    if threads > 1:
        assert wide.most > (threads - 1) * CHUNK_BYTES // 2  # they did read at once
