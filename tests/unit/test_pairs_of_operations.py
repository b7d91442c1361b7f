"""Two operations at once: one has planned when another commits, for each pair of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
from gckit import Place, equal, new_place, parts_of
from shortening import sampled

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.catalog import content_ops
from ckptstore.errors import CkptStoreError
from ckptstore.maintenance.replicas.evict import evict
from ckptstore.model import Version
from ckptstore.store import Store
from ckptstore.testing.faulty import Fault, FaultyBackend, When

_numbers = count()
_ZERO: dict[str, Any] = {"grace_s": 0, "orphan_age_s": 0}
_STATES = {step: parts_of(0, step, step) | {"optimizer": parts_of(50 + step)} for step in range(6)}
"""Of each step: a part that all share, two of its own, and one that weights do not have."""


def _evict(store: Store, cold: Store, *, pin: bool = False) -> None:
    evict(store.repo, cold.repo, store.versions()[:2], pin=pin)


def _quarantine(store: Store, _cold: Store) -> None:
    two = store.resolve("r@2")
    store.repo.log.append(lambda now: content_ops.quarantine(now, {two.id: two.manifest_digest}))


OPERATIONS: dict[str, Callable[[Store, Store], object]] = {
    "sweep": lambda store, _: store.gc(**_ZERO, repack_below=None),
    "repack": lambda store, _: store.gc(**_ZERO, repack_below=1.0),
    "age": lambda store, _: store.age(["r@2"], "weights"),
    "round": lambda store, _: store.age(["r@2"], "weights-bf16"),
    "drop": lambda store, _: store.age(["r@2"], "record"),
    "evict": _evict,
    "evict and pin": partial(_evict, pin=True),
    "verify": lambda store, _: store.verify(record=True),
    "quarantine": _quarantine,
    "tag": lambda store, _: store.tag("r@2", "keep"),
    "pin": lambda store, _: store.pin("r@2"),
    "fork": lambda store, _: store.fork("r@2", "f"),
    "delete": lambda store, _: store.remove(["r@2"]),
    "undelete": lambda store, _: store.undelete(["r@0"]),
    "rollback": lambda store, _: store.rollback("r@2"),
    "save": lambda store, _: store.run("r").save(_STATES[5], step=5),
    "retain": lambda store, _: store.retain({"full": "last 1"}),
    "replicate": lambda store, cold: store.replicate(cold),
    "bring": lambda store, cold: cold.replicate(store, ["r@4"]),
    "drop there": lambda _, cold: cold.age(["r@2"], "record", force=True),
    "delete there": lambda _, cold: cold.remove(["r@2"], force=True),
}
"""All that change the log; of the versions 1 to 3, 0 that was deleted, and 4 in the replica."""


@pytest.fixture(scope="module")
def base() -> tuple[Place, Place]:
    """Return a store of four versions, one of them deleted, and a replica that has one more."""
    hot, cold = new_place(), new_place()
    with hot.open() as store, cold.open() as there:
        for step in range(4):
            store.run("r").save(_STATES[step], step=step)
            if step == 2:
                store.remove(["r@0"])
                store.replicate(there)
        there.run("r").save(_STATES[4], step=4)
    return hot, cold


def _copy(place: Place) -> Place:
    name, environment = f"pairs/{next(_numbers)}", place.backend._environment
    backend = MemoryBackend(name, environment=environment)
    for key, item in place.backend.objects.items():
        backend._space.store(key, item)
    return Place(backend, place.environment)


class _Pair:
    """Two stores, and what became of the two operations."""

    def __init__(self, base: tuple[Place, Place], first: str, second: str) -> None:
        self.hot, self.cold = map(_copy, base)
        self.second = second
        self.did: dict[str, str] = {}
        self.read: dict[str, str] = {}
        """Digests of the manifests that a verification reads."""
        fault = Fault(
            calls=frozenset({"put_if_absent"}), times=0, when=When.CALLBACK, callback=self._between
        )
        self._act(first, FaultyBackend(self.hot.backend, fault))

    def _act(self, name: str, backend: Backend | None = None) -> None:
        self.did[name] = ""
        with self.hot.open(backend) as store, self.cold.open() as there:
            if name == "verify":
                self.read = {version.id: version.manifest_digest for version in store.versions()}
            try:
                OPERATIONS[name](store, there)
            except CkptStoreError as error:
                self.did[name] = error.kind

    def _between(self, _call: str, key: str) -> None:
        if key.startswith("commits/") and self.second not in self.did:
            self._act(self.second)


@pytest.mark.parametrize("first", [name for name in OPERATIONS if "there" not in name])
def test_what_commits_after_another_is_right(base: tuple[Place, Place], first: str) -> None:
    """Whatever came between a plan and its commit, each version is whole, or as was asked for."""
    for second in OPERATIONS if first == "verify" else sampled(list(OPERATIONS), first):
        pair = _Pair(base, first, second)
        with pair.hot.open() as store, pair.cold.open() as there:
            told = f"{first}, {second} in between: {pair.did}"
            assert pair.did.keys() == {first, second}
            store.gc(**_ZERO)
            there.gc(**_ZERO)
            assert store.verify().ok, told
            here, away = _levels(store), _levels(there)
            for version in store.versions():
                if version.verified:
                    assert pair.read[version.id] == version.manifest_digest, told
                if version.level != "record":
                    _check(store, version, told)
            if second in ("tag", "pin") and not pair.did[second]:
                assert here[2] == "full", told
            asked = {"delete", "retain", "drop"} & pair.did.keys()
            for step in (1, 2, 3) if not asked else ():
                level = {"age": "weights", "round": "weights-bf16"}
                least = [level[name] for name in pair.did if name in level]
                assert {here.get(step), away.get(step)} & {"full", *least}, told
            head = store.resolve("r@latest")
            assert head.level != "record", told
            for name, ran in pair.did.items():
                if name in _EFFECTS and not ran and not asked:
                    assert _EFFECTS[name](store, there), (name, told)


def _levels(store: Store) -> dict[int, str]:
    return {version.step: version.level for version in store.run("r").versions()}


def _check(store: Store, version: Version, told: str) -> None:
    """Assert that a version loads: bit by bit, but for what was rounded."""
    state, meant = store.load(f"#{version.id}"), _STATES[version.step]
    if version.level == "full":
        assert equal(state, meant), told
    elif version.level == "weights":
        assert equal(state["model"], meant["model"]), told


_EFFECTS: dict[str, Callable[[Store, Store], bool]] = {
    "tag": lambda store, _: "keep" in store.resolve("r@2").tags,
    "pin": lambda store, _: store.resolve("r@2").pinned,
    "fork": lambda store, _: store.resolve("f").level == "full",
    "undelete": lambda store, _: _levels(store).get(0) == "full",
}
