"""Three stores that train, thin out and collect by themselves, and are replicated to each other.

What it holds:

- no replication fails, whatever the others have done;
- repeated, it copies nothing, and a third time neither catalog changes;
- in the end every version that has content loads, bit by bit what was saved, in each store.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from shortening import examples
from simclients import trusting
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore import errors, limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.model import Version
from ckptstore.repo import create_on
from ckptstore.testing.faulty import Fault, FaultyBackend

STORES = st.integers(0, 2)
DRAW = st.integers(0, 99)
REFUSED = (errors.PolicyError, errors.VersionNotFoundError, errors.InvalidInputError)


def state_of(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of two tensors, one of which other states share."""
    return {
        "model": {"w": torch.full((10,), float(number))},
        "optimizer": {"m": torch.full((7,), float(number // 4))},
    }


class ReplicaMachine(RuleBasedStateMachine):
    """See the module."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        ReplicaMachine.count += 1
        self._least = limits.SNAPSHOT_COMMITS_MIN
        limits.SNAPSHOT_COMMITS_MIN = 4  # type: ignore[misc]  # restored at the end
        self._resumed = limits.RESUME_BYTES_MIN
        limits.RESUME_BYTES_MIN = 1  # type: ignore[misc]  # restored at the end
        self.backends = [MemoryBackend(f"replica-{ReplicaMachine.count}-{n}") for n in range(3)]
        self.environments = [SimulatedEnvironment(n + 1) for n in range(3)]
        self.stores = [self._open(place) for place in range(3)]
        self.saved: dict[str, int] = {}
        self.number = 0

    def _open(self, place: int, *faults: Fault) -> ckptstore.Store:
        repo = create_on(
            FaultyBackend(self.backends[place], *faults),
            environment=self.environments[place],
            prober=trusting,
            exist_ok=True,
        )
        return ckptstore.Store(repo)

    def _pick(self, place: int, draw: int) -> Version | None:
        versions = self.stores[place].versions()
        return versions[draw % len(versions)] if versions else None

    @rule(place=STORES, draw=DRAW)
    def save(self, place: int, draw: int) -> None:
        """Go on with a run that is there, or begin one that no other store has a name of."""
        self.number += 1
        store = self.stores[place]
        names = [info.name for info in store.runs() if info.head] or [f"run-{place}"]
        run = store.run(names[draw % len(names)], metrics={"loss": "min"})
        tags = ["t"] if draw % 3 == 0 else []
        version = run.save(
            state_of(self.number), step=self.number // 3, metrics={"loss": draw}, tags=tags
        )
        self.saved[version.id] = self.number

    @rule(place=STORES, draw=DRAW)
    def fork(self, place: int, draw: int) -> None:
        """Begin a run at a version."""
        found = self._pick(place, draw)
        if found is not None and found.level == "full":
            self.number += 1
            head = self.stores[place].fork(f"#{found.id}", f"fork-{self.number}").head
            assert head is not None
            self.saved[head.id] = self.saved[found.id]

    @rule(place=STORES, away=st.integers(1, 2), draw=DRAW, one=st.booleans(), check=st.booleans())
    def replicate(self, place: int, away: int, draw: int, one: bool, check: bool) -> None:
        """Replicate a version or all of them, three times."""
        source, target = self.stores[place], self.stores[(place + away) % 3]
        with_content = [v for v in source.versions() if v.level != "record"]
        refs = [f"#{with_content[draw % len(with_content)].id}"] if one and with_content else None
        source.replicate(target, refs, check=check)
        again = source.replicate(target, refs, check=check)
        assert not (again.copied)
        assert not (again.records_count)
        assert not (again.failures)
        numbers = [store.repo.refresh().number for store in (source, target)]
        source.replicate(target, refs, check=check)
        assert [store.repo.refresh().number for store in (source, target)] == numbers

    @rule(place=STORES, away=st.integers(1, 2))
    def interrupt(self, place: int, away: int) -> None:
        """Replicate, and die when a manifest is to be written: packs that nobody names are left."""
        target = (place + away) % 3
        fault = Fault(calls=frozenset({"put"}), times=0)
        with self._open(target, fault) as dying, contextlib.suppress(errors.StorageError):
            self.stores[place].replicate(dying)

    @rule(place=STORES, draw=DRAW, what=st.sampled_from(["rollback", "remove", "age", "name"]))
    def change(self, place: int, draw: int, what: str) -> None:
        """Do something to a version; what the rules forbid is not done."""
        found, store = self._pick(place, draw), self.stores[place]
        if found is None:
            return
        ref = f"#{found.id}"
        try:
            if what == "rollback" and found.level != "record":
                store.rollback(ref)
            elif what == "remove":
                store.remove([ref], force=draw % 2 == 0)
            elif what == "age":
                store.age([ref], "weights" if draw % 2 else "record")
            elif what == "name":
                store.tag(ref, f"t{draw % 2}")
                store.annotate(ref, {"loss": draw / 2})
        except REFUSED:
            pass

    @rule(place=STORES, draw=DRAW)
    def undelete(self, place: int, draw: int) -> None:
        """Bring a version back, if it is not too late."""
        deleted = list(self.stores[place].repo.catalog.versions(deleted=True))
        if deleted:
            try:
                self.stores[place].undelete([f"#{deleted[draw % len(deleted)].id}"])
            except (*REFUSED, errors.ConflictError):
                pass

    @rule(place=STORES, retain=st.booleans())
    def collect(self, place: int, retain: bool) -> None:
        """Collect without patience, after retention or without."""
        store = self.stores[place]
        if retain and store.versions():
            with contextlib.suppress(*REFUSED):
                store.retain({"full": "last 3, tagged"})
        store.gc(grace_s=0.0, orphan_age_s=0.0)

    @precondition(lambda self: self.number)
    @rule(place=STORES)
    def reopen(self, place: int) -> None:
        """Open a store anew: it knows what snapshot and log say."""
        before = self.stores[place].repo.refresh()
        self.stores[place] = self._open(place)
        after = self.stores[place].repo.refresh()
        assert list(after.versions()) == list(before.versions())
        assert after.runs() == before.runs()

    def teardown(self) -> None:
        """Load everything."""
        try:
            for store in self.stores:
                assert store.verify().ok
                for version in store.versions():
                    if version.level != "record":
                        self._check(store.load(f"#{version.id}"), version)
        finally:
            limits.SNAPSHOT_COMMITS_MIN = self._least  # type: ignore[misc]
            limits.RESUME_BYTES_MIN = self._resumed  # type: ignore[misc]

    def _check(self, found: Any, version: Version) -> None:  # noqa: ANN401
        meant = state_of(self.saved[version.id])
        assert torch.equal(found["model"]["w"], meant["model"]["w"])
        if version.level == "full":
            assert torch.equal(found["optimizer"]["m"], meant["optimizer"]["m"])


ReplicaMachine.TestCase.settings = settings(
    max_examples=examples(12), stateful_step_count=30, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestReplicas = ReplicaMachine.TestCase
