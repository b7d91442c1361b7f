"""Parts of several writers become one version, which everything that reads versions can read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metered import MeteredBackend
from safetensors.torch import load_file
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.checkpoint.assemble import RankPart, assemble, commit_parts, nest
from ckptstore.checkpoint.regions import Region, read_regions
from ckptstore.checkpoint.request import WriteRequest
from ckptstore.checkpoint.write import shareable
from ckptstore.errors import CondemnedError, CorruptTensorError, InvalidInputError, StateError
from ckptstore.integrations.files import export_safetensors
from ckptstore.repo import create_on, open_on
from ckptstore.states.shards import Shard, write_part
from ckptstore.store import Store
from ckptstore.tensors.tensor_bytes import as_elements

Cuts = Sequence[Sequence[int]]
"""Per dimension: where a tensor is cut."""


def boxes(shape: Sequence[int], cuts: Cuts) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes of a mesh."""
    borders = [
        sorted({0, size, *(c for c in cut if 0 < c < size)})
        for size, cut in zip(shape, cuts, strict=True)
    ]
    yield from itertools.product(
        *([slice(a, b) for a, b in itertools.pairwise(line)] for line in borders)
    )


def shards_of(name: str, whole: torch.Tensor, cuts: Cuts) -> list[Shard]:
    """Return a tensor as boxes."""
    return [
        Shard(
            name=name,
            shape=tuple(whole.shape),
            offsets=tuple(part.start for part in box),
            tensor=whole[box],
        )
        for box in boxes(whole.shape, cuts)
    ]


