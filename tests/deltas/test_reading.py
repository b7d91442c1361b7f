"""Reading deltas, within a budget of memory, and damage to them or to their bases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from deltakit import deltas_of, manifest_of, open_store, packs_of, same, state_of
from peaks import told_by

from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import CorruptObjectError, CorruptTensorError, LimitError, TornStateError
from ckptstore.events import silent
from ckptstore.format import framing
from ckptstore.format import manifest as manifests
from ckptstore.format.keys import pack_key
from ckptstore.format.manifest import Manifest, PieceTable
from ckptstore.format.pack import CHUNK_HEADER_BYTES
from ckptstore.format.tables import NO_BASE
from ckptstore.objects.piece_reader import ReadItem, read_pieces
from ckptstore.store import Store

Backends = Callable[[], MemoryBackend]
Rows = npt.NDArray[np.uint32]


def fill(store: Store, count: int = 2) -> None:
    """Save the first versions of a run."""
    for step in range(count):
        store.run("gpt").save(state_of(step), step=step)


def weight_rows(store: Store, ref: str = "gpt@1") -> tuple[PieceTable, range]:
    """Return the table of a version, and the rows of a tensor whose pieces are deltas."""
    content = store.version(ref)._content
    index = content.labels.index("model.weight")
    first = content.manifest.first
    return content.manifest.pieces, range(first[index], first[index + 1])


def damage(backend: MemoryBackend, table: PieceTable, row: int, *, at: int = 40) -> None:
    """Flip a bit in the stored bytes of a chunk."""
    key = pack_key(table.packs[int(table.pack[row])])
    data = bytearray(backend.objects[key].data)
    data[int(table.offset[row]) + CHUNK_HEADER_BYTES + at] ^= 1
    backend.delete(key)
    backend.put(key, bytes(data))


def base_row(table: PieceTable, row: int) -> int:
    """Return the row that a delta refers to."""
    base = table.base_of(row)
    assert base is not None
    return base


# --- parts ----------------------------------------------------------------------------------------
def test_parts_are_read_through_deltas(store: Store) -> None:
    """Slices, single elements and patterns give what they would of the whole."""
    fill(store, 3)
    lazy = store.version("gpt@2")
    whole = state_of(2)["model"]["weight"]
    for part in (slice(0, 5), slice(16_380, 16_390), slice(49_990, None), slice(0, 50_000, 7)):
        assert torch.equal(lazy["model.weight"][part], whole[part])
    assert torch.equal(lazy["model.weight"][33_333], whole[33_333])
    half = store.load("gpt@2", include=["model.half"])
    assert same(half, {"model": {"half": state_of(2)["model"]["half"]}})


def test_deltas_go_into_tensors_that_are_there(store: Store) -> None:
    """``into`` fills existing memory, and a second time the same."""
    fill(store)
    target = state_of(7)
    for _ in range(2):
        store.load("gpt@1", into=target)
        assert same(target["model"], state_of(1)["model"])


def test_memory_stays_within_the_budget(backends: Backends) -> None:
    """With room for one span at a time, everything loads and saves still."""
    store = open_store(backends(), host_bytes=1, workers=1, base_bytes=0)
    fill(store, 3)
    for step in range(3):
        assert same(store.load(f"gpt@{step}"), state_of(step))


def test_two_tensors_of_one_delta(store: Store) -> None:
    """Tensors with equal bytes share one delta, and both come back."""

    def state(step: int) -> dict[str, Any]:
        weight = state_of(step)["model"]["weight"]
        return {"a": weight, "b": weight.clone()}

    for step in range(2):
        version = store.run("twins").save(state(step), step=step)
    table = manifest_of(store, version).pieces
    assert deltas_of(store, version) == 8
    assert len({int(offset) for offset in table.offset[:8]}) == 4
    assert same(store.load("twins@1"), state(1))


# --- damage ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["stored bytes", "the id of the base", "the header"])
def test_damage_to_a_delta_is_told(store: Store, backend: MemoryBackend, what: str) -> None:
    """The error names the tensor and the pack; other tensors and versions load."""
    fill(store)
    table, rows = weight_rows(store)
    at = {"stored bytes": 60, "the id of the base": 3, "the header": -60}[what]
    damage(backend, table, rows[1], at=at)

    with pytest.raises(CorruptTensorError, match=r"tensor model\.weight: .* \(pack "):
        store.load("gpt@1")
    assert same(store.load("gpt@0"), state_of(0))
    assert store.load("gpt@1", include=["model.half"])


@pytest.mark.parametrize("gone", [False, True])
def test_damage_to_a_base_is_told_of_the_delta(
    store: Store, backend: MemoryBackend, gone: bool
) -> None:
    """Load and verify say which tensor, that its base is lost, and where that lay."""
    fill(store)
    table, rows = weight_rows(store)
    base = base_row(table, rows[0])
    pack = table.packs[int(table.pack[base])]
    if gone:
        backend.delete(pack_key(pack))
    else:
        damage(backend, table, base)

    with pytest.raises(CorruptTensorError, match=rf"model\.weight: its base is lost \(pack {pack}"):
        store.load("gpt@1", include=["model.weight"])
    for level in ("full", "records") if gone else ("full",):
        problems = store.verify(level=level).problems
        found = [p for p in problems if p.step == 1 and p.tensor == "model.weight"]
        assert len(found) == 1
        assert "its base is lost" in found[0].message


# --- repair ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("gone", [False, True])
def test_a_base_that_is_brought_back_mends_its_deltas(backends: Backends, gone: bool) -> None:
    """From a copy that has the keyframe: the deltas stay deltas, and everything loads."""
    backend, copy = backends(), backends()
    store, other = open_store(backend), open_store(copy)
    fill(store, 3)
    other.run("copy").save(state_of(0), step=0)
    table, rows = weight_rows(store)
    if gone:
        backend.delete(pack_key(table.packs[int(table.pack[base_row(table, rows[0])])]))
    else:
        for row in rows:
            damage(backend, table, base_row(table, row))
    before = deltas_of(store, store.versions()[-1])

    report = store.repair(source=other)

    assert not report.lost
    assert store.verify().ok
    for step in range(3):
        assert same(open_store(backend).load(f"gpt@{step}"), state_of(step))
    assert deltas_of(store, store.versions()[-1]) == before
    assert report.pieces["rebased"] > 0


def test_deltas_are_mended_without_their_base(backends: Backends) -> None:
    """From a copy that has the later version alone: its pieces are then stored by themselves."""
    backend, copy = backends(), backends()
    store, other = open_store(backend), open_store(copy)
    fill(store)
    other.run("copy").save(state_of(1), step=1)
    table, rows = weight_rows(store)
    for row in rows:
        damage(backend, table, base_row(table, row))

    report = store.repair(source=other)

    assert [lost.step for lost in report.lost] == [0]
    assert same(store.load("gpt@1"), state_of(1))
    table, rows = weight_rows(store)
    assert all(table.base_of(row) is None for row in rows)


def test_a_delta_whose_header_is_damaged_is_salvaged(store: Store, backend: MemoryBackend) -> None:
    """Its stored bytes and its base are there, so that it can be had without any copy."""
    fill(store)
    table, rows = weight_rows(store)
    damage(backend, table, rows[2], at=-60)

    report = store.repair()

    assert not report.lost
    assert report.pieces == {"salvaged": 1}
    assert same(store.load("gpt@1"), state_of(1))


def test_a_delta_that_was_moved_is_found(store: Store, backend: MemoryBackend) -> None:
    """Bytes were put into its pack: the scan finds the chunk, and its base tells what it is."""
    fill(store)
    table, rows = weight_rows(store)
    key = pack_key(table.packs[int(table.pack[rows[0]])])
    data = backend.objects[key].data
    backend.delete(key)
    backend.put(key, data[:32] + b"xyz" + data[32:])

    report = store.repair()

    assert not report.lost
    assert report.pieces["scanned"] >= len(rows)
    assert same(store.load("gpt@1"), state_of(1))
    assert store.verify().ok


def test_a_dry_repair_foresees_what_a_base_mends(backends: Backends) -> None:
    """It says that nothing will be lost, and changes nothing."""
    backend, copy = backends(), backends()
    store, other = open_store(backend), open_store(copy)
    fill(store)
    other.run("copy").save(state_of(0), step=0)
    table, rows = weight_rows(store)
    damage(backend, table, base_row(table, rows[0]))
    before = {key: item.data for key, item in backend.objects.items()}

    report = store.repair(source=other, dry_run=True)

    assert not report.lost
    assert {key: item.data for key, item in backend.objects.items()} == before


# --- hostile manifests ----------------------------------------------------------------------------
def refuses(manifest: Manifest, **columns: Any) -> None:  # noqa: ANN401
    """Hold that a manifest with other columns is neither written nor read."""
    table = manifest.pieces
    names = ("ids", "raw", "pack", "offset", "stored", "inner", "slab", "base")
    parts = {name: columns.get(name, getattr(table, name)) for name in names}
    with pytest.raises(LimitError, match=r"deltas|piece"):
        manifests.encode(replace(manifest, pieces=PieceTable(packs=table.packs, **parts)))


def changed(column: npt.NDArray[Any] | None, row: int, value: object) -> npt.NDArray[Any]:
    """Return a column with another value in one row."""
    assert column is not None
    column = column.copy()
    column[row] = value
    return column


def test_hostile_bases_are_refused(store: Store) -> None:
    """A base of a base, one out of range, of another length, unused, a tensor's; a cycle."""
    fill(store)
    manifest = manifest_of(store, store.versions()[-1])
    table, rows = weight_rows(store)
    own, delta = manifest.first[-1], rows[0]
    base = base_row(table, delta)
    refuses(manifest, base=changed(table.base, base, own))
    refuses(manifest, base=changed(table.base, base, base))
    refuses(manifest, base=changed(table.base, delta, delta))
    refuses(manifest, base=changed(table.base, delta, 0))
    refuses(manifest, base=changed(table.base, delta, len(table)))
    refuses(manifest, base=changed(table.base, delta, NO_BASE - 1))
    refuses(manifest, base=changed(table.base, delta, NO_BASE))  # nothing needs the base then
    refuses(manifest, base=changed(table.base, delta, base_row(table, rows[-1])))
    refuses(manifest, ids=changed(table.ids, delta, table.ids[base]))
    refuses(manifest, inner=changed(table.inner, delta, 4), slab=changed(table.slab, delta, 70_000))
    refuses(manifest, base=np.full(len(table), NO_BASE, np.uint32))


