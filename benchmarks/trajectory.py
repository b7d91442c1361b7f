"""Sizes of the versions of one training, in ckptstore, in files of peers, and in backups.

All keepers get the same versions of a real training (:mod:`benchmarks.trajectories`), one version
after the other, each version by all keepers before the next, another keeper first each time. The
versions are then loaded again, from a warm page cache, in the same manner, and compared: bit for
bit, or with the error that a lossy encoding left. Backup programs get the versions of one interval
only: they take a second for each.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.disk import Workspace, warm
from benchmarks.host import header
from benchmarks.keepers import Keeper, Kept, Stored, absent, keepers
from benchmarks.measure import FAILURES, Measured, Result, say, settle
from benchmarks.peers import empty_like, touch
from benchmarks.states import State, flat_tensors, same, state_bytes
from benchmarks.trajectories import Plan, Trajectory, documentation, trajectories

__all__ = ["run"]


def run(
    space: Workspace, *, plan: Plan | None = None, loads: int = 4, only: Sequence[str] = ()
) -> Result:
    """Run everything; return two tables, ``save: NAME`` and ``load: NAME``, for each trajectory.

    Parameters
    ----------
    plan
        The plan of the training; the published one by default.
    loads
        Number of versions that are loaded again, from the first to the last.
    only
        Names of keepers; all that are installed by default.
    """
    peers.quiet()
    plan = plan or Plan()
    result = Result(
        benchmark="trajectory",
        header=header(space.root),
        parameters={
            **asdict(plan),
            "text_bytes": len(documentation()),
            "loads": loads,
            "torch_threads": torch.get_num_threads(),
        },
        facts={"absent": absent(), "kinds": {}, "stored after": {}},
    )
    for trajectory in trajectories(plan):
        say(f"trajectory: {trajectory.name}, {trajectory.logical_bytes / 1e6:.1f} MB")
        holders = [
            _Holder(keeper, space.fresh(), trajectory)
            for keeper in keepers(only)
            if (not keeper.backs_up or trajectory.interval == plan.lora_interval)
            and (keeper.lossless or "optimizer" in trajectory.versions[0])
        ]
        _save_all(trajectory, holders)
        _load_some(trajectory, holders, loads)
        result.facts["kinds"][trajectory.name] = {
            one.keeper.name: _shares(one.kept) for one in holders if isinstance(one.kept, Stored)
        }
        result.facts["stored after"][trajectory.name] = {
            one.keeper.name: one.stored_after for one in holders
        }
        if trajectory.adapter_bytes:
            result.facts["adapter_bytes"] = trajectory.adapter_bytes
            result.facts["generator_bytes"] = trajectory.generator_bytes
        for one in holders:
            one.end(space)
        result.tables[f"save: {trajectory.name}"] = [one.saves for one in holders]
        result.tables[f"load: {trajectory.name}"] = [one.loads for one in holders]
    return result


class _Holder:
    """A keeper with its versions and measurements; it is left out once it failed."""

    def __init__(self, keeper: Keeper, folder: Path, trajectory: Trajectory) -> None:
        self.keeper = keeper
        self.folder = folder
        self.kept: Kept | None = None
        note = keeper.note if keeper.lossless else f"lossy: {keeper.note}"
        each = state_bytes(trajectory.versions[0])
        self.saves = Measured(name=keeper.name, logical_bytes=each, note=note)
        self.loads = Measured(name=keeper.name, logical_bytes=each)
        self.stored_after: list[int] = []
        """Bytes that all versions took after each save."""
        with self._noted(self.saves):
            self.kept = keeper.start(folder)

    @property
    def works(self) -> bool:
        """True if nothing failed so far."""
        return not self.saves.error and not self.loads.error

    def save(self, state: State, number: int) -> None:
        """Save a version, timed."""
        assert self.kept is not None  # noqa: S101 - it works
        with self._noted(self.saves):
            settle()
            began = time.perf_counter()
            self.kept.save(state, number)
            self.saves.seconds.append(time.perf_counter() - began)
            self.stored_after.append(self.kept.stored_bytes())
            self.saves.numbers["stored_bytes"] = self.stored_after[-1]

    def load(self, number: int, state: State) -> None:
        """Load a version, timed, and compare it."""
        assert self.kept is not None  # noqa: S101 - it works
        with self._noted(self.loads):
            target = empty_like(state)
            warm(self.folder)
            settle()
            began = time.perf_counter()
            loaded = self.kept.load(number, target)
            touch(loaded)
            self.loads.seconds.append(time.perf_counter() - began)
            self._compare(state, loaded)

    def _compare(self, state: State, loaded: object) -> None:
        if self.keeper.lossless:
            if not same(state, loaded):
                msg = "what was loaded is not what was saved"
                raise AssertionError(msg)
            return
        for kind, error in _errors(state, loaded).items():
            before = self.loads.numbers.get(kind, 0.0)
            self.loads.numbers[kind] = max(before, error)

    def end(self, space: Workspace) -> None:
        """Close it, and remove its versions."""
        if self.kept is not None:
            self.kept.close()
        space.discard(self.folder)

    def _noted(self, measured: Measured) -> _Noted:
        return _Noted(measured)


@dataclass(frozen=True, slots=True)
class _Noted:
    """Records a failure instead of passing it on."""

    measured: Measured

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Record the error, if it is one that a keeper may raise."""
        if not isinstance(error, FAILURES):
            return False
        traceback.print_exception(error)
        said = str(error).splitlines()
        self.measured.error = f"{type(error).__name__}: {said[0] if said else ''}"
        return True


