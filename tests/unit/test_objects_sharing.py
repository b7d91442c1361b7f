"""Chunks in packs: plans, sharing, and failures of single packs."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from metered import MeteredBackend
from simulated_environment import SimulatedEnvironment

from ckptstore.backends.base import Backend, Capabilities, PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.format.manifest import PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.objects.index import KnownPieces, Location, placed_table
from ckptstore.objects.piece_reader import ReadItem, Span, plan_spans
from ckptstore.repo import Finding, create_on
from ckptstore.store import Store

CHUNK_BYTES = 1 << 16
ROW = 1 << 12  # bytes: sixteen rows to a chunk
_names = itertools.count()


@pytest.fixture
def metered() -> MeteredBackend:
    """Return a memory backend of this test alone that counts what is asked of it."""
    return MeteredBackend(MemoryBackend(f"sharing/{next(_names)}"))


def store_on(backend: Backend) -> Store:
    """Return a new store with chunks of 64 KiB."""
    repo = create_on(
        backend,
        prober=lambda _backend, _environment: Finding(put_if_absent=PutIfAbsent.ATOMIC, report={}),
        chunk_bytes=CHUNK_BYTES,
        environment=SimulatedEnvironment(next(_names)),
        options=Options(workers=2),
    )
    return Store(repo)


def sizes(backend: MeteredBackend) -> Counter[str]:
    """Return the bytes of all objects by kind."""
    assert isinstance(backend.inner, MemoryBackend)
    found: Counter[str] = Counter()
    for key, item in backend.inner.objects.items():
        found[key.split("/")[0]] += len(item.data)
    return found


def noise(seed: int, rows: int) -> torch.Tensor:
    """Return bytes that do not compress, as a tensor of rows of 4 KiB."""
    data = np.random.default_rng(seed).integers(0, 256, (rows, ROW), dtype=np.uint8)
    return torch.from_numpy(data)


def roles_sum(version: Any, name: str) -> int:  # noqa: ANN401
    """Return a byte count of a version over its roles."""
    return sum(getattr(role, name) for role in version.roles.values())


def test_equal_tensors_of_one_save_are_stored_once(metered: MeteredBackend) -> None:
    """Tied tensors, and others of equal bytes, large and small, cost their bytes once."""
    tied, small = noise(1, 32), noise(2, 1)[:, :100].clone()
    state = {"a": tied, "b": tied, "c": tied.clone(), "d": small, "e": small.clone()}
    with store_on(metered) as store:
        version = store.run("r").save(state, step=0)
        loaded = store.load("r")

    assert roles_sum(version, "logical") == 2 * tied.nbytes + 2 * small.nbytes
    assert roles_sum(version, "new") == tied.nbytes + small.nbytes
    assert sizes(metered)["packs"] < tied.nbytes + small.nbytes + 1000
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_state_that_did_not_change_costs_a_manifest_and_a_commit(metered: MeteredBackend) -> None:
    """Saving it again opens no pack: one put, one put-if-absent, no byte of a tensor."""
    state = {"w": noise(1, 64), "s": [noise(n, 1)[:, :64].clone() for n in range(2, 50)]}
    with store_on(metered) as store:
        run = store.run("r")
        run.save(state, step=0)
        before = metered.snapshot()
        version = run.save(state, step=1)
        after = metered.snapshot()

    def calls(name: str) -> int:
        return after[name].calls - before[name].calls

    assert (calls("open_writer"), calls("writer.write"), calls("writer.commit")) == (0, 0, 0)
    assert (calls("put"), calls("put_if_absent")) == (1, 1)
    assert "read_into" not in after
    assert (roles_sum(version, "new"), roles_sum(version, "stored")) == (0, 0)
    assert sizes(metered)["manifests"] < 10_000


def test_one_changed_row_costs_one_chunk(metered: MeteredBackend) -> None:
    """The rest of the tensor is shared with the version before; appended rows cost their own."""
    weight = noise(1, 64)
    with store_on(metered) as store:
        run = store.run("r")
        run.save({"w": weight}, step=0)
        base = sizes(metered)["packs"]
        changed = weight.clone()
        changed[20] ^= 1
        second = run.save({"w": changed}, step=1)
        one_chunk = sizes(metered)["packs"] - base
        third = run.save({"w": torch.cat([changed, noise(9, 16)])}, step=2)
        appended = sizes(metered)["packs"] - base - one_chunk

        assert torch.equal(store.load("r@1")["w"], changed)
    assert roles_sum(second, "new") == roles_sum(third, "new") == CHUNK_BYTES
    assert max(one_chunk, appended) < CHUNK_BYTES + 300


def test_one_changed_small_tensor_costs_its_own_bytes(metered: MeteredBackend) -> None:
    """Small tensors that share a chunk are shared one by one."""
    state = {f"s{n}": noise(n, 1)[:, :500].clone() for n in range(100)}
    with store_on(metered) as store:
        run = store.run("r")
        run.save(state, step=0)
        base = sizes(metered)["packs"]
        state["s50"] = noise(1000, 1)[:, :500].clone()
        version = run.save(state, step=1)
        loaded = store.load("r")

    assert roles_sum(version, "new") == 500
    assert sizes(metered)["packs"] - base < 500 + 300
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_run_shares_with_its_own_version_before(metered: MeteredBackend) -> None:
    """Another run does not look at it: what is shared does not depend on who else saves."""
    with store_on(metered) as store:
        store.run("one").save({"w": noise(1, 32)}, step=0)
        other = store.run("two").save({"w": noise(1, 32)}, step=0)

    assert roles_sum(other, "new") == 32 * ROW


def test_small_tensors_cost_less_than_100_bytes_each(metered: MeteredBackend) -> None:
    """2,000 weights of 64 bytes: the whole store, every record included, under 100 bytes each."""
    random = torch.Generator().manual_seed(0)
    state = {f"model.layers.{n}.norm": torch.randn(16, generator=random) for n in range(2000)}
    with store_on(metered) as store:
        store.run("r").save(state, step=0)
        loaded = store.load("r")

    assert sum(sizes(metered).values()) < 100 * 2000
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_small_tensors_that_do_not_compress_have_little_overhead(metered: MeteredBackend) -> None:
    """Where the 64 bytes are noise, all the rest is under 40 bytes each; an id alone takes 32."""
    state = {f"model.layers.{n}.norm": noise(n, 1)[0, :64].clone() for n in range(2000)}
    with store_on(metered) as store:
        store.run("r").save(state, step=0)

    assert sum(sizes(metered).values()) < (64 + 40) * 2000


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        pytest.param(slice(20, 21), 1, id="one-row"),
        pytest.param(20, 1, id="one-row-by-number"),
        pytest.param(slice(15, 17), 2, id="over-a-border"),
        pytest.param(slice(0, 64), 4, id="all"),
        pytest.param(slice(5, 5), 0, id="nothing"),
        pytest.param((3, slice(10, 20)), 1, id="part-of-a-row"),
        pytest.param(slice(-1, None), 1, id="the-last"),
    ],
)
def test_a_slice_reads_the_chunks_that_it_needs_and_no_more(
    metered: MeteredBackend,
    index: Any,  # noqa: ANN401
    chunks: int,
) -> None:
    """Of four chunks, those are read that hold the rows asked for, and no other object."""
    weight = noise(1, 64)
    with store_on(metered) as store:
        store.run("r").save({"other": noise(2, 64), "w": weight}, step=0)
        lazy = store.version("r")
        before = metered.snapshot()
        found = lazy["w"][index]
        after = metered.snapshot()

    read = after["read_into"].bytes_moved if "read_into" in after else 0
    assert torch.equal(found, weight[index])
    assert chunks * CHUNK_BYTES <= read <= chunks * (CHUNK_BYTES + 64)
    assert after.get("get") == before.get("get")


def test_a_partial_load_reads_only_what_is_included(metered: MeteredBackend) -> None:
    """Tensors that are left out cost no byte."""
    with store_on(metered) as store:
        store.run("r").save({"a": noise(1, 64), "b": noise(2, 16)}, step=0)
        loaded = store.load("r", include=["b"])

    assert list(loaded) == ["b"]
    assert metered.snapshot()["read_into"].bytes_moved == CHUNK_BYTES + 64


@pytest.mark.parametrize("tail", [1, 100, 4096, 65_535, 65_537])
def test_a_tensor_with_a_short_last_piece_comes_back(metered: MeteredBackend, tail: int) -> None:
    """The last piece of a large tensor may be of any length, below that of small tensors too."""
    whole = noise(1, 40).reshape(-1)[: 2 * CHUNK_BYTES + tail].clone()
    with store_on(metered) as store:
        store.run("r").save({"w": whole, "odd": whole.reshape(-1)[:70_001].clone()}, step=0)
        loaded = store.load("r")

    assert torch.equal(loaded["w"], whole)
    assert torch.equal(loaded["odd"], whole[:70_001])


@pytest.mark.parametrize("columns", [1, 999, 1000, 16_384, 16_385, 100_000])
def test_rows_of_any_length_come_back(metered: MeteredBackend, columns: int) -> None:
    """Rows that do not divide the chunk, or are larger than it, are cut on elements."""
    count = max(3, 70_000 // columns)
    tensor = torch.arange(count * columns, dtype=torch.float32).reshape(count, columns)
    with store_on(metered) as store:
        store.run("r").save({"w": tensor, "t": tensor.t()}, step=0)
        loaded = store.load("r")
        row = store.version("r")["w"][1]

    assert torch.equal(loaded["w"], tensor)
    assert torch.equal(loaded["t"], tensor.t())
    assert torch.equal(row, tensor[1])


def test_ids_are_compared_whole() -> None:
    """Ids with one beginning are two pieces, and one id with another length is another piece."""
    ids = [b"8 bytes." + bytes([n]) * 24 for n in range(3)]
    table = placed_table(
        np.frombuffer(b"".join(ids[:2]), np.uint8).reshape(2, 32),
        np.array([100, 100], np.uint32),
        [
            Location(pack="ab" * 16, offset=at, stored_bytes=100, inner=0, slab_bytes=100)
            for at in (32, 196)
        ],
    )
    known = KnownPieces([table])

    found = [known.find(piece_id, 100) for piece_id in ids]

    assert [place and place.offset for place in found] == [32, 196, None]
    assert known.find(ids[0], 99) is None


def capabilities_of(gap: int, size: int) -> Capabilities:
    """Return capabilities that differ in what a plan looks at."""
    return Capabilities(
        put_if_absent=PutIfAbsent.ATOMIC, pack_bytes=1 << 20, part_bytes=1 << 20,
        read_gap_bytes=gap, read_bytes_max=size, concurrency=1, scatter_read=True, lookup_lag_s=0.0,
    )  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> PieceTable:
    """Draw a table of a few packs; chunks hold one to three pieces and may lie apart."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    for pack in range(draw(st.integers(1, 3))):
        at = 32
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0, 0, 0, 100, 5000]))
            raws = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=3))
            stored = draw(st.integers(1, sum(raws)))
            inner = 0
            for raw in raws:
                rows.append((raw, pack, at, stored, inner, sum(raws)))
                inner += raw
            at += CHUNK_HEADER_BYTES + stored
    rows = draw(st.permutations(rows))
    columns = np.array(rows, np.uint64).reshape(len(rows), 6).T
    u32 = [columns[place].astype(np.uint32) for place in (0, 1, 3, 4, 5)]
    return PieceTable(
        ids=np.zeros((len(rows), 32), np.uint8), raw=u32[0], pack=u32[1],
        offset=columns[2].astype(np.uint64), stored=u32[2], inner=u32[3], slab=u32[4],
        packs=["aa" * 16, "bb" * 16, "cc" * 16],
    )  # fmt: skip