def test_flags_that_lie_are_refused(store: Store) -> None:
    """A record with bases and no flag, with the flag and no bases, or of another role."""
    fill(store)
    versions = store.versions()
    for version, flags in ((versions[0], manifests.FLAG_BASES), (versions[1], 0)):
        data = manifests.encode(manifest_of(store, version))
        raw = framing.decode_frame(
            manifests.MAGIC, data, where="", raw_bytes_max=1 << 24, flags_known=7
        )
        lying = framing.encode_frame(manifests.MAGIC, raw, flags=flags)
        with pytest.raises(CorruptObjectError, match="flag of bases"):
            manifests.decode(lying, where="here", version=version.id)
    data = manifests.encode(manifest_of(store, versions[1]))
    raw = framing.decode_frame(
        manifests.MAGIC, data, where="", raw_bytes_max=1 << 24, flags_known=7
    )
    other = framing.encode_frame(manifests.MAGIC, raw.replace(b"\xa4base", b"\xa4bose", 1), flags=4)
    with pytest.raises(CorruptObjectError):
        manifests.decode(other, where="here", version=versions[1].id)


def test_a_manifest_that_names_another_base_gives_an_error(store: Store) -> None:
    """Whoever swaps two bases of one length: the chunks say what they refer to."""
    fill(store)
    version = store.versions()[-1]
    manifest = manifest_of(store, version)
    table, rows = weight_rows(store)
    one, two = base_row(table, rows[0]), base_row(table, rows[1])
    base = changed(changed(table.base, rows[0], two), rows[1], one)
    names = ("ids", "raw", "pack", "offset", "stored", "inner", "slab")
    parts = {name: getattr(table, name) for name in names}
    swapped = replace(manifest, pieces=PieceTable(packs=table.packs, base=base, **parts))
    manifests.encode(swapped)  # nothing is wrong with it in itself
    store.repo.manifests.keep(version.manifest_digest, swapped)

    with pytest.raises(CorruptTensorError, match="another base"):
        store.load("gpt@1")


