"""Blocks: boxes that tile a tensor, in the order in which they are stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import limits
from ckptstore.errors import CorruptObjectError, UnsupportedFeatureError
from ckptstore.format import framing, manifest
from ckptstore.format.blocks import (
    Blocks,
    Box,
    boxes_of_range,
    gather,
    is_row_major,
    tiling_problem,
)
from ckptstore.format.manifest import FLAG_BLOCKS, Manifest, PieceTable, TensorRecord

VERSION = "ab" * 16


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Return a shape and boxes that tile it: it is cut in two, time and again, anywhere."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    boxes: list[Box] = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes[place]
        if sizes[dim] < 2:
            continue
        cut = draw(st.integers(1, sizes[dim] - 1))
        first = tuple(cut if d == dim else n for d, n in enumerate(sizes))
        second = tuple(n - cut if d == dim else n for d, n in enumerate(sizes))
        moved = tuple(o + cut if d == dim else o for d, o in enumerate(offsets))
        boxes[place : place + 1] = [(offsets, first), (moved, second)]
    return shape, draw(st.permutations(boxes))


def hits(shape: Sequence[int], boxes: Sequence[Box]) -> npt.NDArray[np.int64]:
    """Return how many boxes each element is in."""
    found = np.zeros(shape, np.int64)
    for offsets, sizes in boxes:
        found[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
    return found


@given(tilings())
def test_a_tiling_is_accepted_in_any_order(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    """Boxes that are the whole of a tensor have no problem, however they were cut."""
    shape, boxes = tiling

    assert tiling_problem(shape, Blocks.of(boxes)) == ""


@given(tilings(), st.data())
def test_anything_else_is_refused(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """A box that is moved, grown, doubled or left out: accepted only if it still is a tiling."""
    shape, boxes = tiling
    place = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[place]
    dim = data.draw(st.integers(0, len(shape) - 1))
    by = data.draw(st.integers(-2, 2))
    bent = tuple(n + by if d == dim else n for d, n in enumerate(offsets))
    grown = tuple(n + by if d == dim else n for d, n in enumerate(sizes))
    others = boxes[:place] + boxes[place + 1 :]
    changed = [
        [*others, (bent, sizes)], [*others, (offsets, grown)], [*boxes, (offsets, sizes)], others,
    ][data.draw(st.integers(0, 3))]  # fmt: skip
    inside = all(
        n > 0 and a >= 0 and a + n <= whole
        for box in changed
        for a, n, whole in zip(*box, shape, strict=True)
    )
    tiles = bool(changed) and inside and bool((hits(shape, changed) == 1).all())

    if changed:
        assert (tiling_problem(shape, Blocks.of(changed)) == "") == tiles


@given(tilings())
def test_boxes_that_are_rows_are_the_tensor_itself(
    tiling: tuple[tuple[int, ...], list[Box]],
) -> None:
    """What is taken for plain rows has the bytes of the tensor; else only by chance of sizes."""
    shape, boxes = tiling
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = [
        whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes
    ]
    stored = np.concatenate(parts)

    if is_row_major(shape, boxes):
        assert stored.tolist() == list(range(whole.size))
    out = bytearray(stored.nbytes)
    gather(Blocks.of(boxes), shape, 8, stored.tobytes(), out)
    assert np.frombuffer(out, np.int64).tolist() == list(range(whole.size))


def test_slabs_are_rows_and_columns_are_not() -> None:
    """Slabs of the first dimension that is larger than 1, in order, are rows."""
    assert is_row_major((6, 4), [((0, 0), (2, 4)), ((2, 0), (4, 4))])
    assert is_row_major((1, 6, 4), [((0, 0, 0), (1, 2, 4)), ((0, 2, 0), (1, 4, 4))])
    assert not is_row_major((6, 4), [((2, 0), (4, 4)), ((0, 0), (2, 4))])
    assert not is_row_major((6, 4), [((0, 0), (6, 2)), ((0, 2), (6, 2))])


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_range_of_elements_as_boxes(shape: list[int], data: st.DataObject) -> None:
    """The boxes hold the elements of the range, in order; and are few."""
    count = math.prod(shape)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    whole = np.arange(count).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found = [
        whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes
    ]

    assert list(itertools.chain.from_iterable(part.tolist() for part in found)) == list(
        range(start, stop)
    )
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_grid_of_too_many_cells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes whose borders would need more memory than a reader grants are no tiling."""
    monkeypatch.setattr(limits, "BLOCK_CELLS_MAX", 8)
    boxes: list[Box] = [((n, n), (1, 1)) for n in range(4)]

    assert "16 cells" in tiling_problem((4, 4), Blocks.of(boxes))


def made(record: TensorRecord, raw: Sequence[int]) -> Manifest:
    """Return a manifest of one tensor whose pieces have these lengths."""
    count = len(raw)
    column = np.array(raw, np.uint32)
    table = PieceTable(
        ids=np.zeros((count, 32), np.uint8), raw=column, pack=np.zeros(count, np.uint32),
        offset=np.zeros(count, np.uint64), stored=column, inner=np.zeros(count, np.uint32),
        slab=column, packs=["cd" * 16] if count else [],
    )  # fmt: skip
    return Manifest(
        version=VERSION, chunk_bytes=limits.CHUNK_BYTES_MIN, skeleton=b"\x92\xa1T\x00",
        tensors=(record,), first=(0, count), pieces=table,
    )  # fmt: skip