def _save_all(trajectory: Trajectory, holders: Sequence[_Holder]) -> None:
    for number, state in enumerate(trajectory.versions):
        for one in _turned(holders, number):
            if one.works:
                one.save(state, number)
    say(f"{trajectory.name}: saved")


def _load_some(trajectory: Trajectory, holders: Sequence[_Holder], loads: int) -> None:
    last = len(trajectory.versions) - 1
    numbers = sorted({round(place * last / max(1, loads - 1)) for place in range(loads)})
    for turn, number in enumerate(numbers):
        for one in _turned(holders, turn):
            if one.works:
                one.load(number, trajectory.versions[number])
    say(f"{trajectory.name}: loaded")


def _turned(holders: Sequence[_Holder], turn: int) -> Iterator[_Holder]:
    shift = turn % len(holders) if holders else 0
    yield from holders[shift:]
    yield from holders[:shift]


# --- contents of the store ----------------------------------------------------------------------


def _kind(path: str) -> str:
    """Return the kind of the tensor at a path of a state."""
    if path.endswith(".exp_avg"):
        return "first moments"
    if path.endswith(".exp_avg_sq"):
        return "second moments"
    if path.startswith("optimizer.master."):
        return "fp32 masters"
    if ".lora_" in path:
        return "adapters"
    return "weights" if path.startswith("model.") else "the rest"


def _shares(kept: Stored) -> dict[str, float]:
    """Return, by kind, the stored share of the bytes of the versions after the first."""
    raw: dict[str, int] = defaultdict(int)
    stored: dict[str, float] = defaultdict(float)
    seen: set[tuple[str, int, int]] = set()
    for place, version in enumerate(kept.ids):
        content = kept.store.version(f"#{version}")._content
        manifest, table = content.manifest, content.manifest.pieces
        for index, record in enumerate(manifest.tensors):
            kind = _kind(content.labels[index])
            if place and index not in content.hidden:
                raw[kind] += record.nbytes
            for row in range(manifest.first[index], manifest.first[index + 1]):
                where = (table.packs[table.pack[row]], int(table.offset[row]))
                piece = (*where, int(table.inner[row]))
                if place and piece not in seen:
                    stored[kind] += int(table.stored[row]) * int(table.raw[row]) / table.slab[row]
                seen.add(piece)
    return {kind: float(stored[kind]) / count for kind, count in raw.items() if count}


def _errors(state: State, loaded: object) -> Mapping[str, float]:
    """Return, by kind, the relative error of the loaded state, in the L2 norm."""
    found = dict(flat_tensors(loaded))
    norm: dict[str, float] = defaultdict(float)
    off: dict[str, float] = defaultdict(float)
    for path, tensor in flat_tensors(state):
        if not tensor.is_floating_point():
            continue
        exact, other = tensor.double(), found[path].double()
        norm[_kind(path)] += float((exact * exact).sum())
        off[_kind(path)] += float(((exact - other) ** 2).sum())
    return {kind: (off[kind] / norm[kind]) ** 0.5 for kind in norm if norm[kind]}