def test_a_manifest_that_takes_a_delta_for_none_gives_an_error(store: Store) -> None:
    """And one that takes a piece for a delta that is none."""
    fill(store)
    version = store.versions()[-1]
    manifest = manifest_of(store, version)
    table = manifest.pieces
    assert table.base is not None
    names = ("ids", "raw", "pack", "offset", "stored", "inner", "slab")
    parts = {name: getattr(table, name) for name in names}
    plain = PieceTable(packs=table.packs, **parts)
    store.repo.manifests.keep(version.manifest_digest, replace(manifest, pieces=plain))
    with pytest.raises(CorruptTensorError, match="a delta without a base"):
        store.load("gpt@1")

    content = store.version("gpt@1")._content
    index = content.labels.index("optimizer.state.0.exp_avg")
    rows = weight_rows(store)[1]
    row = manifest.first[index]
    base = changed(table.base, row, base_row(table, rows[0]))
    lying = PieceTable(packs=table.packs, base=base, **parts)
    store.repo.manifests.keep(version.manifest_digest, replace(manifest, pieces=lying))
    with pytest.raises(CorruptTensorError, match="no delta"):
        store.load("gpt@1")


def test_a_manifest_with_two_lengths_of_one_delta_gives_an_error(store: Store) -> None:
    """Two pieces of one id at one place, one of them said to be shorter; each alone is sound."""
    fill(store)
    table, rows = weight_rows(store)
    names = ("ids", "pack", "offset", "stored", "inner", "slab", "base")
    parts = {name: changed(getattr(table, name), rows[1], getattr(table, name)[rows[0]])
             for name in names}  # fmt: skip
    raw = changed(table.raw, rows[1], table.raw[rows[0]] - 4)
    lying = PieceTable(packs=table.packs, raw=raw, **parts)
    items = [
        ReadItem(row=row, out=memoryview(bytearray(int(raw[row]))), label="model.weight")
        for row in rows[:2]
    ]
    with pytest.raises(TornStateError, match=r"model\.weight"):
        read_pieces(
            lying, items, backend=store.repo.backend, options=store.repo.options, progress=silent
        )