def save_parts(
    store: Store,
    wholes: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Cuts],
    *,
    writers: int = 3,
    values: Mapping[str, object] | None = None,
    step: int = 0,
    shared: Sequence[Any] = (),
) -> ckptstore.Version:
    """Save tensors in boxes, dealt out to some writers."""
    shards = [s for name, whole in wholes.items() for s in shards_of(name, whole, cuts[name])]
    parts = [
        write_part(store.repo, shards[n::writers], (values or {}) if n == 0 else {}, shared=shared)
        for n in range(writers)
    ]
    paths: dict[str, Any] = {name: ("model", name) for name in wholes}
    paths |= {name: ("extra", name) for name in values or {}}
    request = WriteRequest(run="parts", step=step)
    return commit_parts(store.repo, parts, paths, request, roles={})


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Return an empty store in memory, with small chunks, that counts what is read."""
    backend = MeteredBackend(MemoryBackend(f"parts/{request.node.nodeid}"))
    repo = create_on(backend, environment=SimulatedEnvironment(3), chunk_bytes=65536)
    with Store(repo) as opened:
        yield opened


WHOLE = {
    "rows": torch.randn(300, 400, generator=torch.Generator().manual_seed(1)),
    "columns": torch.randn(300, 400, generator=torch.Generator().manual_seed(2)),
    "tiles": torch.randn(130, 170, 6, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "small": torch.arange(30, dtype=torch.int16).reshape(5, 6),
    "wide": torch.randn(3, 40_000, generator=torch.Generator().manual_seed(4), dtype=torch.double),
}
TURNED = WHOLE["columns"].t().clone()  # in memory of its own, still column by column
CUTS: dict[str, Cuts] = {
    "rows": [[100, 101, 250], []], "columns": [[], [7, 200]], "tiles": [[50], [60, 100], [4]],
    "small": [[2], [3]], "wide": [[1], [10_000, 30_001]],
}  # fmt: skip


def test_everything_reads_a_version_of_parts(store: Store, tmp_path: Path) -> None:
    """Load, partial load, into, lazy, fork, export, verify, diff: whole tensors, bit by bit."""
    values = {"step": 3, "names": ["a"], "pair": (torch.ones(2), 1)}
    version = save_parts(store, WHOLE, CUTS, values=values)
    found = store.load("parts")

    for name, whole in WHOLE.items():
        assert torch.equal(found["model"][name], whole), name
    assert found["extra"]["step"] == 3
    assert found["extra"]["names"] == ["a"]
    assert torch.equal(found["extra"]["pair"][0], torch.ones(2))
    part = store.load("parts", include=["model.tiles"])
    assert torch.equal(part["model"]["tiles"], WHOLE["tiles"])
    into = {"model": {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}}
    store.load("parts", include=["model"], into=into)
    assert all(torch.equal(into["model"][name], whole) for name, whole in WHOLE.items())
    target = {name: torch.zeros(whole.shape) for name, whole in WHOLE.items()}
    report = store.load_into("parts", target, rename={"model": ""})
    assert len(report.loaded) == 5
    assert torch.equal(target["tiles"], WHOLE["tiles"].float())
    export_safetensors(store, "parts", tmp_path / "all.safetensors", strip_prefix="model.")
    exported = load_file(tmp_path / "all.safetensors")
    assert all(torch.equal(exported[name], whole) for name, whole in WHOLE.items())
    store.fork("parts", "forked", include=["model.tiles", "model.columns"])
    forked = store.load("forked")["model"]
    assert torch.equal(forked["tiles"], WHOLE["tiles"])
    assert store.verify().ok
    assert version.receipt["ranks_count"] == 3
    assert {role: size.logical for role, size in version.roles.items()} == {
        "weights": sum(whole.nbytes for whole in WHOLE.values()) + 8
    }


def test_versions_of_other_layouts_differ_in_nothing_but_how_they_lie(store: Store) -> None:
    """Diff of two layouts of one state finds no element that differs."""
    save_parts(store, WHOLE, CUTS)
    store.run("parts").save({"model": dict(WHOLE)}, step=1)
    report = store.diff("parts@0", "parts@1")
    errors = report.errors()

    assert {path.removeprefix("model.") for path in errors} >= {"columns", "tiles", "wide"}
    assert all(error is not None and error.unequal == 0 for error in errors.values())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_box_of_any_tensor(store: Store, data: st.DataObject) -> None:
    """Regions hold what slices of the whole tensor do, into memory of any strides."""
    if not store.versions():
        save_parts(store, WHOLE, CUTS)
        store.run("parts").save(
            {"model": {**WHOLE, "turned": TURNED, "scalar": torch.tensor(2.0)}}, step=1
        )
    step = data.draw(st.integers(0, 1))
    content = store.version(f"parts@{step}")._content
    leaves = {leaf.path[-1]: leaf.index for leaf in content.leaves}
    wholes = {**WHOLE, "turned": TURNED, "scalar": torch.tensor(2.0)}
    regions, checks = [], []
    for name in data.draw(
        st.lists(st.sampled_from(sorted(map(str, leaves))), min_size=1, max_size=3)
    ):
        whole = wholes[name]
        low = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
        high = [data.draw(st.integers(a, size)) for a, size in zip(low, whole.shape, strict=True)]
        meant = whole[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        out = torch.zeros_like(meant)
        if data.draw(st.booleans()) and out.ndim > 1:
            out = torch.zeros(tuple(reversed(meant.shape)), dtype=meant.dtype).permute(
                *reversed(range(meant.ndim))
            )
        regions.append(
            Region(content=content, index=leaves[name], offsets=tuple(low), out=as_elements(out))
        )
        checks.append((meant, out))
    read_regions(regions, backend=store.repo.backend, options=store.repo.options)

    assert all(torch.equal(meant, out) for meant, out in checks)


def test_a_box_needs_no_more_than_its_pieces(store: Store) -> None:
    """A column out of three of a blocked tensor: its block alone is fetched, and no other."""
    save_parts(store, {"columns": WHOLE["columns"]}, CUTS)
    lazy = store.version("parts")["model.columns"]
    backend = store.repo.backend
    assert isinstance(backend, MeteredBackend)
    before = backend.snapshot()["read_into"].bytes_moved
    part = lazy[:, :7]
    moved = backend.snapshot()["read_into"].bytes_moved - before

    assert torch.equal(part, WHOLE["columns"][:, :7])
    assert 300 * 7 * 4 * 0.5 < moved < 65536


def test_pieces_lie_on_the_grid_of_the_whole(store: Store) -> None:
    """Slabs share with a save of the whole: but for the pieces at their borders, nothing is new."""
    large = torch.randn(5000, 100, generator=torch.Generator().manual_seed(8))
    wide = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(9))
    state = {"large": large, "wide": wide}
    store.run("parts").save({"model": state}, step=0)
    shared = [store.repo.manifests.load(store.resolve("parts")).pieces]
    cuts: dict[str, Cuts] = {"large": [[1111, 1112, 3333], []], "wide": [[1, 2], []]}
    version = save_parts(store, state, cuts, step=1, shared=shared)

    assert all(torch.equal(store.load("parts@1")["model"][n], t) for n, t in state.items())
    new = sum(role.new for role in version.roles.values())
    # Three borders within `large` and two within `wide`: a piece each, cut in two.
    assert new <= 5 * 65536


def part_of(store: Store, *shards: Shard, **values: object) -> RankPart:
    """Return what one writer wrote."""
    return write_part(store.repo, shards, values)


def shard(whole: torch.Tensor, *parts: slice, name: str = "w") -> Shard:
    """Return a box of a tensor."""
    return Shard(
        name=name,
        shape=tuple(whole.shape),
        offsets=tuple(part.start or 0 for part in parts),
        tensor=whole[parts],
    )


def test_what_is_not_a_whole_state_is_refused(store: Store) -> None:
    """Gaps, overlaps, other dtypes or shapes, a name that no one wrote: refused by name."""
    w = torch.randn(8, 6)
    halves = shard(w, slice(0, 4), slice(None)), shard(w, slice(4, 8), slice(None))
    other = Shard(name="w", shape=(8, 6), offsets=(4, 0), tensor=w[4:].double())
    cases: list[tuple[list[Shard], str]] = [
        ([halves[0]], "leave out"),
        ([*halves, shard(w, slice(3, 5), slice(0, 1))], "overlap"),
        ([halves[0], other], "agree"),
        ([shard(w, slice(0, 0), slice(None))], "no rank has any"),
        ([], "written by no rank"),
    ]
    for shards, why in cases:
        with pytest.raises(StateError, match=f"'w'.*{why}|{why}.*'w'"):
            commit_parts(
                store.repo, [part_of(store, *shards)], {"w": ("w",)},
                WriteRequest(run="parts", step=0), roles={},
            )  # fmt: skip
    assert store.log() == []


def test_a_value_on_one_rank_and_a_tensor_on_another_is_refused(store: Store) -> None:
    """Ranks that disagree on what a name is are told so; nothing is taken from either."""
    w = torch.randn(8, 6)
    parts = [part_of(store, w=5), part_of(store, shard(w, slice(None), slice(None)))]
    with pytest.raises(StateError, match="'w' is a value on one rank and a tensor on another"):
        commit_parts(store.repo, parts, {"w": ("w",)}, WriteRequest(run="parts", step=0), roles={})
    assert store.log() == []


def test_a_box_that_two_wrote_is_taken_once(store: Store) -> None:
    """Equal boxes of two writers are one; boxes of nothing are left out."""
    w = torch.arange(48.0).reshape(8, 6)
    parts = [
        part_of(store, shard(w, slice(0, 4), slice(None)), shard(w, slice(8, 8), slice(None))),
        part_of(store, shard(w, slice(0, 4), slice(None)), shard(w, slice(4, 8), slice(None))),
    ]
    manifest, _ = assemble(parts, {"w": ("w",)}, version="ab" * 16, chunk_bytes=65536, roles={})

    assert manifest.first == (0, 2)
    assert manifest.tensors[0].blocks is None


def test_what_a_collection_took_fails_the_save(store: Store) -> None:
    """Orphans that were condemned before the commit: an error that says so, and no version."""
    w = torch.arange(48.0).reshape(8, 6)
    part = part_of(store, shard(w, slice(None), slice(None)))
    store.gc(orphan_age_s=0, grace_s=0)
    with pytest.raises(CondemnedError, match="while it went on"):
        commit_parts(store.repo, [part], {"w": ("w",)}, WriteRequest(run="parts", step=0), roles={})

    assert store.versions() == []


def test_a_rank_that_looked_before_the_coordinator_began_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was swept before the coordinator's snapshot is in no version: save again.

    The coordinator knows the log from its snapshot on, where what was deleted has no trace.
    """
    monkeypatch.setattr(limits, "SNAPSHOT_COMMITS_MIN", 10)
    w = torch.arange(40_000.0).reshape(200, 200)
    run = store.run("parts")
    before = run.save({"w": w}, step=1)
    tables = shareable(store.repo, before)
    whole = shard(w, slice(None), slice(None))
    part = write_part(store.repo, [whole], {}, shared=tables)
    assert part.written.pack_bytes == 0, "all of it is shared"
    run.save({"w": torch.ones(3)}, step=2)
    store.remove(["parts@1"])
    for _ in range(2):
        store.gc(orphan_age_s=0, grace_s=0)
    for number in range(25):
        run.annotate(2, {"loss": float(number)})

    options = {"environment": store.repo.environment}
    with Store(open_on(store.repo.backend, **options)) as other:  # type: ignore[arg-type]
        assert not other.repo.refresh().condemned, "it was deleted"
        paths, request = {"w": ("w",)}, WriteRequest(run="parts", step=3)

        def commit(one: RankPart) -> ckptstore.Version:
            return commit_parts(other.repo, [one], paths, request, roles={})

        with pytest.raises(CondemnedError, match=r"looked after commit .* save again"):
            commit(part)
        assert [version.step for version in other.versions()] == [2]
        commit(write_part(other.repo, [whole], {}))
        assert torch.equal(other.load("parts@3")["w"], w)


