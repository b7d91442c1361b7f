"""Jobs of ranks. All ranks of a group run a job at once."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from faultkit.tripwire import Tripwire
from metered import MeteredBackend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from ckptstore.backends.oserrors import translate
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.errors import CkptStoreError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.repo import open_on
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When
from rankkit.groups import Rank
from rankkit.states import MODELS, blank, differences, mesh_of, sharded, state_of, tensors

Url = str | list[str]
"""URL of the store; a list if ranks reach it in different ways, in turn."""


def place(url: Url, me: Rank) -> str:
    """Return the URL by which this rank reaches the store."""
    return url if isinstance(url, str) else url[me.rank * len(url) // me.world]


def save(
    me: Rank,
    url: Url,
    options: dict[str, Any],
    run: str,
    seeds: Sequence[int],
    models: Sequence[str] = MODELS,
) -> list[str]:
    """Save the states of some seeds as steps; return the ids of the versions."""
    ids = []
    with ckptstore.open(place(url, me), **options) as store:
        for seed in seeds:
            state = state_of(me.world, seed=seed, models=models)
            writer = CkptStoreWriter(store.run(run), step=seed, metrics={"loss": 1 / seed})
            metadata = dcp_save(state, storage_writer=writer)
            assert metadata.storage_meta is not None
            assert (writer.version is not None) == (me.rank == 0)
            ids.append(str(metadata.storage_meta.save_id))
    return ids


def load(
    me: Rank, url: Url, options: dict[str, Any], ref: str, seed: int, models: Sequence[str]
) -> list[str]:
    """Load a version into a state of other values; return its differences to the unsharded one."""
    with ckptstore.open(place(url, me), read_only=True, **options) as store:
        state = blank(state_of(me.world, seed=seed + 100, models=models))
        dcp_load(state, storage_reader=CkptStoreReader(store, ref))
    return list(differences(state, state_of(0, seed=seed, models=models)))


def _metered(url: str) -> tuple[Store, MeteredBackend]:
    backend = MeteredBackend(open_backend(url))
    return Store(open_on(backend, options=Options(workers=2))), backend


def _read_bytes(backend: MeteredBackend) -> int:
    meter = backend.snapshot().get("read_into")
    return 0 if meter is None else meter.bytes_moved


def load_counting(me: Rank, url: str, ref: str) -> dict[str, tuple[int, int]]:
    """Load each large tensor alone, by rows and by columns; return bytes read, and those needed."""
    found: dict[str, tuple[int, int]] = {}
    store, backend = _metered(url)
    with store:
        for name in ("large", "large_columns"):
            for way, placement in (("rows", Shard(0)), ("columns", Shard(1))):
                whole = torch.zeros_like(tensors()[name])
                part = sharded(whole, mesh_of(me.world, 1), [placement])
                before = _read_bytes(backend)
                dcp_load({"tensors": {name: part}}, storage_reader=CkptStoreReader(store, ref))
                read = _read_bytes(backend) - before
                assert not list(differences(part, tensors()[name])), name
                found[f"{name} by {way}"] = (read, part.to_local().nbytes)
    return found


def replicas(me: Rank, url: str) -> list[tuple[int, float, float]]:
    """Save values that all ranks, and pairs of them, hold alike; return this rank's bytes.

    Per save: bytes that this rank wrote into packs, bytes of the state, and bytes stored.
    """
    random = torch.Generator().manual_seed(5)
    sizes = [40_000, 500_000, 30_000, 20_000, 90_000, 300_000, 10_000, 250_000, 150_000, 600_000]
    wide = mesh_of(me.world, 1)
    both = mesh_of(me.world, 2)
    alike = {f"t{n}": torch.randn(size, generator=random) for n, size in enumerate(sizes)}
    states: list[dict[str, Any]] = [
        {name: sharded(full, wide, [Replicate()]) for name, full in alike.items()},
        dict(alike),
        {name: sharded(full, both, [Replicate(), Shard(0)]) for name, full in alike.items()},
    ]
    found = []
    states[0]["rank"] = me.rank
    states[1][f"random.{me.rank}"] = torch.full((3,), me.rank)
    store, backend = _metered(url)
    with store:
        for number, state in enumerate(states):
            before = backend.snapshot().get("writer.write")
            run = store.run(f"replicas-{number}")
            dcp_save(dict(state), storage_writer=CkptStoreWriter(run, step=0, codec="raw"))
            after = backend.snapshot().get("writer.write")
            mine = (after.bytes_moved if after else 0) - (before.bytes_moved if before else 0)
            roles = run.versions()[0].roles.values()
            logical, stored = sum(r.logical for r in roles), sum(r.stored for r in roles)
            found.append((mine, float(logical), float(stored)))
    return found


def cached_plans(me: Rank, url: str) -> list[str]:
    """Save with a planner that keeps its plans, while the state changes; return problems."""
    problems: list[str] = []
    mesh = mesh_of(me.world, 1)
    with ckptstore.open(url) as store:
        run = store.run("cached")
        for step, extra in enumerate((0, 0, 1, 1, 0)):
            alike = {f"a{n}": torch.full((50_000,), float(step + n)) for n in range(6 + extra)}
            rows = torch.arange(40.0).reshape(20, 2) + step
            state: dict[str, Any] = {**alike, "rows": sharded(rows, mesh, [Shard(0)]), "n": step}
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp_save(state, storage_writer=CkptStoreWriter(run, step=step), planner=planner)
            loaded = run.load(step)
            problems += differences(loaded, {**alike, "rows": rows, "n": step}, f"{step}")
    return problems


def fail(me: Rank, url: str, number: int, call: str, victim: int) -> tuple[str, list[str], int]:
    """Save while one rank's storage fails; return this rank's error, who failed, and versions."""
    fault = Fault(
        calls=frozenset({call}),
        at=1,
        times=0,
        error=lambda: translate(OSError(number, "injected"), "a write", writing=True),
    )
    backend = open_backend(url)
    if me.rank == victim:
        backend = FaultyBackend(backend, fault)
    said, who = "", []
    with Store(open_on(backend)) as store:
        run = store.run("failing")
        state = {
            "w": sharded(torch.randn(4000, 20), mesh_of(me.world, 1), [Shard(0)]),
            "s": sharded(torch.randn(90, 20), mesh_of(me.world, 1), [Shard(1)]),
        }
        try:
            dcp_save(state, storage_writer=CkptStoreWriter(run, step=1))
        except CheckpointException as error:
            said = str(error)
            who = [
                f"{rank}:{type(wrapped[0]).__name__}" for rank, wrapped in error.failures.items()
            ]
        dist.barrier()
        versions = len(run.versions())
    return said, who, versions


def fail_in_turn(me: Rank, url: str) -> list[list[Any]]:
    """Let the storage of each rank fail in each way, one save after the other."""
    cases = [
        (number, call, victim)
        for victim in range(me.world)
        for number, call in (
            (errno.ENOSPC, "open_writer"),
            (errno.EIO, "writer.write"),
            (errno.ENOSPC, "writer.commit"),
        )
    ]
    cases += [(errno.EIO, "put", 0), (errno.ENOSPC, "put_if_absent", 0)]
    return [[*case, *fail(me, url, *case)] for case in cases]


def background(me: Rank, url: str) -> list[str]:
    """Save in the background while the state changes; return problems."""
    problems: list[str] = []
    with ckptstore.open(url) as store:
        run = store.run("background")
        rows = torch.randn(501, 30, generator=torch.Generator().manual_seed(1))
        part = sharded(rows, mesh_of(me.world, 1), [Shard(0)])
        for step in (1, 2):
            meant = {"w": rows * step, "step": step}
            state: dict[str, Any] = {"w": part * step, "step": step}
            pending: Any = async_save(state, storage_writer=CkptStoreWriter(run, step=step))
            state["w"].to_local().zero_()  # training continues
            metadata = pending.result()
            problems += differences(run.load(f"#{metadata.storage_meta.save_id}"), meant)
        problems += [] if len(run.versions()) == 2 else ["other versions"]
    return problems


def from_another_process(me: Rank, url: str) -> list[str]:
    """Save in the background by torch's own process, which gets the writer; return problems.

    The first save starts the process, the second finds it running.
    """
    problems: list[str] = []
    with ckptstore.open(url) as store:
        run = store.run("process", metrics={"loss": "min"})
        for step in (1, 2):
            state = {"w": torch.arange(90_000.0) * step, "n": [step]}
            pending: Any = async_save(
                state,
                storage_writer=CkptStoreWriter(run, step=step, metrics={"loss": 1.0 / step}),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            pending.result()
            problems += differences(run.load("best:loss"), state)
    return problems


def save_for_ever(
    me: Rank, url: Url, first: int, options: dict[str, Any] | None = None, doom: Sequence[int] = ()
) -> None:
    """Save step after step, reporting the beginning and end of each, until killed.

    With a `doom` of (rank, step, number), that rank kills itself at that one of its calls on files
    and on the storage from the beginning of the step on.
    """
    mesh = mesh_of(me.world, 1)
    wires: list[Tripwire] = []

    def tick(_call: str, _key: str) -> None:
        for wire in wires:
            wire.count()

    each = Fault(times=0, when=When.CALLBACK, callback=tick)
    backend = FaultyBackend(open_backend(place(url, me), **(options or {})), each)
    with Store(open_on(backend)) as store:
        run = store.run("killed")
        step = first
        while True:
            state = {
                name: sharded(full, mesh, [Shard(n % 2)])
                for n, (name, full) in enumerate(killed_tensors(step).items())
            }
            me.tell(("begins", step))
            if list(doom[:2]) == [me.rank, step]:
                wires.append(Tripwire(doom[2], after=False))
            dcp_save({"w": state, "step": step}, storage_writer=CkptStoreWriter(run, step=step))
            me.tell(("saved", step))
            step += 1


def create(_: Rank, url: str) -> None:
    """Create a store with small chunks."""
    ckptstore.open(url, create=True, chunk_bytes=65536).close()


def check_killed(_: Rank, url: str, seen: list[int], options: dict[str, Any] | None = None) -> int:
    """Check the store after :func:`save_for_ever`; return the last step in it.

    Every version must be whole, and each step that a rank saw saved must be one of them.
    """
    with ckptstore.open(url, **(options or {})) as store:
        versions = store.versions()
        for version in versions:
            state = store.load(f"#{version.id}")
            meant = {"w": killed_tensors(version.step), "step": version.step}
            assert not list(differences(state, meant)), version
        steps = [version.step for version in versions]
        assert set(seen) <= set(steps)
        assert len(steps) == len(set(steps)) == len(store.log())
    return max(steps, default=0)


def killed_tensors(step: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a step of :func:`save_for_ever`."""
    random = torch.Generator().manual_seed(step)
    return {f"t{n}": torch.randn(400, 251, generator=random) for n in range(4)}


