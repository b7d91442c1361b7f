"""A hot store and its replica, as a state machine against a model of which version is where.

What it holds:

- every version that was saved loads bit by bit, from here or there, as long as one of the two has
  each of its pieces and the replica can be reached where it is needed;
- one that neither has, or that only a replica has that is down, fails with a typed error, and the
  message has the reason here;
- eviction and collection here never touch the replica; refilled versions load without it;
- what was evicted here outlives retention and removal there.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shortening import examples, is_short
from simclients import trusting
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.model import Version
from ckptstore.repo import create_on
from ckptstore.testing.faulty import CALLS, Fault, FaultyBackend

DRAW = st.integers(0, 99)
ZERO: dict[str, Any] = {"grace_s": 0.0, "orphan_age_s": 0.0}


def state_of(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of three tensors, two of which other states share."""
    return {
        "model": {"w": torch.full((20_000,), float(number)), "same": torch.arange(20_000.0)},
        "optimizer": {"m": torch.full((20_000,), float(number // 3))},
    }


class TiersMachine(RuleBasedStateMachine):
    """See the module."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        TiersMachine.count += 1
        self.opened = 1
        self._least = limits.SNAPSHOT_COMMITS_MIN
        limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # restored at the end
        self._resumed = limits.RESUME_BYTES_MIN
        limits.RESUME_BYTES_MIN = 1  # type: ignore[misc]  # restored at the end
        names = [f"tiers-{TiersMachine.count}-{place}" for place in ("hot", "cold")]
        self.hot_backend, self.cold_backend = map(MemoryBackend, names)
        self.down = Fault(
            calls=CALLS, at=0, times=0, error=lambda: errors.TransientStorageError("503")
        )
        self.cold = ckptstore.Store(
            create_on(
                FaultyBackend(self.cold_backend, self.down),
                environment=SimulatedEnvironment(1),
                prober=trusting,
                chunk_bytes=1 << 16,
            )
        )
        self.hot = self._open()
        store = self.cold.info.store_id
        self.hot.repo.log.append_any(
            lambda now: name_replica(now, name="cold", url="memory://cold", store=store)
        )
        self.saved: dict[str, int] = {}
        self.sure: set[str] = set()
        """Ids of versions that the replica has, whole."""
        self.lost = False
        """Whether objects here were deleted past the log."""
        self.number = 0

    def _open(self) -> ckptstore.Store:
        self.opened += 1  # ids are never used again
        repo = create_on(
            self.hot_backend, environment=SimulatedEnvironment(self.opened), prober=trusting,
            chunk_bytes=1 << 16, exist_ok=True,
        )  # fmt: skip
        return ckptstore.Store(repo, replicas={"cold": self.cold})

    def _pick(self, draw: int) -> Version | None:
        versions = self.hot.versions()
        return versions[draw % len(versions)] if versions else None

    @property
    def _is_down(self) -> bool:
        return self.down.at > 0

    @rule()
    def save(self) -> None:
        """Save here."""
        self.number += 1
        if self.lost:  # what a save shares with may be gone
            return
        version = self.hot.run("gpt").save(state_of(self.number), step=self.number)
        self.saved[version.id] = self.number

    @precondition(lambda self: not self._is_down and not self.lost)
    @rule()
    def replicate(self) -> None:
        """Bring everything to the replica."""
        report = self.hot.replicate("replica:cold")
        assert not report.failures
        self._look_there()

    def _look_there(self) -> None:
        """Learn what the replica holds, by its own catalog."""
        self.sure = {v.id for v in self.cold.versions() if v.level == "full"}

    @precondition(lambda self: not self._is_down and not self.lost and self.sure)
    @rule(keep=st.integers(1, 2), collect=st.booleans())
    def thin_out_there(self, keep: int, collect: bool) -> None:
        """Retention in the replica, by a rule of its own that knows nothing of what is here."""
        with contextlib.suppress(errors.PolicyError):
            self.cold.retain({"full": f"last {keep}"})
        if collect:
            self.cold.gc(**ZERO)
        self._look_there()

    @precondition(lambda self: not self._is_down and not self.lost and self.sure)
    @rule(draw=DRAW, part=st.booleans())
    def remove_there(self, draw: int, part: bool) -> None:
        """Somebody removes a version there, or reduces it, and means it."""
        versions = self.cold.versions()
        ref = f"#{versions[draw % len(versions)].id}"
        with contextlib.suppress(errors.PolicyError):
            if part:
                self.cold.age([ref], "record", force=True)
            else:
                self.cold.remove([ref], force=True)
        self._look_there()

    @precondition(lambda self: not self._is_down)
    @rule(keep=st.integers(1, 3))
    def evict(self, keep: int) -> None:
        """Evict what the rule does not keep; only what the replica has goes."""
        report = self.hot.evict(replica="cold", keep=f"last {keep}")
        assert {one.id for one in report.evicted} <= self.sure

    @rule()
    def collect(self) -> None:
        """Collect here without patience; the replica is as it was."""
        if self.lost:
            return
        before = sorted(info.key for info in self.cold_backend.list("packs/"))
        self.hot.gc(**ZERO)
        assert sorted(info.key for info in self.cold_backend.list("packs/")) == before

    @precondition(lambda self: not self._is_down)
    @rule()
    def collect_there(self) -> None:
        """Collect in the replica, by its own rules."""
        self.cold.gc(**ZERO)

    @precondition(lambda self: self.sure)
    @rule(draw=DRAW, manifests=st.booleans())
    def lose(self, draw: int, manifests: bool) -> None:
        """Delete an object here past the log, once all that is here is in the replica too."""
        here = {v.id for v in self.hot.versions() if v.level != "record"}
        if not here <= self.sure:
            return
        keys = [i.key for i in self.hot_backend.list("manifests/" if manifests else "packs/")]
        if keys:
            self.hot_backend.delete(keys[draw % len(keys)])
            self.lost = True
            self.hot = self._open()  # nothing is remembered

    @precondition(lambda self: self.lost and not self._is_down)
    @rule()
    def heal(self) -> None:
        """Mend from the replica."""
        assert self.hot.repair("replica:cold").ok
        self.lost = False

    @rule()
    def fail(self) -> None:
        """Take the replica down, or bring it back."""
        self.down.at = 0 if self._is_down else 1

    @rule(draw=DRAW, refill=st.booleans(), part=st.booleans())
    def load(self, draw: int, refill: bool, part: bool) -> None:
        """Load a version, whole or in part."""
        version = self._pick(draw)
        if version is None:
            return
        wanted = state_of(self.saved[version.id])
        include = ["model.w"] if part else None
        here = version.level != "record" and not self.lost
        failure = None
        try:
            found = self.hot.load(f"#{version.id}", include=include, refill=refill)
        except (errors.IntegrityError, errors.NotFoundError, errors.StorageError) as error:
            failure = error
        if failure is not None:
            assert not here, failure
            assert self._is_down or version.id not in self.sure, failure
            assert "replica 'cold'" in failure.message
            return
        assert torch.equal(found["model"]["w"], wanted["model"]["w"])
        if not part:
            assert torch.equal(found["model"]["same"], wanted["model"]["same"])
            assert torch.equal(found["optimizer"]["m"], wanted["optimizer"]["m"])
        if refill and not self.lost:
            assert self.hot.resolve(f"#{version.id}").level == "full"

    @rule()
    def reopen(self) -> None:
        """Open the hot store anew: names come from snapshot and log."""
        before = self.hot.replicas()
        self.hot = self._open()
        assert self.hot.replicas() == before

    @invariant()
    def records_are_in_the_replica(self) -> None:
        """Whatever was evicted is where it was seen."""
        for version in self.hot.repo.catalog.versions():
            assert version.level != "record" or version.id in self.sure

    def teardown(self) -> None:
        """Load everything."""
        try:
            self.down.at = 0
            for version in self.hot.versions():
                wanted = state_of(self.saved[version.id])
                found = self.hot.load(f"#{version.id}")
                assert torch.equal(found["model"]["w"], wanted["model"]["w"])
                assert torch.equal(found["optimizer"]["m"], wanted["optimizer"]["m"])
            assert self.cold.verify().ok
        finally:
            limits.SNAPSHOT_COMMITS_MIN = self._least  # type: ignore[misc]
            limits.RESUME_BYTES_MIN = self._resumed  # type: ignore[misc]


TiersMachine.TestCase.settings = settings(
    max_examples=examples(15), stateful_step_count=12 if is_short() else 30, deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestTiers = TiersMachine.TestCase