# --- other stores, and what is left of versions ---------------------------------------------------
@pytest.mark.parametrize("has", [None, 0, 1])
def test_a_version_travels_with_its_bases(backends: Backends, has: int | None) -> None:
    """Into another store, empty or with some of it; what is there already does not travel."""
    here, there = backends(), backends()
    store, other = open_store(here), open_store(there)
    fill(store, 3)
    if has is not None:
        other.run("there").save(state_of(has), step=0)
    before = size_of(there, there.objects)

    store.fork("gpt@2", "away", store=other)

    assert same(other.load("away"), state_of(2))
    assert other.verify().ok
    packs = map(pack_key, packs_of(store, store.versions()[-1]))
    grown = size_of(there, there.objects) - before
    assert grown < size_of(here, packs) * (1.05 if has is None else 0.9)


def size_of(backend: MemoryBackend, keys: Iterable[str]) -> int:
    """Return the bytes of some objects."""
    return sum(len(backend.objects[key].data) for key in keys)


def test_a_part_of_a_version_takes_the_bases_that_it_needs(store: Store) -> None:
    """A fork of some tensors, and a version of which only the weights stay, load and verify."""
    fill(store)
    store.fork("gpt@1", "part", include=["model.half"])
    store.run("gpt").save(state_of(2), step=2)
    store.age(["gpt@1"], "weights")

    assert same(store.load("part"), {"model": {"half": state_of(1)["model"]["half"]}})
    aged = store.load("gpt@1")
    assert same(aged["model"], state_of(1)["model"])
    assert deltas_of(store, store.versions(run="part")[0]) == 2
    assert store.verify().ok
    store.remove(["gpt@0"], force=True)
    assert store.sharing().roles["base"] > 0


MIB = 1 << 20
PROGRAM = """
folder, budget = sys.argv[1], int(sys.argv[2])
open_it = lambda: ckptstore.open(
    folder, create=True, host_bytes=budget, workers=2, codec="delta", base_bytes=0
)
run = open_it().run("gpt")
run.save({"w": torch.randn(100_000)}, step=0)  # what is loaded once is loaded now
run.save({"w": torch.randn(100_000)}, step=1)
run.load()
state = {f"w{n}": torch.randn(10_000_000) * 0.02 for n in range(4)}
run.save(state, step=2)
for tensor in state.values():
    tensor += 1e-6
figures = {"save": peak(lambda: run.save(state, step=3))}
store = open_it()
version = store.resolve("gpt")
share = sum(part.stored / part.logical for part in version.roles.values())
figures["load"] = peak(lambda: store.load("gpt", into=state))
figures["verify"] = peak(lambda: store.verify())
print(json.dumps([share, figures]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_process_stays_within_the_budget(tmp_path: Path) -> None:
    """A state of 160 MB of deltas: saved with bases that are read, loaded in place, verified.

    Some slack is granted: a chunk, its base and its planes for each of two workers, and what the
    allocator keeps.
    """
    budget = 64 * MIB
    share, figures = told_by(PROGRAM, tmp_path / "store", budget)

    assert share < 0.7
    for name, peak_mib in figures.items():
        assert peak_mib * MIB < budget + 48 * MIB, (name, figures)