def other_heads(me: Rank, url: str) -> list[str]:
    """Load while ranks would choose different versions; return problems."""
    with ckptstore.open(url) as store:
        run = store.run("heads")
        mesh = mesh_of(me.world, 1)
        whole = torch.arange(40.0).reshape(10, 4)
        for step in (1, 2):
            state = {"w": sharded(whole * step, mesh, [Shard(0)]), "n": step}
            dcp_save(state, storage_writer=CkptStoreWriter(run, step=step))
        mine = 1 if me.rank == 0 else 2  # as if others had seen a commit that rank 0 has not
        state = {"w": sharded(whole * 0, mesh, [Shard(0)]), "n": 0}
        reader = CkptStoreReader(run, mine)
        dcp_load(state, storage_reader=reader)
        assert reader.version is not None
        problems = list(differences(state, {"w": whole, "n": 1}))
        if reader.version.step != 1:
            problems.append(f"rank {me.rank} says that it loaded {reader.version}")
    return problems


def refused(me: Rank, url: str) -> list[str]:
    """Save states that must be refused; return the error on each rank."""
    said: list[str] = []
    mesh = mesh_of(me.world, 1)
    with ckptstore.open(url) as store:
        run = store.run("refused")
        rows = sharded(torch.ones(8, 2), mesh, [Shard(0)])
        wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"w": rows, "code": print}, {"step": 1}),
            ({"w": rows}, {"step": -1}),
            ({"w": rows}, {"step": 1, "tags": ["no tag!"]}),
            ({"w": rows.to_local() if me.rank else rows}, {"step": 1}),
            ({"w": rows}, {}),
        ]
        for state, words in wrong:
            try:
                dcp_save(state, storage_writer=CkptStoreWriter(run, **words))
            except (CheckpointException, CkptStoreError) as error:
                said.append(str(error))
            else:
                said.append("")
        dist.barrier()
        assert run.versions() == []
    return said