def record_of(boxes: Sequence[Box], shape: tuple[int, ...] = (4, 6)) -> TensorRecord:
    """Return a tensor of bytes in boxes."""
    return TensorRecord(
        dtype="uint8", shape=shape, order=None, role="weights", nbytes=math.prod(shape),
        blocks=Blocks.of(boxes),
    )  # fmt: skip


COLUMNS: list[Box] = [((0, 0), (4, 2)), ((0, 2), (4, 4))]


def test_a_manifest_with_blocks_comes_back_and_says_so() -> None:
    """Its frame has the flag, which a reader that does not know it refuses."""
    data = manifest.encode(made(record_of(COLUMNS), [8, 10, 6]))
    found = manifest.decode(data, where="m", version=VERSION)
    plain = manifest.encode(made(record_of([((0, 0), (4, 6))]), [24]))

    assert found.tensors[0].blocks == Blocks.of(COLUMNS)
    assert framing.frame_flags(data) == FLAG_BLOCKS
    assert manifest.outline(data, where="m")[0] == VERSION
    with pytest.raises(UnsupportedFeatureError):
        framing.decode_frame(manifest.MAGIC, data, where="m", raw_bytes_max=1 << 20)
    assert framing.frame_flags(plain) == FLAG_BLOCKS


def test_a_manifest_without_blocks_is_what_it_was() -> None:
    """No flag and no field: every reader of the format reads it."""
    record = TensorRecord(dtype="uint8", shape=(24,), order=None, role="weights", nbytes=24)
    data = manifest.encode(made(record, [24]))

    assert framing.frame_flags(data) == 0
    raw = framing.decode_frame(manifest.MAGIC, data, where="m", raw_bytes_max=1 << 20)
    assert b"blocks" not in raw
    forged = framing.encode_frame(manifest.MAGIC, raw, flags=FLAG_BLOCKS)
    with pytest.raises(CorruptObjectError, match="flag"):
        manifest.decode(forged, where="m", version=VERSION)


@pytest.mark.parametrize(
    ("boxes", "raw"),
    [
        (COLUMNS, [9, 15]), ([((0, 0), (4, 2)), ((0, 1), (4, 4))], [8, 16]),
        ([((0, 0), (4, 2))], [24]), ([((0, 0), (4, 2)), ((0, 2), (4, 5))], [8, 16]),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], [24]), ([((0, 0), (4, 0)), ((0, 0), (4, 6))], [24]),
        ([((0, 1 << 62), (4, 1 << 62)), ((0, 0), (4, 6))], [24]),
    ],
)  # fmt: skip
def test_blocks_that_are_none_are_never_written_nor_read(boxes: list[Box], raw: list[int]) -> None:
    """A piece across a border, gaps, overlaps, boxes outside: no manifest has them."""
    broken = made(record_of(boxes), raw)
    with pytest.raises(Exception, match="blocks of a tensor"):
        manifest.encode(broken)


@pytest.mark.parametrize("place", [1, -1, 1 << 40])
def test_blocks_of_no_tensor_are_refused(place: int) -> None:
    """A record that gives boxes to a tensor that is not there, or to one twice, is damaged."""
    data = manifest.encode(made(record_of(COLUMNS), [8, 16]))
    raw = framing.decode_frame(
        manifest.MAGIC, data, where="m", raw_bytes_max=1 << 20, flags_known=FLAG_BLOCKS
    )
    body = msgspec.msgpack.decode(raw)
    coded = body["blocks"][0][1]
    for blocks in ([[place, coded]], [[0, coded], [0, coded]], [[0, coded[:-1]]], [[0, b""]]):
        forged = framing.encode_frame(
            manifest.MAGIC, msgspec.msgpack.encode({**body, "blocks": blocks}), flags=FLAG_BLOCKS
        )
        with pytest.raises(CorruptObjectError, match="blocks"):
            manifest.decode(forged, where="m", version=VERSION)


THREE: list[Box] = [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]
RAW = framing.decode_frame(
    manifest.MAGIC, manifest.encode(made(record_of(THREE), [12, 6, 6])), where="m",
    raw_bytes_max=1 << 20, flags_known=FLAG_BLOCKS,
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(RAW) - 1), st.integers(0, 255)), max_size=6))
def test_bent_manifests_are_refused_or_hold_a_tiling(changes: list[tuple[int, int]]) -> None:
    """Whatever the bytes say: an error of ours, or blocks that are the whole of their tensor."""
    raw = bytearray(RAW)
    for place, value in changes:
        raw[place] = value
    data = framing.encode_frame(manifest.MAGIC, bytes(raw), flags=FLAG_BLOCKS)
    try:
        found = manifest.decode(data, where="m", version=VERSION)
    except CorruptObjectError:
        return
    (record,) = found.tensors
    assert record.blocks is not None
    boxes = list(record.blocks)

    assert bool((hits(record.shape, boxes) == 1).all())
