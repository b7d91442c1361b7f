"""Tensors that share memory: stored once, and sharing it again after a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shortening import examples

from ckptstore.format.manifest import TensorRecord
from ckptstore.tensors.flatten import flatten
from ckptstore.tensors.restore import Restorer
from ckptstore.tensors.tensor_bytes import SourceTensor

Same = Callable[[object, object], None]
Make = Callable[..., Any]


def _bytes(kept: Any) -> int:  # noqa: ANN401
    return sum(record.nbytes for record in kept.records)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tied_weights_stay_tied(shelf: Make, assert_same: Same) -> None:
    """Two leaves of one tensor cost its bytes once and share memory again, as two objects."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    state = {"embed": weight.detach(), "head": weight.detach()}
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 8 * 4 * 4
    assert back["embed"] is not back["head"]
    back["embed"][0, 0] = 42.0
    assert back["head"][0, 0] == 42.0


def test_one_object_stays_one(shelf: Make) -> None:
    """A Parameter that occurs twice is one again, and its detached twin shares its memory."""
    weight = torch.nn.Parameter(torch.randn(3))
    back = shelf([weight, {"again": weight}, weight.detach()]).load()
    assert back[0] is back[1]["again"]
    assert type(back[0]) is torch.nn.Parameter
    assert type(back[2]) is torch.Tensor
    assert not back[2].requires_grad
    assert back[2].data_ptr() == back[0].data_ptr()


def test_views_share_their_base(shelf: Make, assert_same: Same) -> None:
    """Overlapping views of several dtypes and layouts are views of one stored tensor again."""
    flat = torch.randn(24)
    state = {
        "head": flat[2:9],
        "flat": flat,
        "grid": flat.view(4, 6).t(),
        "bits": flat.view(torch.int32)[5:],
        "tail": flat[7:20:3],
    }
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 24 * 4
    assert len({_storage(tensor) for tensor in back.values()}) == 1
    back["flat"].zero_()
    assert not back["grid"].any()
    assert not back["tail"].any()


def test_views_without_a_whole(shelf: Make, assert_same: Same) -> None:
    """Views that overlap, none of which holds the others, cost only the run of bytes they cover."""
    flat = torch.randn(1000)
    state = [flat[100:200], flat[150:260]]
    kept = shelf(state)
    back = kept.load()
    assert_same(state, back)
    assert _bytes(kept) == 160 * 4
    back[0][60] = 7.0
    assert back[1][10] == 7.0


def test_mixed_dtypes_at_odd_offsets(shelf: Make, assert_same: Same) -> None:
    """A base begins where every view's offset is a whole number of its own elements."""
    raw = torch.arange(64, dtype=torch.uint8)
    state = [raw[5:30], raw[8:40].view(torch.int64), raw[6:20].view(torch.int16)]
    back = shelf(state).load()
    assert_same(state, back)
    back[0].zero_()
    assert back[1][0] == 0


def test_slices_apart_are_apart(shelf: Make, assert_same: Same) -> None:
    """Rows, and interleaved columns, of one large tensor cost their own bytes and no more."""
    big = torch.randn(1000, 100)
    rows = shelf([big[3], big[500]])
    assert _bytes(rows) == 2 * 100 * 4
    columns = shelf([big[:, 0:2], big[:, 50:52]])
    assert _bytes(columns) == 2 * 2 * 1000 * 4
    back = columns.load()
    assert torch.equal(back[1], big[:, 50:52])
    assert _storage(back[0]) != _storage(back[1])
    assert_same([big[3], big[500]], rows.load())


def test_many_views_are_bounded(monkeypatch: pytest.MonkeyPatch, shelf: Make) -> None:
    """Past the number of pairs that are tested, views count as overlapping; values stay right."""
    monkeypatch.setattr("ckptstore.limits.ALIAS_PAIRS_MAX", 10)
    big = torch.randn(50, 20)
    state = [big[:, column] for column in range(20)]
    back = shelf(state).load()
    assert all(torch.equal(a, b) for a, b in zip(state, back, strict=True))


