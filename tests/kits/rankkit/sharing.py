"""Jobs of ranks that load a version together."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from metered import MeteredBackend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptstore
from ckptstore.backends.key_sources import read_key
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.errors import StorageError
from ckptstore.integrations.dcp import CkptStoreReader, CkptStoreWriter
from ckptstore.repo import open_on
from ckptstore.states import peers
from ckptstore.states.shared_load import _SharedPieces
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When
from rankkit.groups import Rank
from rankkit.states import differences, mesh_of, sharded

SMALL = {"host_bytes": 1 << 20}
"""Memory that makes many rounds of a state of some MiB."""


def state_of(seed: int = 1, scale: int = 1) -> dict[str, Any]:
    """Return a state of 3 MiB times `scale`: large tensors, small ones in slabs, a tied one."""
    random = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        f"t{n}": torch.randn(300 * n, 40 * scale, generator=random) for n in range(9)
    }
    state |= {f"s{n}": torch.randn(60 + n, generator=random) for n in range(40)}
    state["tied"] = state["t3"]
    state["half"] = state["t8"].to(torch.bfloat16)
    state["step"] = seed
    return state


def nbytes_of(state: Mapping[str, Any]) -> int:
    """Return the bytes of a state, tied tensors once."""
    return sum({id(t): t.nbytes for t in state.values() if isinstance(t, torch.Tensor)}.values())


def _metered(url: str, options: Mapping[str, Any], *faults: Fault) -> tuple[Store, MeteredBackend]:
    meter = MeteredBackend(FaultyBackend(open_backend(url), *faults))
    options = dict(options)
    given = options.pop("encryption_key", None)
    key = None if given is None else read_key(given)
    return Store(open_on(meter, key=key, options=Options(**{**SMALL, **options}))), meter


def bytes_read(meter: MeteredBackend) -> int:
    """Return the bytes that ranges moved."""
    found = meter.snapshot().get("read_into")
    return 0 if found is None else found.bytes_moved


def load(me: Rank, url: str, options: dict[str, Any], refs: list[str]) -> list[Any]:
    """Load versions alone and together; return bytes and differences of each."""
    found = []
    for ref in refs:
        store, meter = _metered(url, options)
        with store:
            store.load(ref)  # of concurrent first ranges of an encrypted pack each reads its head
            first = bytes_read(meter)
            alone = store.load(ref)
            second = bytes_read(meter)
            state = store.load(ref, group=dist.group.WORLD)
            together = bytes_read(meter) - second
            into = {name: torch.zeros_like(t) for name, t in alone.items() if name != "step"}
            report = store.load_into(ref, into, group=dist.group.WORLD, strict=False)
        problems = [*differences(state, alone)]
        problems += [n for n, t in into.items() if not torch.equal(t, alone[n])]
        problems += report.missing
        found.append((second - first, together, problems))
    return found


def from_server(me: Rank, url: str, options: dict[str, Any], groups: list[list[int]]) -> int:
    """Load the newest version of ``r`` in groups of ranks; return the seed that it says."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next((g for g, ranks in zip(made, groups, strict=True) if me.rank in ranks), None)
    with ckptstore.open(url, **options) as store:
        state = store.load("r@latest", group=mine)
    assert not list(differences(state, state_of(1)))
    return int(state["step"])


def different_refs(me: Rank, url: str) -> int:
    """Ask for another version on each rank; return the step of the one that came."""
    store, _ = _metered(url, {})
    with store:
        state = store.load("" if me.rank else "r@2", group=dist.group.WORLD)
        assert state["step"] == 2
        state = store.run("r").load(me.rank + 1, group=dist.group.WORLD)
        into = {"t5": torch.zeros(1500, 40)}
        store.run("r").load_into(me.rank + 1, into, group=dist.group.WORLD, strict=False)
        assert torch.equal(into["t5"], state["t5"])
        return int(state["step"])


# --- failures ----------------------------------------------------------------------------------
def _broken(step: object) -> None:
    msg = "the bar is broken"
    raise ValueError(msg)


_INTERRUPTED = threading.Event()