def apart(first: Span, second: Span, gap: int) -> bool:
    """Say whether two spans lie too far apart for one request."""
    return first.pack != second.pack or not 0 <= second.start - first.end <= gap


@given(tables(), st.data(), st.sampled_from([0, 64, 200, 10_000]), st.integers(1, 9000))
def test_a_plan_fetches_each_chunk_once_and_no_more(
    table: PieceTable, data: st.DataObject, gap: int, size: int
) -> None:
    """Whatever is wanted, in whatever order, and however often.

    Each wanted chunk is in one span with all that is wanted of it; spans are in order; a gap is
    read only if it is small; a span passes the size only if it is one chunk; and no two spans
    could have been one.
    """
    if not len(table):
        assert plan_spans(table, [], capabilities_of(gap, size)) == []
        return
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=20))
    items = [ReadItem(row=row, out=None, label=f"t{place}") for place, row in enumerate(rows)]

    spans = plan_spans(table, items, capabilities_of(gap, size))

    found: dict[tuple[str, int], list[ReadItem]] = {}
    for span in spans:
        assert span.end - span.start <= size or len(span.chunks) == 1
        for chunk in span.chunks:
            assert (span.pack, chunk.offset) not in found
            found[span.pack, chunk.offset] = list(chunk.items)
        for first, second in itertools.pairwise(span.chunks):
            end = first.offset + CHUNK_HEADER_BYTES + first.stored_bytes
            assert 0 <= second.offset - end <= gap
    meant: dict[tuple[str, int], list[ReadItem]] = {}
    for item in items:
        where = (table.packs[int(table.pack[item.row])], int(table.offset[item.row]))
        meant.setdefault(where, []).append(item)
    assert found.keys() == meant.keys()
    for where, members in meant.items():
        assert {id(item) for item in members} == {id(item) for item in found[where]}
        assert len(members) == len(found[where])
    for first_span, second_span in itertools.pairwise(spans):
        joined = second_span.chunks[0].stored_bytes + CHUNK_HEADER_BYTES
        longer = second_span.start + joined - first_span.start
        assert apart(first_span, second_span, gap) or longer > size


def test_a_plan_of_one_pack_is_one_request() -> None:
    """Chunks that follow each other are fetched together, from first header to last byte."""
    count = 10
    table = PieceTable(
        ids=np.zeros((count, 32), np.uint8),
        raw=np.full(count, 100, np.uint32),
        pack=np.zeros(count, np.uint32),
        offset=np.arange(count, dtype=np.uint64) * 164 + 32,
        stored=np.full(count, 100, np.uint32),
        inner=np.zeros(count, np.uint32),
        slab=np.full(count, 100, np.uint32),
        packs=["aa" * 16],
    )
    items = [ReadItem(row=row, out=None, label="t") for row in reversed(range(count))]

    spans = plan_spans(table, items, capabilities_of(0, 1 << 20))

    assert [(span.start, span.end) for span in spans] == [(32, 32 + 1640)]
