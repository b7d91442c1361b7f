"""Several clients of one store, interleaved call by call, that use every operation.

Saves, forks, rollbacks, tags, metrics, pins, removals, undeletes, ageing, retention, repacks and
collections, most without any grace or patience; messages are lost, late or doubled, and clients
die. The oracle reads the stored commits itself, and checks:

- every acknowledged save is in the log once, and no refused one is; readers see the same;
- no live version ever names a condemned object, and all objects that it names are stored;
- every live version loads, equal to the saved state bit by bit;
- no pinned version is ever deleted or aged; retention deletes no head, no tagged version, and none
  that the storage has had for less than an hour, whatever the clocks of the clients say;
- retention does what its dry run said, if nobody else committed in between;
- no collection is ever stopped by its findings;
- when all is quiet, two collections leave exactly the objects that live versions need.

All tensors are small: a state has three tensors of four numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from catalogmodel import CatalogModel, Row
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simclients import Fate, Late, SimClient, trusting
from simulated_environment import SimulatedEnvironment, Skewed

from ckptstore import limits
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog.catalog import Catalog
from ckptstore.errors import AmbiguousWriteError, CkptStoreError, IntegrityError, ObjectExistsError
from ckptstore.format.keys import (
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    REFERENCES_PREFIX,
    pack_id,
    references_key,
)
from ckptstore.format.references import References, encode_references
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

CLIENTS = 4
AHEAD_S = (0.0, -5 * 365 * 86_400.0, 2 * 365 * 86_400.0, 1800.0)
"""Of the clocks of their machines; the storage has its own."""
YOUNG_S = 3600.0
"""Every policy keeps versions within that time."""
FATES: list[Fate] = ["lose request", "lose answer", "late", "twice", "crash", "crash after"]
DRAW = st.integers(0, 999)
VALUES = st.tuples(*[st.integers(0, 2)] * 3)
Work = Callable[[Store], object]
_LIMITS = {"SNAPSHOT_COMMITS_MIN": 3, "ENCODED_ELEMENTS_MIN": 4, "DERIVED_BYTES_MIN": 1}
"""So that small logs have snapshots, and small tensors are rounded and derived."""
LONG = 100_000
"""Steps of the long form, at least."""


class Foretold(NamedTuple):
    """Result of a dry run of retention, its commit, and the commits that carried it out."""

    number: int
    fates: dict[str, str]
    commits: tuple[int, ...]


def state_of(values: tuple[int, int, int]) -> dict[str, Any]:
    """Return a state of three chunks; equal values are shared, or one is derived from the other."""
    weight, half, moment = values
    return {
        "model": {
            "w": torch.full((4,), weight + 0.3),
            "h": torch.full((4,), half + 0.3, dtype=torch.bfloat16),
        },
        "optimizer": {"m": torch.full((4,), moment + 0.3, dtype=torch.float64)},
    }


def check_state(
    found: Any,  # noqa: ANN401
    values: tuple[int, int, int],
    *,
    may_lack: bool,
    may_round: bool,
) -> None:
    """Assert that a state equals `values` bit by bit, or as allowed: weights alone, or rounded."""
    meant = state_of(values)
    for part in ("model",) if may_lack and "optimizer" not in found else meant:
        assert found[part].keys() == meant[part].keys()
        for name, tensor in meant[part].items():
            assert found[part][name].dtype == tensor.dtype
            near = part == "model" and may_round
            given = found[part][name]
            assert torch.allclose(given, tensor, rtol=0.02) if near else torch.equal(given, tensor)


class StoreMachine(RuleBasedStateMachine):
    """The state machine; the module describes its checks."""

    count = 0
    figures: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        StoreMachine.count += 1
        self.environment = SimulatedEnvironment()
        self.backend = MemoryBackend(
            f"{__name__}-{StoreMachine.count}", environment=self.environment
        )
        create_on(self.backend, environment=self.environment, prober=trusting).close()
        self.late: list[Late] = []
        self.clients = [self._client(index) for index in range(CLIENTS)]
        self.model = CatalogModel(self.backend, young_s=YOUNG_S)
        self.saved: dict[int, tuple[int, int, int]] = {}
        self.weights_only: set[str] = set()
        """Runs that were forked without the optimizer."""
        self.acked: set[int] = set()
        self.refused: set[int] = set()
        """Steps of saves that returned, and of those that raised a clear error."""
        self.number = 0
        self.broken: CkptStoreError | None = None
        self.changed: list[Row] = []
        """Versions that came or changed since they were last loaded."""
        self.checked = 0
        self.foretold: list[Foretold] = []
        self._limits = {name: getattr(limits, name) for name in _LIMITS}
        for name, value in _LIMITS.items():
            setattr(limits, name, value)  # restored at the end

    def _client(self, index: int) -> SimClient:
        """Return a client on a machine of its own, whose clock is wrong but for one."""
        return SimClient(self.backend, Skewed(self.environment, AHEAD_S[index]), self.late)

    # --- operations of clients ----------------------------------------------------------------

    def _idle(self) -> list[int]:
        return [index for index, client in enumerate(self.clients) if not client.running]

    def _busy(self) -> list[int]:
        return [index for index, client in enumerate(self.clients) if client.running]

    def _begin(self, draw: int, name: str, work: Work, step: int = -1) -> None:
        """Let an idle client begin an operation."""
        idle = self._idle()

        def done(error: CkptStoreError | None) -> None:
            kind = error.kind if error else "done"
            StoreMachine.figures[f"{name}: {kind}"] += 1
            # Nothing stops a collection: neither other clients nor the objects that it reads.
            if name.startswith("gc") and isinstance(error, IntegrityError):
                self.broken = error
            if name == "save" and not isinstance(error, AmbiguousWriteError):
                (self.refused if error else self.acked).add(step)

        self.number += 1
        self.clients[idle[draw % len(idle)]].start(work, done)

    def _versions(self, *, deleted: bool = False) -> list[str]:
        return [row.id for row in self.model.rows.values() if row.deleted == deleted]

    def _pick(self, draw: int, *, deleted: bool = False) -> str:
        ids = self._versions(deleted=deleted)
        return ids[draw % len(ids)]

    def _saves(self, draw: int, run: str, values: tuple[int, int, int]) -> None:
        step = self.number
        self.saved[step] = values

        def work(store: Store) -> None:
            store.run(run, metrics={"loss": "min"}).save(state_of(values), step=step)

        self._begin(draw, "save", work, step)

    @precondition(lambda self: self._idle())
    @rule(draw=DRAW, run=st.sampled_from("ab"), values=VALUES)
    def save(self, draw: int, run: str, values: tuple[int, int, int]) -> None:
        """Save; values equal to the head's are shared."""
        self._saves(draw, run, values)

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW, values=VALUES)
    def go_on(self, draw: int, values: tuple[int, int, int]) -> None:
        """Save to the run of some version, which may be a fork."""
        self._saves(draw // CLIENTS, self.model.rows[self._pick(draw)].run, values)

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW, part=st.booleans())
    def fork(self, draw: int, part: bool) -> None:
        """Fork, or fork the weights alone."""
        version, run = self._pick(draw), f"f{self.number}"
        include = ["model.*"] if part else None
        if part:
            self.weights_only.add(run)
        self._begin(draw, "fork", lambda store: store.fork(f"#{version}", run, include=include))

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW)
    def rollback(self, draw: int) -> None:
        """Roll the run of some version back to it."""
        version = self._pick(draw)
        self._begin(draw, "rollback", lambda store: store.rollback(f"#{version}"))

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW, tag=st.booleans())
    def name(self, draw: int, tag: bool) -> None:
        """Tag a version, or give it a metric."""
        version = self._pick(draw)

        def work(store: Store) -> None:
            if tag:
                store.tag(f"#{version}", f"t{draw}")
            else:
                store.annotate(f"#{version}", {"loss": draw})

        self._begin(draw, "name", work)

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW)
    def pin(self, draw: int) -> None:
        """Pin a version, or unpin one: there are never more than a few pins."""
        pinned = [row.id for row in self.model.rows.values() if row.pinned]
        if len(pinned) > draw % 4:
            version = pinned[draw % len(pinned)]
            self._begin(draw, "unpin", lambda store: store.unpin(f"#{version}"))
        else:
            version = self._pick(draw)
            self._begin(draw, "pin", lambda store: store.pin(f"#{version}"))

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW)
    def remove(self, draw: int) -> None:
        """Remove a version; sometimes after a rollback to it, which leaves what came later."""
        version = self._pick(draw)

        def work(store: Store) -> None:
            if draw % 4 == 1:
                store.rollback(f"#{version}")
            store.remove([f"#{version}"], force=True)

        self._begin(draw, "remove", work)

    @precondition(lambda self: self._idle() and self._versions(deleted=True))
    @rule(draw=DRAW)
    def undelete(self, draw: int) -> None:
        """Undelete a version, if it is not too late; the latest that were removed come first."""
        version = self._pick(-1 - draw % 3, deleted=True)
        self._begin(draw, "undelete", lambda store: store.undelete([f"#{version}"]))

    @precondition(lambda self: self._idle() and self._versions())
    @rule(
        draw=DRAW,
        level=st.sampled_from(["weights-bf16", "weights", "weights-int8", "weights", "record"]),
    )
    def age(self, draw: int, level: Any) -> None:  # noqa: ANN401
        """Reduce a version to a lower level."""
        version = self._pick(draw)
        self._begin(draw, "age", lambda store: store.age([f"#{version}"], level, force=True))

    @precondition(lambda self: self._idle() and self._versions())
    @rule(draw=DRAW, last=st.integers(1, 3), stored=st.booleans())
    def retain(self, draw: int, last: int, stored: bool) -> None:
        """Keep a few versions, and the weights of a few more; by a policy that may be stored."""
        policy = {
            "full": [f"last {last}", "tagged", "within 1h", "abandoned 1h"],
            "weights": [f"last {last + 1}", "best 1 loss"],
            **({"weights-bf16": f"last {last + 2}"} if draw % 2 == 0 else {}),
            **({"weights-int8": f"last {last + 3}"} if draw % 5 < 3 else {}),
            **({"record": "all"} if draw % 3 == 0 else {}),
        }

        def work(store: Store) -> None:
            if stored:
                store.set_policy(policy)
            meant = store.retain(None if stored else policy, dry_run=True)
            number = store.repo.catalog.number
            fates = {decision.version.id: decision.fate for decision in meant.changes}
            done = store.retain(None if stored else policy)
            self.foretold.append(Foretold(number, dict(fates), done.commits))

        self._begin(draw, "retain", work)

    @precondition(lambda self: self._idle() and self._versions())
    @rule(
        draw=DRAW,
        grace_s=st.sampled_from([0.0, 1e6, 0.0]),
        patience_s=st.sampled_from([0.0, 0.0, 0.01]),
        below=st.sampled_from([None, 0.5, 1.0]),
    )
    def gc(self, draw: int, grace_s: float, patience_s: float, below: float | None) -> None:
        """Collect; with a grace, condemned objects are left for others to sweep."""

        def work(store: Store) -> object:
            return store.gc(grace_s=grace_s, orphan_age_s=patience_s, repack_below=below)

        self._begin(draw, "gc" if grace_s == 0 else "gc with grace", work)

    @precondition(lambda self: self._versions())
    @rule(draw=st.integers(0, (1 << 16) - 1))
    def forge(self, draw: int) -> None:
        """Leave a sound reference record, of any of the live manifests and of any packs."""
        packs = sorted(filter(None, map(pack_id, self.backend.objects)))
        with self._reader() as store:
            live = [v.manifest_digest for v in store.versions() if v.level != "record"]
        manifests = live if draw % 4 else live[: draw % 7]
        record = References(
            manifests=frozenset(map(bytes.fromhex, manifests)),
            packs={pack: 1 << 30 for place, pack in enumerate(packs) if draw >> place % 16 & 1},
            deltas_settled=draw % 3 > 0,
        )
        key = references_key(self.model.number + draw % 3, f"{self.number:08x}")
        self.backend.delete(key)
        self.backend.put(key, encode_references(record))
        StoreMachine.figures["records forged"] += 1

    @precondition(lambda self: self._versions())
    @rule()
    def wait(self) -> None:
        """Let an hour pass."""
        self.environment.sleep(YOUNG_S)

    # --- fates of calls -----------------------------------------------------------------------

    def _step(self, draw: int, fate: Fate, calls: int) -> None:
        busy = self._busy()
        index = busy[draw % len(busy)]
        client = self.clients[index]
        for left in range(calls, 0, -1):
            if not client.running:
                break
            client.step("go" if left > 1 else fate)
            self._look()
        if client.dead:
            StoreMachine.figures["crashes"] += 1
            self._renew(index)

    @precondition(lambda self: self._busy())
    @rule(draw=DRAW, calls=st.integers(1, 12))
    def go(self, draw: int, calls: int) -> None:
        """Let a client make some calls."""
        self._step(draw, "go", calls)

    @precondition(lambda self: self._busy())
    @rule(draw=DRAW, calls=st.integers(1, 12))
    def go_further(self, draw: int, calls: int) -> None:
        """Let another do so: twice as often as anything else."""
        self._step(draw, "go", calls)

    @precondition(lambda self: self._busy())
    @rule(draw=DRAW, fate=st.sampled_from(FATES), calls=st.integers(1, 12))
    def suffer(self, draw: int, fate: Fate, calls: int) -> None:
        """Let a client make some calls; the fate of the last of them is drawn."""
        self._step(draw, fate, calls)

    @precondition(lambda self: self._busy())
    @rule(draw=DRAW)
    def finish(self, draw: int) -> None:
        """Let a client finish its operation."""
        self._step(draw, "go", 10_000)

    @precondition(lambda self: self._idle())
    @rule(draw=DRAW)
    def reopen(self, draw: int) -> None:
        """Close a store and open it again: its only history is a snapshot's."""
        idle = self._idle()
        self._renew(idle[draw % len(idle)])

    def _renew(self, index: int) -> None:
        StoreMachine.figures["calls"] += self.clients[index].calls
        self.clients[index] = self._client(index)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Deliver a request that its sender has given up long ago."""
        self._deliver(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    def _deliver(self, request: Late) -> None:
        if not request.absent:
            self.backend.put(request.key, request.data)
            return
        try:
            self.backend.put_if_absent(request.key, request.data)
        except ObjectExistsError:
            assert request.key in self.backend.objects

    # --- invariants ---------------------------------------------------------------------------

    @invariant()
    def live_versions_are_whole(self) -> None:
        """Assert that named objects are stored, and that new versions load, bit by bit."""
        StoreMachine.figures["steps"] += 1
        assert self.broken is None, self.broken
        self._look()
        if self.model.number > self.checked:
            self.checked = self.model.number
            changed, self.changed = self.changed, []
            with self._reader() as store:
                known = [client.known for client in self.clients if not client.running]
                for catalog in (store.repo.refresh(), *filter(None, known)):
                    if catalog.number == self.model.number:
                        self._same_catalog(catalog)
                assert store.repo.catalog.number == self.model.number
                for row in changed:
                    if row.live:
                        self._loads(store, row)

    def _look(self) -> None:
        """Check after each call of any client that the objects of live versions are stored."""
        self.changed += self.model.catch_up()
        saved = Counter(row.step for row in self.model.rows.values() if not row.origin)
        assert self.acked <= saved.keys()
        assert not self.refused & saved.keys()
        assert not saved or max(saved.values()) == 1
        missing = self.model.reach() - self.backend.objects.keys()
        assert not missing, missing
        while self.foretold:
            self._as_foretold(self.foretold.pop())

    def _as_foretold(self, said: Foretold) -> None:
        """Assert that retention did what its dry run said, if no one committed in between."""
        commits = range(said.number + 1, said.number + 1 + len(said.commits))
        if said.commits != tuple(commits) or any(number > self.model.number for number in commits):
            return
        done: dict[str, str] = {}
        for number in commits:
            done |= self.model.effects.get(number, {})
        # Without a commit, others may have done the same in between.
        if said.commits:
            assert done == said.fates
            StoreMachine.figures["retain: as foretold"] += 1

    def _reader(self) -> Store:
        return Store(open_on(self.backend, environment=self.environment, prober=trusting))

    def _same_catalog(self, catalog: Catalog) -> None:
        """Assert that a client, one that opens now or an earlier one, sees the model's versions."""
        rows = self.model.rows.values()
        assert [v.id for v in catalog.versions()] == [row.id for row in rows if not row.deleted]
        for version in catalog.versions():
            row = self.model.rows[version.id]
            assert version.level == row.level
            assert version.pinned == row.pinned
            assert version.metrics == row.metrics
            assert version.abandoned == row.abandoned
            assert version.manifest_key == row.manifest or row.level == "record"
        assert {run.name: run.head for run in catalog.runs()} == self.model.heads
        assert set(catalog.condemned) == self.model.pending
        tags = {(v.run, tag): v.id for v in catalog.versions() for tag in v.tags}
        there = {
            key: one for key, one in self.model.tags.items() if not self.model.rows[one].deleted
        }
        assert tags == there

    def _loads(self, store: Store, row: Row) -> None:
        may_lack = row.may_lack or row.level != "full"
        first = row
        while first.origin:
            may_lack = may_lack or first.run in self.weights_only
            first = self.model.rows[first.origin]
        check_state(store.load(f"#{row.id}"), self.saved[first.step], may_lack=may_lack,
                    may_round=row.may_round)  # fmt: skip

    def teardown(self) -> None:
        """Finish all operations, deliver late messages; two collections leave the live set."""
        try:
            while self._busy():
                self._step(0, "go", 10_000)
            for index in range(CLIENTS):
                self._renew(index)
            while self.late:
                self._deliver(self.late.pop())
            self.live_versions_are_whole()
            # A forged record can keep what nobody needs: that is all that it can do.
            for key in [key for key in self.backend.objects if key.startswith(REFERENCES_PREFIX)]:
                self.backend.delete(key)
            with self._reader() as store:
                store.gc(grace_s=0, orphan_age_s=0)
            self.live_versions_are_whole()
            with self._reader() as store:
                store.gc(grace_s=0, orphan_age_s=0)
                self.live_versions_are_whole()
                assert not self.model.pending
                assert self._objects() == self.model.reach()
                for fates in self.model.effects.values():
                    StoreMachine.figures.update(f"became {fate}" for fate in fates.values())
                for row in self.model.rows.values():
                    if row.live:
                        self._loads(store, row)
        finally:
            for name, value in self._limits.items():
                setattr(limits, name, value)

    def _objects(self) -> set[str]:
        kinds = (PACKS_PREFIX, MANIFESTS_PREFIX)
        return {key for key in self.backend.objects if key.startswith(kinds)}


def run(examples: int, steps: int, *, same: bool = False) -> Counter[str]:
    """Run the machine on `examples` histories of `steps` steps, new ones unless `same`."""
    from hypothesis.stateful import run_state_machine_as_test

    StoreMachine.figures.clear()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=same,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        ),
    )  # fmt: skip
    return StoreMachine.figures.copy()
