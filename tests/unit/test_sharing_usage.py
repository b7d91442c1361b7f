"""Who holds which bytes, against a count with sets."""

from __future__ import annotations

import pytest
import torch

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.limits import KIB
from ckptstore.maintenance.reports import sharing
from ckptstore.repo import create_on, open_on

EACH = 64 + 48
"""Header of a chunk and its row in the index, in bytes."""


@pytest.fixture
def store(memory: MemoryBackend) -> ckptstore.Store:
    """Return a store with forks, a rollback, and versions that were deleted or share everything."""
    store = ckptstore.Store(create_on(memory, chunk_bytes=64 * KIB))
    torch.manual_seed(0)
    base, table = torch.randn(200, 200), torch.randn(1000, 64)
    run = store.run("gpt")
    for step in range(6):
        table[step * 100] += 1
        model = {"base": base, "table": table, "bias": torch.randn(7)}
        run.save({"model": model, "opt": {"m": torch.randn(100, 100)}}, step=step)
    store.fork("gpt@2", "ft", include=["model"])
    store.run("ft").save({"model": {"base": base, "head": torch.randn(99)}}, step=3)
    store.fork("ft@2", "third")
    run.rollback(3)
    store.remove(["gpt@1"])
    store.run("alone").save({"x": torch.randn(300, 300)}, step=0)
    return store


def _sets(store: ckptstore.Store) -> dict[str, dict[tuple[str, int], int]]:
    """Return the chunks of each version and their size, the plain way."""
    found = {}
    for version in store.versions():
        table = store.version(f"#{version.id}")._content.manifest.pieces
        found[version.id] = {
            (table.packs[int(pack)], int(offset)): int(stored) + EACH
            for pack, offset, stored in zip(table.pack, table.offset, table.stored, strict=True)
        }
    return found


@pytest.fixture(params=[1 << 16, 1], ids=["at once", "bit by bit"])
def _settling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort in what waits at once, or after every version."""
    if request.param == 1:
        add = sharing._Ledger.add

        def eager(self: sharing._Ledger, *arguments: object) -> None:
            add(self, *arguments)  # type: ignore[arg-type]
            self.settle()

        monkeypatch.setattr(sharing._Ledger, "add", eager)


@pytest.mark.usefixtures("_settling")
def test_sums_equal_those_of_sets(store: ckptstore.Store) -> None:
    """By version, by run, by set of runs, and in all."""
    chunks = _sets(store)
    runs = {version.id: version.run for version in store.versions()}
    union = {key: size for part in chunks.values() for key, size in part.items()}
    holders = {key: {v for v, part in chunks.items() if key in part} for key in union}

    usage = store.sharing()

    assert usage.stored_bytes == sum(union.values()) == sum(usage.roles.values())
    assert (usage.chunks_count, usage.versions_count) == (len(union), len(chunks))
    for version, part in chunks.items():
        own = sum(size for key, size in part.items() if holders[key] == {version})
        assert usage.versions[version].held == sum(part.values())
        assert usage.versions[version].exclusive == own
    by_set: dict[tuple[str, ...], int] = {}
    for key, size in union.items():
        names = tuple(sorted({runs[v] for v in holders[key]}))
        by_set[names] = by_set.get(names, 0) + size
    assert {share.runs: share.size_bytes for share in usage.shares} == {
        names: size for names, size in by_set.items() if len(names) > 1
    }
    for run, found in usage.runs.items():
        assert found.exclusive == by_set.get((run,), 0)
        assert found.held == sum(size for names, size in by_set.items() if run in names)
        assert found.shared == found.held - found.exclusive


def test_packs_hold_the_live_bytes(store: ckptstore.Store) -> None:
    """After a collection with repack, packs are the live chunks and 64 bytes each."""
    store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)
    store.gc(grace_s=0, orphan_age_s=0, repack_below=1.0)

    packs = store.stats().objects["packs"]
    assert store.sharing().stored_bytes == packs.size_bytes - 64 * packs.count


def test_deleting_frees_what_was_held_alone(store: ckptstore.Store) -> None:
    """The live bytes shrink by exactly what a version held alone."""
    before = store.sharing()
    version = store.resolve("gpt@4")
    store.remove(["gpt@4"])

    after = store.sharing()
    assert after.stored_bytes == before.stored_bytes - before.versions[version.id].exclusive


def test_empty_and_tiny_stores(memory: MemoryBackend) -> None:
    """No version, or one without a tensor."""
    store = ckptstore.Store(create_on(memory))
    assert store.sharing() == sharing.SharedUsage(
        versions_count=0, chunks_count=0, stored_bytes=0, raw_bytes=0
    )
    version = store.run("r").save({"x": 1}, step=1)
    usage = store.sharing()
    assert usage.versions == {version.id: sharing.HeldBytes()}


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_version_without_its_manifest_is_left_out(
    store: ckptstore.Store, memory: MemoryBackend, damage: str
) -> None:
    """The others are counted as if it were deleted, and the reason names it."""
    victim = store.resolve("alone")
    memory.delete(victim.manifest_key)
    if damage == "damaged":
        memory.put(victim.manifest_key, b"x" * victim.manifest_bytes)
    reader = ckptstore.Store(open_on(memory))

    usage = reader.sharing()
    assert victim.id not in usage.versions
    assert len(usage.versions) == usage.versions_count == len(store.versions()) - 1
    (reason,) = usage.skipped
    assert f"alone@0 (#{victim.id[:8]})" in reason