def test_damage_names_the_tensor(store: Store) -> None:
    """A box that needs a damaged piece raises with the tensor's name; others load."""
    save_parts(store, {n: WHOLE[n] for n in ("columns", "tiles")}, CUTS, writers=1)
    lazy = store.version("parts")
    manifest = lazy._content.manifest
    pieces = manifest.pieces
    backend = store.repo.backend
    row = manifest.first[1] - 1  # the last piece of the first tensor
    pack = pieces.packs[int(pieces.pack[row])]
    key = f"packs/{pack[:2]}/{pack}.pack"
    data = bytearray(backend.get(key, bytes_max=1 << 28))
    data[int(pieces.offset[row]) + 64 + 5] ^= 1
    backend.delete(key)
    backend.put(key, bytes(data))

    with pytest.raises(CorruptTensorError, match=r"model\.columns"):
        lazy["model.columns"][:, 390:]
    assert torch.equal(lazy["model.columns"][:, :7], WHOLE["columns"][:, :7])
    assert torch.equal(lazy["model.tiles"].load(), WHOLE["tiles"])


@pytest.mark.parametrize(
    ("leaves", "node"),
    [
        ([(("a", "b"), 1), (("a", "c"), 2)], ["d", "a", ["d", "b", 1, "c", 2]]),
        ([(("a", 1), 1)], ["d", "a", ["l", None, 1]]),
        ([(("a", 0, "x"), 1), (("a", 1, "x"), 2)], ["d", "a", ["l", ["d", "x", 1], ["d", "x", 2]]]),
        ([], ["d"]),
        ([(("\udc80",), 1)], ["d", ["u", b"\xed\xb2\x80"], 1]),
    ],
)
def test_paths_become_nested_containers(leaves: list[Any], node: Any) -> None:  # noqa: ANN401
    """Text keys make dicts, ints make lists; what is left out of a list is None."""
    assert nest(leaves) == node


@pytest.mark.parametrize(
    "leaves",
    [
        [(("a",), 1), (("a", "b"), 2)], [(("a", "b"), 1), (("a", 0), 2)],
        [(("a",), 1), (("a",), 2)], [((0,), 1)], [(("a", -1), 1)],
    ],
)  # fmt: skip
def test_paths_that_cannot_both_be_are_refused(leaves: list[Any]) -> None:
    """A value where others are held, a dict that is a list, a list without end."""
    with pytest.raises(InvalidInputError):
        nest(leaves)