def test_tensors_that_overlap_themselves(shelf: Make, assert_same: Same) -> None:
    """Expanded and unfolded tensors cost the bytes that they really have and keep their strides."""
    expanded = torch.randn(3, 1).expand(3, 1000)
    kept = shelf(expanded)
    assert _bytes(kept) == 3 * 4
    assert_same(expanded, kept.load())
    windows = torch.randn(10).unfold(0, 4, 1)
    kept = shelf(windows)
    assert _bytes(kept) == 10 * 4
    assert_same(windows, kept.load())
    mixed = torch.randn(5, 6)[:, ::2].unsqueeze(1).expand(5, 4, 3)
    kept = shelf(mixed)
    assert _bytes(kept) == 5 * 3 * 4
    assert torch.equal(mixed, kept.load())


def test_gaps_are_left_out(shelf: Make) -> None:
    """A slice with gaps is stored densely: its own bytes, in the memory order of its dims."""
    part = torch.randn(64, 64)[:, :3].t()
    kept = shelf(part)
    assert kept.sources[0].payload.view() is None
    assert (_bytes(kept), kept.records[0].order) == (64 * 3 * 4, (1, 0))
    back = kept.load()
    assert torch.equal(part, back)
    assert back.stride() == (1, 3)


def test_empty_tensors_of_one_storage(shelf: Make, assert_same: Same) -> None:
    """Empty slices share nothing and hide nothing: their neighbours still find each other."""
    flat = torch.randn(10)
    state = [flat[0:6], flat[3:3], flat[2:2], flat[4:9]]
    back = shelf(state).load()
    assert_same(state, back)
    back[0][5] = 3.0
    assert back[3][1] == 3.0


def test_paths_and_order_of_records() -> None:
    """Records come in the order of their first leaf and name all leaves that read them."""
    flat = torch.randn(6)
    state = {"z": torch.zeros(2), "a": flat[1:3], "b": [flat], "c": flat}
    tensors = flatten(state).tensors
    assert [tensor.paths for tensor in tensors] == [(("z",),), (("a",), ("b", 0), ("c",))]


def test_row_bytes() -> None:
    """A row is one step of the outermost dimension in memory, never less than an element."""
    grid = torch.zeros(3, 5, dtype=torch.int16)
    state = [grid, grid.t().clone(memory_format=torch.preserve_format), torch.tensor(1.0)]
    rows = [tensor.row_bytes for tensor in flatten([*state, torch.zeros(0, 7)]).tensors]
    assert rows == [10, 10, 4, 4]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_random_views_of_one_storage(data: st.DataObject) -> None:
    """Whatever views of one storage a state holds, a write through one is seen by all others."""
    base = torch.arange(60, dtype=torch.int16)
    views = []
    for _ in range(data.draw(st.integers(1, 6))):
        rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
        strides = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
        offset = data.draw(st.integers(0, 15))
        views.append(base.as_strided((rows, columns), strides, offset))
    flat = flatten(views)
    records = [_record(source) for source in flat.tensors]
    restorer = Restorer(flat.skeleton, records)
    for index in restorer.needed:
        view = restorer.destination(index).view
        flat.tensors[index].payload.copy_into(0, view)
    back = restorer.build()
    for mine, theirs in zip(views, back, strict=True):
        assert torch.equal(mine, theirs)
    chosen = data.draw(st.integers(0, len(views) - 1))
    if not views[chosen].numel():
        return
    element = (0,) * 2
    views[chosen][element] = back[chosen][element] = -1
    for mine, theirs in zip(views, back, strict=True):
        assert torch.equal(mine, theirs)


def _record(source: SourceTensor) -> TensorRecord:
    """Return a source as its own record."""
    return TensorRecord(
        dtype=source.dtype,
        shape=source.shape,
        order=source.order,
        role="weights",
        nbytes=source.nbytes,
    )
