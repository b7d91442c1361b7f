"""Who writes what several ranks hold alike: each item once, by one that has it, evenly."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptstore.integrations.dcp.writer import balance, offers


def tensor_item(name: str, rows: int, start: int = 0) -> WriteItem:
    """Return the item of some rows of four bytes."""
    offsets = torch.Size([start])
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size([rows])),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size([1_000_000]),
        ),
    )


def plans_of(held: list[list[WriteItem]]) -> list[SavePlan]:
    """Return what comes to the coordinator's storage: the planner has decided already."""
    local = [SavePlan(items, storage_data=offers(items)) for items in held]
    return DefaultSavePlanner()._dedup_save_plans(local)


def load_of(plan: SavePlan) -> int:
    """Return the bytes that a rank writes."""
    return sum(
        4 * math.prod(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data
    )


@given(st.lists(st.tuples(st.integers(1, 100_000), st.sets(st.integers(0, 4), min_size=1))))
def test_each_item_is_written_once_by_one_that_has_it(entries: list[tuple[int, set[int]]]) -> None:
    """Whatever ranks hold: nothing is lost, doubled, or given to a rank without it."""
    held: list[list[WriteItem]] = [[] for _ in range(5)]
    for number, (rows, ranks) in enumerate(entries):
        for rank in ranks:
            held[rank].append(tensor_item(f"t{number}", rows))
    balanced = balance(plans_of(held))

    written = [item.index for plan in balanced for item in plan.items]
    assert sorted(index.fqn for index in written) == sorted(f"t{n}" for n in range(len(entries)))
    for rank, plan in enumerate(balanced):
        assert {item.index for item in plan.items} <= {item.index for item in held[rank]}
        assert plan.storage_data is None


@given(st.lists(st.integers(16_384, 100_000), min_size=1, max_size=40))
def test_replicas_are_spread_by_bytes(sizes: list[int]) -> None:
    """Of tensors that are not small, no rank writes more than the mean and 3/4 of the largest."""
    held = [[tensor_item(f"t{n}", rows) for n, rows in enumerate(sizes)] for _ in range(4)]
    loads = [load_of(plan) for plan in balance(plans_of(held))]

    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) <= sum(sizes) + 3 * max(sizes)


def test_values_are_those_of_the_first_rank() -> None:
    """Values and small tensors may differ between ranks: all of them are those of one rank."""
    value = WriteItem(index=MetadataIndex("step"), type=WriteItemType.BYTE_IO)
    held = [[tensor_item("only", 1000), value], [value], [value]]
    balanced = balance(plans_of(held))

    assert [len(plan.items) for plan in balanced] == [2, 0, 0]

    buffers = [tensor_item(name, 16_383) for name in ("mean", "var", "seen")]
    balanced = balance(plans_of([[value, *buffers] for _ in range(3)]))
    assert [len(plan.items) for plan in balanced] == [4, 0, 0]


def test_shards_stay_where_they_are() -> None:
    """What one rank alone has is its own, however much that is."""
    held = [[tensor_item("w", 1000 * (r + 1), 10_000 * r)] for r in range(4)]

    assert [plan.items for plan in balance(plans_of(held))] == held


def test_plans_that_a_planner_keeps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that caches would combine old decisions with new ones: its own stand."""
    held = [[tensor_item(f"t{n}", 10 ** (n + 1)) for n in range(4)] for _ in range(2)]
    plans = plans_of(held)
    monkeypatch.setitem(SavePlanner._cached_global_plan, "kept", plans)
    assert balance(plans) == plans
    monkeypatch.setitem(SavePlanner._cached_global_plan, "kept", [])
    changed = [plans[0], dataclasses.replace(plans[1], items=[], usable=False)]

    assert balance(changed) == changed
    assert balance(plans) != plans
