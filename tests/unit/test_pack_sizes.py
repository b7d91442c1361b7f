"""Sizes of packs: a small write makes smaller ones where a pack waits in memory to be sent."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import torch
from hypothesis import given

import ckptstore
from ckptstore import limits
from ckptstore.backends.base import Capabilities
from ckptstore.backends.memory import CAPABILITIES, MemoryBackend
from ckptstore.limits import GIB, MIB
from ckptstore.objects.packs import pack_bytes_for


@given(total=st.integers(0, 1 << 50), whole=st.integers(1, 4 * GIB), streamed=st.booleans())
def test_sizes_stay_between_their_bounds(total: int, whole: int, *, streamed: bool) -> None:
    """Never above the backend's; below it only where it buffers packs; never tiny; never more."""
    part = whole - 1 if streamed else whole
    found = pack_bytes_for(total, _capabilities(pack_bytes=whole, part_bytes=part))
    assert found <= whole
    if streamed or total >= whole * limits.PACKS_OF_A_WRITE:
        assert found == whole
    else:
        assert found >= min(whole, limits.PACK_BYTES_MIN)
        assert total // found <= max(limits.PACKS_OF_A_WRITE + 1, total // whole)


def test_a_save_sends_its_first_pack_before_the_last_is_filled() -> None:
    """A state that would fill one pack and a half goes in several; all of it comes back."""
    backend = MemoryBackend("sizes")  # sees what the store puts there
    state = {f"w{i}": torch.randn(2 * MIB) for i in range(12)}  # 96 MiB
    with ckptstore.open("memory://sizes", create=True, codec="raw") as store:
        store.run("r").save(state, step=1)
        sizes = [info.size_bytes for info in backend.list("packs/")]
        assert len(sizes) >= 4
        assert max(sizes) < limits.PACK_BYTES_MIN + 2 * limits.CHUNK_BYTES_DEFAULT
        loaded = store.load("r@1")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def _capabilities(*, pack_bytes: int, part_bytes: int) -> Capabilities:
    return replace(CAPABILITIES, pack_bytes=pack_bytes, part_bytes=part_bytes)