class OddError(StorageError):
    """An error of a backend that is not ckptstore's, with arguments of its own."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"odd {code}: {detail}")


class MuteError(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        """Fail."""
        raise RecursionError


def _odd(step: object) -> None:
    raise OddError(5, "\x1b" * 5000)


def _mute(step: object) -> None:
    raise MuteError


def _no_memory(*_: object) -> Any:  # noqa: ANN401 - as the real one
    raise MemoryError


def _interrupt(call: str, key: str) -> None:
    """Interrupt the main thread, and go on when it is: the load cannot end before that."""
    os.kill(os.getpid(), signal.SIGINT)
    assert _INTERRUPTED.wait(60)


def _interrupted(*_: object) -> None:
    _INTERRUPTED.set()
    raise KeyboardInterrupt


def _die(call: str, key: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _flipping(count: int) -> Callable[..., Any]:
    """Return an ``isend`` that changes a byte of the data that is sent as the `count`-th."""
    real, seen = dist.isend, [0]

    @functools.wraps(real)
    def isend(tensor: torch.Tensor, dst: int, group: Any, tag: int) -> Any:  # noqa: ANN401
        if tag == peers._DATA_TAG:
            seen[0] += 1
            if seen[0] == count:
                tensor = tensor.clone()
                tensor[tensor.numel() // 2] ^= 4
                _kept.append(tensor)
        return real(tensor, dst, group, tag)

    return isend


_kept: list[torch.Tensor] = []  # until it is sent


def _wrong(store: Store, case: str) -> dict[str, Any]:
    """Return arguments that only one rank gives."""
    if case == "selection":
        return {"include": ["t1"]}
    if case == "target":
        return {"into": {"t1": torch.zeros(3, 3)}, "include": ["t1"]}
    callbacks = {"callback": _broken, "odd": _odd, "mute": _mute}
    if case in callbacks:
        return {"progress": callbacks[case]}
    return {}


def fail(me: Rank, url: str, case: str, victim: int, at: int) -> tuple[str, str, bool]:
    """Load together while one rank fails; return the error, and whether a next load works."""
    faults = {
        "storage": Fault(calls=frozenset({"read_into"}), at=at, times=0),
        "ctrl-c": Fault(
            calls=frozenset({"read_into"}), at=at, when=When.CALLBACK, callback=_interrupt
        ),
        "killed": Fault(calls=frozenset({"read_into"}), at=at, when=When.CALLBACK, callback=_die),
        "log": Fault(calls=frozenset({"list"}), at=1, times=0),
    }
    is_victim = me.rank == victim
    store, _ = _metered(url, {}, *([faults[case]] if is_victim and case in faults else []))
    ref = "r@77" if case == "missing" else "r@1"
    words = _wrong(store, case) if is_victim else {}
    if is_victim and case == "ctrl-c":
        signal.signal(signal.SIGINT, _interrupted)
    plain = dist.isend
    if case == "flipped" and is_victim:
        dist.isend = _flipping(at)
    said = ("", "")
    plan = _SharedPieces._blocks
    if case == "plan" and is_victim:
        setattr(_SharedPieces, "_blocks", _no_memory)  # noqa: B010 - of another type
    with store:
        try:
            if case == "dcp" and is_victim:
                reader = CkptStoreReader(store, ref, group=dist.group.WORLD)
                reader.read_metadata()
                reader.read_data(LoadPlan([]), DefaultLoadPlanner())
            store.load(ref, group=dist.group.WORLD, **words)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the test looks at it
            said = (type(error).__name__, "" if isinstance(error, MuteError) else str(error))
        dist.isend = plain
        _SharedPieces._blocks = plan  # type: ignore[method-assign]
    again = False
    if case not in {"killed", "damaged"}:
        with ckptstore.open(url, host_bytes=SMALL["host_bytes"]) as store:
            again = not list(differences(store.load("r@2", group=dist.group.WORLD), state_of(2)))
    if case == "killed":
        me.tell(said)
        signal.pause()
    return (*said, again)


def fail_in_turn(me: Rank, url: str, cases: list[tuple[str, int, int]]) -> list[Any]:
    """Fail in each way, one load after the other, in one group."""
    return [fail(me, url, *case) for case in cases]


# --- torch.distributed.checkpoint ---------------------------------------------------------------
def dcp_counting(me: Rank, url: str, ref: str, way: str) -> tuple[int, int, list[str]]:
    """Load by ``dcp.load``; return bytes read, bytes needed by this rank, and problems."""
    whole = state_of(1, scale=8)
    mesh = mesh_of(me.world, 1 if way != "hybrid" else 2)
    ways: dict[str, list[Any]] = {
        "replicas": [Replicate()],
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "hybrid": [Replicate(), Shard(0)],
    }
    placements = ways[way.partition(" ")[0]]
    uneven = {"host_bytes": (me.rank + 1) << 20} if way.endswith("uneven") else {}
    tensors = {n: t for n, t in whole.items() if isinstance(t, torch.Tensor) and n[0] == "t"}
    state: dict[str, Any] = {
        name: sharded(torch.zeros_like(t), mesh, placements) for name, t in tensors.items()
    }
    state["step"] = 0
    if way.endswith("meta"):
        state["t4"] = torch.zeros_like(whole["t4"], dtype=torch.float64)  # read through memory
    store, meter = _metered(url, uneven)
    with store:
        group = None if way.endswith("alone") else dist.group.WORLD
        dcp_load(state, storage_reader=CkptStoreReader(store, ref, group=group))
    wanted = {n: whole[n] for n in state}
    if way.endswith("meta"):
        wanted["t4"] = whole["t4"].double()
    problems = list(differences(state, wanted))
    needed = sum(
        math.prod((t.to_local() if isinstance(t, DTensor) else t).shape) * t.element_size()
        for name, t in state.items()
        if isinstance(t, torch.Tensor) and name != "tied"
    )
    return bytes_read(meter), needed, problems


def dcp_saved(me: Rank, url: str) -> None:
    """Save rows of each tensor by all ranks."""
    with ckptstore.open(url) as store:
        mesh = mesh_of(me.world, 1)
        state: dict[str, Any] = {
            n: sharded(t, mesh, [Shard(0)]) if n[0] == "t" else t
            for n, t in state_of(1, scale=8).items()
        }
        dcp_save(state, storage_writer=CkptStoreWriter(store.run("d"), step=1))


def dcp_fail(me: Rank, url: str, victim: int) -> tuple[str, str]:
    """Load by ``dcp.load`` while the storage of one rank fails; return the error."""
    fault = Fault(calls=frozenset({"read_into"}), at=2, times=0)
    store, _ = _metered(url, {}, *([fault] if me.rank == victim else []))
    state: dict[str, Any] = {n: torch.zeros_like(t) for n, t in state_of(1).items() if n != "step"}
    with store:
        try:
            reader = CkptStoreReader(store, "r@1", group=dist.group.WORLD)
            dcp_load(state, storage_reader=reader)
        except CheckpointException as error:
            return type(error).__name__, str(error)
    return "", ""
