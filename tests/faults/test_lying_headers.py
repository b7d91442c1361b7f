"""Headers of chunks that lie, though their own checksum is right, about bytes that are sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from faultkit.stores import create, memory_with, reopen
from faultkit.swaps import ELEMENTS, RUN, Scene, differing, place_of, scene

from ckptstore.errors import CorruptTensorError
from ckptstore.format.pack import CHUNK_HEADER_BYTES, parse_chunk_header

LIES: dict[str, dict[str, Any]] = {
    "codec": {"codec": 2},
    "decoded length": {"raw_bytes": 4 * ELEMENTS + 4},
    "stored length": {"stored_bytes": 4 * ELEMENTS - 4},
}


def _lying(made: Scene, lie: str) -> dict[str, bytes]:
    """Return the objects with another header before the first of the two chunks."""
    found = place_of(made.objects, made.pair[0])
    assert found is not None
    key, row = found
    data, end = made.objects[key], row.offset + CHUNK_HEADER_BYTES
    header = parse_chunk_header(data[row.offset : end], where=key)
    told = replace(header, **LIES[lie]).to_bytes()
    return {**made.objects, key: data[: row.offset] + told + data[end:]}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str) -> None:
    """Load, verify and replication name the tensor; what lies elsewhere is as it was."""
    made = scene("raw")
    storage = memory_with(_lying(made, lie))
    with reopen(storage) as store, create(memory_with({})) as other:
        with pytest.raises(CorruptTensorError, match=r"tensor model\.a: .*(lengths|of its raw)"):
            store.load(f"{RUN}@3")
        assert {p.tensor for p in store.verify().problems} == {"model.a"}
        failures = store.replicate(other).failures
        assert [failure.step for failure in failures] == [2, 3]
        assert all("model.a" in failure.message for failure in failures)
        assert differing(store, made) == {2: {"model.a"}, 3: {"model.a"}}
