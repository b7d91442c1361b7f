"""Archiving and thawing: exactly the packs that are meant, and no record is ever cold."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coldbackend import ColdBackend, Shelf

import ckptstore
from ckptstore import errors
from ckptstore.backends.base import PutIfAbsent
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options, SystemEnvironment
from ckptstore.format.keys import pack_key
from ckptstore.repo import Finding, create_on, open_on
from ckptstore.store import Store


class Clock(SystemEnvironment):
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.ahead_s = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + int(self.ahead_s * 1000)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.ahead_s += seconds


def _known(_backend: object, _environment: object) -> Finding:
    return Finding(put_if_absent=PutIfAbsent.ATOMIC, report={})


@pytest.fixture
def shelf() -> Shelf:
    """Return what the storage knows of objects beside their bytes."""
    return Shelf()


@pytest.fixture
def clock() -> Clock:
    """Return a clock that only sleeping moves."""
    return Clock()


@pytest.fixture
def store(shelf: Shelf, clock: Clock) -> Iterator[Store]:
    """Return a store on storage with classes."""
    backend = ColdBackend(MemoryBackend(f"cold-{uuid.uuid4().hex}"), shelf)
    repo = create_on(backend, environment=clock, options=Options(codec="raw"), prober=_known)
    with Store(repo) as opened:
        yield opened


def _state(seed: int, shared: torch.Tensor | None = None) -> dict[str, object]:
    torch.manual_seed(seed)
    model = {"w": torch.randn(50_000)}
    if shared is not None:
        model["shared"] = shared
    return {"model": model, "optimizer": {"m": torch.randn(50_000)}}


def _packs(store: Store, ref: str) -> set[str]:
    pieces = store.repo.manifests.load(store.resolve(ref)).pieces
    return {pack_key(pieces.packs[int(place)]) for place in set(pieces.pack.tolist())}


def _three(store: Store) -> None:
    """Save three versions; the last two share a tensor with each other."""
    run = store.run("gpt", metrics={"loss": "min"})
    shared = torch.randn(60_000)
    run.save(_state(1), step=1, metrics={"loss": 3.0})
    run.save(_state(2, shared), step=2, metrics={"loss": 2.0})
    run.save(_state(3, shared), step=3, metrics={"loss": 1.0})


def test_only_what_nobody_else_needs_gets_cold(store: Store, shelf: Shelf) -> None:
    """A pack that another version needs stays, and the report says for whose sake."""
    _three(store)
    report = store.archive(["gpt@1", "gpt@2"], storage_class="GLACIER")
    assert report.ok
    hot = _packs(store, "gpt@3")
    mine = _packs(store, "gpt@1") | _packs(store, "gpt@2")
    assert {key for key, _ in shelf.moved} == mine - hot
    assert report.moved.count == len(mine - hot)
    assert {pack_key(one.pack) for one in report.left} == mine & hot
    assert {one.versions for one in report.left} == {(store.resolve("gpt@3").id,)}
    assert torch.equal(store.load("gpt@3")["model"]["w"], _state(3)["model"]["w"])  # type: ignore[index]
    with pytest.raises(errors.ColdObjectError):
        store.load("gpt@1")


def test_nothing_but_packs_moves(store: Store, shelf: Shelf) -> None:
    """Opening, listing and checking records read nothing that may be cold."""
    _three(store)
    store.archive(["gpt@1", "gpt@2", "gpt@3"], storage_class="DEEP_ARCHIVE")
    assert all(key.startswith("packs/") for key, _ in shelf.moved)
    opened = open_on(store.repo.backend, environment=store.repo.environment)
    assert [version.step for version in opened.refresh().versions()] == [1, 2, 3]
    assert store.verify(level="records").ok


def test_a_dry_run_moves_nothing(store: Store, shelf: Shelf) -> None:
    """It says what the real one does."""
    _three(store)
    planned = store.archive(["gpt@1"], storage_class="GLACIER", dry_run=True)
    assert not shelf.moved
    done = store.archive(["gpt@1"], storage_class="GLACIER")
    assert (planned.moved, planned.left) == (done.moved, done.left)
    assert planned.moved.size_bytes > 400_000


def test_a_repetition_finds_nothing_to_do(store: Store, shelf: Shelf) -> None:
    """What is in the class already is not sent again."""
    _three(store)
    first = store.archive(["gpt@1"], storage_class="GLACIER")
    moved = list(shelf.moved)
    again = store.archive(["gpt@1"], storage_class="GLACIER")
    assert shelf.moved == moved
    assert (again.moved.count, again.there) == (0, first.moved)


def test_what_appears_meanwhile_is_not_made_cold(
    store: Store, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork between two batches keeps the packs that it needs; one in a batch is told."""
    monkeypatch.setattr("ckptstore.limits.ARCHIVE_BATCH_PACKS", 1)
    store.run("a").save({"model": {"w": torch.randn(90_000)}}, step=1)
    store.run("b").save({"model": {"w": torch.randn(90_000)}}, step=1)
    store.run("a").save({"model": {"w": torch.randn(90)}}, step=2)
    store.run("b").save({"model": {"w": torch.randn(90)}}, step=2)
    forked: list[str] = []

    def fork(key: str) -> None:
        if not forked:
            forked.append(key)
            for run in "ab":
                store.fork(f"{run}@1", f"{run}-fork")

    shelf.before_move = fork
    report = store.archive(["a@1", "b@1"], storage_class="GLACIER")
    assert [key for key, _ in shelf.moved] == forked
    (told,) = report.cooled
    (cold,) = (run for run in "ab" if _packs(store, f"{run}@1") == set(forked))
    assert told == store.resolve(f"{cold}-fork").id
    assert len(report.left) == 1


def test_warnings_say_what_costs_more_than_it_seems(store: Store) -> None:
    """The least days of the class, packs below the least that is charged, and heads."""
    _three(store)
    first = store.archive(["gpt@1"], storage_class="STANDARD_IA")
    assert any("30 days" in text for text in first.warnings)
    second = store.archive(["gpt@1"], storage_class="GLACIER")
    assert any("90 days" in text for text in second.warnings)
    run = store.run("small")
    run.save({"model": {"w": torch.randn(100)}}, step=1)
    small = store.archive(["small@1"], storage_class="GLACIER", dry_run=True)
    assert any("smaller than" in text for text in small.warnings)
    assert any("the head" in text or "head is" in text for text in small.warnings)


def test_what_is_selected_leaves_heads_and_rules(store: Store, clock: Clock) -> None:
    """Without refs neither the head, nor what a rule keeps, nor what is young gets cold."""
    _three(store)
    clock.ahead_s = 3600.0
    ids = {version.step: version.id for version in store.versions()}
    everything = store.archive(storage_class="GLACIER", dry_run=True)
    assert set(everything.versions) == {ids[1], ids[2]}
    ruled = store.archive(storage_class="GLACIER", keep_hot="best 2 loss", dry_run=True)
    assert set(ruled.versions) == {ids[1]}
    young = store.archive(storage_class="GLACIER", min_age_s=7200.0, dry_run=True)
    assert young.versions == ()
    with pytest.raises(errors.InvalidInputError):
        store.archive(["gpt@1"], storage_class="GLACIER", keep_hot="last 1")


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """A class that is none, storage without classes, a store that was opened read-only."""
    _three(store)
    with pytest.raises(errors.InvalidInputError):
        store.archive(["gpt@1"], storage_class="glacier; rm")
    plain = create_on(MemoryBackend(f"plain-{uuid.uuid4().hex}"), prober=_known)
    with Store(plain) as other:
        other.run("a").save({"w": torch.ones(3)}, step=1)
        with pytest.raises(errors.InvalidInputError, match="no storage classes"):
            other.archive(["a"], storage_class="GLACIER")
        report = other.thaw("a")
        assert report.ready
        assert report.packs.count == 1
    reading = open_on(store.repo.backend, options=Options(read_only=True), prober=_known)
    with pytest.raises(errors.ReadOnlyError):
        Store(reading).archive(["gpt@1"], storage_class="GLACIER")


def test_thaw_asks_for_all_that_a_load_needs(store: Store, shelf: Shelf, clock: Clock) -> None:
    """Then the version loads; nothing is asked for twice, and waiting takes no request."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    shelf.after = 4
    first = store.thaw("gpt@1")
    assert not first.ready
    assert set(shelf.asked) == _packs(store, "gpt@1")
    assert first.requested.count == first.restoring.count == len(shelf.asked)
    assert first.expected_s == (3 * 3600.0, 5 * 3600.0)
    with pytest.raises(errors.ColdObjectError):
        store.load("gpt@1")
    again = store.thaw("gpt@1", wait=True)
    assert again.ready
    assert again.requested.count == 0
    assert len(shelf.asked) == len(set(shelf.asked))
    assert clock.slept
    assert torch.equal(store.load("gpt@1")["model"]["w"], _state(1)["model"]["w"])  # type: ignore[index]


def test_thaw_of_weights_asks_only_for_packs_that_hold_them(store: Store, shelf: Shelf) -> None:
    """Of packs that hold nothing but the optimizer none is looked at."""
    run = store.run("gpt")
    run.save({"model": {"w": torch.randn(50_000)}}, step=1)
    weights = _packs(store, "gpt@1")
    state = store.load("gpt@1")
    for step in range(2, 6):  # more packs, of the optimizer alone
        state["optimizer"] = {**state.get("optimizer", {}), f"m{step}": torch.randn(50_000)}
        run.save(state, step=step)
    assert len(_packs(store, "gpt@5")) == 5
    run.save({"model": {"w": torch.randn(10)}}, step=6)
    store.archive(["gpt@1", "gpt@2", "gpt@3", "gpt@4", "gpt@5"], storage_class="GLACIER")
    assert len(shelf.moved) == 5
    shelf.looked.clear()
    shelf.after = 1
    report = store.thaw("gpt@5", roles=["weights"], wait=True)
    assert shelf.asked == [*weights]
    assert set(shelf.looked) == weights
    assert report.packs.count == 1
    loaded = store.load("gpt@5", include=["model"])
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    with pytest.raises(errors.ColdObjectError):
        store.load("gpt@5")


def test_thaw_brings_what_deltas_and_recipes_refer_to(shelf: Shelf, clock: Clock) -> None:
    """A delta needs its base, and a derived tensor what it follows from; so they are asked for."""
    backend = ColdBackend(MemoryBackend(f"cold-{uuid.uuid4().hex}"), shelf)
    options = Options(codec="delta")
    repo = create_on(backend, environment=clock, options=options, prober=_known)
    with Store(repo) as store:
        run = store.run("gpt")
        master = torch.randn(300_000)
        state = {"model": {"w": master.bfloat16()}, "optimizer": {"master": master}}
        run.save(state, step=1)
        near = master + 1e-6 * torch.randn(300_000)
        state = {"model": {"w": near.bfloat16()}, "optimizer": {"master": near}}
        run.save(state, step=2)
        run.save({"model": {"w": torch.zeros(4)}}, step=3)
        table = store.repo.manifests.load(store.resolve("gpt@2")).pieces
        assert table.base is not None
        store.archive(["gpt@1", "gpt@2"], storage_class="GLACIER")
        shelf.after = 1
        store.thaw("gpt@2", roles=["weights"], wait=True)
        loaded = store.load("gpt@2", include=["model"])
        assert torch.equal(loaded["model"]["w"], near.bfloat16())


def test_a_load_of_a_cold_version_names_the_command(store: Store) -> None:
    """With the version's id, the part that was asked for, and the store."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    found = store.resolve("gpt@1").id[:12]
    with pytest.raises(errors.ColdObjectError) as caught:
        store.load("gpt@1", include=["model.*"])
    command = f"ckptstore thaw {found} --include 'model.*' --store {store.url}"
    assert command in caught.value.hint
    for read in (
        lambda: store.load("gpt@1"),
        lambda: store.version("gpt@1").load(),
        lambda: store.version("gpt@1")["model.w"][:10],
        lambda: store.version("gpt@1")["model.w"].load(),
        lambda: store.load_into("gpt@1", {"model": {"w": torch.zeros(50_000)}}),
    ):
        with pytest.raises(errors.ColdObjectError, match="must be thawed first") as caught:
            read()
        assert f"ckptstore thaw {found} " in caught.value.hint
        assert store.url in caught.value.hint


def test_an_archived_version_can_come_back_for_good(store: Store, shelf: Shelf) -> None:
    """A restore is for some days; moved to the standard class, it stays."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    stuck = store.archive(["gpt@1"], storage_class="STANDARD")
    assert not stuck.ok
    assert "thaw" in stuck.skipped[0].why
    shelf.after = 1
    store.thaw("gpt@1", wait=True)
    assert store.archive(["gpt@1"], storage_class="STANDARD").ok
    shelf.restored.clear()
    assert torch.equal(store.load("gpt@1")["model"]["w"], _state(1)["model"]["w"])  # type: ignore[index]


def test_a_restore_that_ends_too_early_is_told(store: Store, shelf: Shelf, clock: Clock) -> None:
    """A restored pack gets more days; one that never comes is an error, not an endless wait."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    shelf.after = 1
    store.thaw("gpt@1", wait=True, days=2)
    asked = len(shelf.asked)
    shelf.until = clock.now_ms() / 1000 + 90_000.0
    store.thaw("gpt@1", days=2)
    assert len(shelf.asked) == asked
    store.thaw("gpt@1", days=5)
    assert len(shelf.asked) == 2 * asked
    assert set(shelf.days.values()) == {5}
    shelf.restored.clear()

    def lapse(_seconds: float) -> None:
        shelf.left.clear()
        shelf.restored.clear()

    shelf.after = 2
    clock.sleep = lapse  # type: ignore[method-assign,assignment]
    with pytest.raises(errors.StorageError, match="again and again"):
        store.thaw("gpt@1", wait=True)


def test_thaw_refuses_what_cannot_be(store: Store, shelf: Shelf) -> None:
    """Days, roles and tiers that are none; a tier that the class has not; a pack that is gone."""
    _three(store)
    store.archive(["gpt@1"], storage_class="DEEP_ARCHIVE")
    for wrong in ({"days": 0}, {"roles": ["nobody"]}, {"poll_s": 0.0}, {"tier": "Expedited"}):
        with pytest.raises(errors.InvalidInputError):
            store.thaw("gpt@1", **wrong)
    assert not shelf.asked
    dry = store.thaw("gpt@1", dry_run=True)
    assert not dry.ready
    assert dry.requested.count > 0
    assert not shelf.asked
    store.repo.backend.delete(next(iter(_packs(store, "gpt@1"))))
    with pytest.raises(errors.ObjectNotFoundError, match="gpt@1"):
        store.thaw("gpt@1")


def test_what_is_cold_is_not_called_damaged(store: Store, shelf: Shelf) -> None:
    """A check says what it did not read, and records nothing of it as sound."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    report = store.verify(record=True)
    assert report.ok
    assert report.cold_packs_count == len(_packs(store, "gpt@1"))
    assert report.cold_versions == (store.resolve("gpt@1").id,)
    assert store.resolve("gpt@1").id not in report.recorded
    assert len(report.recorded) == 2
    shelf.after = 1
    store.thaw("gpt@1", wait=True)
    thawed = store.verify(record=True)
    assert (thawed.cold_packs_count, len(thawed.recorded)) == (0, 1)


def test_what_is_cold_is_not_called_sound(store: Store) -> None:
    """Nothing is taken for the newest sound version of which nobody has read the bytes."""
    _three(store)
    store.archive(["gpt@3"], storage_class="GLACIER")
    with pytest.raises(errors.ColdObjectError, match="cannot be checked") as caught:
        store.run("gpt").latest_valid()
    assert "ckptstore thaw" in caught.value.hint
    store.thaw("gpt@3", wait=True)
    assert store.run("gpt").latest_valid().version.step == 3


def test_collections_leave_cold_packs_alone(store: Store, shelf: Shelf) -> None:
    """What is dead is deleted, cold or not; what is half dead and cold is not read."""
    run = store.run("gpt")
    run.save(_state(1), step=1)
    run.save(_state(2), step=2)
    store.fork("gpt@1", "part", include=["model"])
    store.archive(["gpt@1", "part"], storage_class="GLACIER")
    cold = _packs(store, "part")
    store.remove(["gpt@1"])
    report = store.gc(grace_s=0, repack_below=0.9)
    assert _packs(store, "part") == cold
    assert all("InvalidObjectState" in why for why in report.repacked.skipped)
    assert report.repacked.packs_count == 0
    shelf.after = 1
    store.thaw("part", wait=True)
    planned = store.gc(grace_s=0, repack_below=0.9, dry_run=True)
    assert planned.repacked.packs_count == 1
    report = store.gc(grace_s=0, repack_below=0.9)
    assert report.repacked.packs_count == 1
    assert store.verify().ok
    assert torch.equal(store.load("part")["model"]["w"], _state(1)["model"]["w"])  # type: ignore[index]


def test_replication_from_cold_versions_fails_for_each(store: Store, shelf: Shelf) -> None:
    """With the command that thaws it; the others are copied."""
    _three(store)
    store.archive(["gpt@1"], storage_class="GLACIER")
    target = create_on(MemoryBackend(f"to-{uuid.uuid4().hex}"), prober=_known)
    with Store(target) as other:
        report = store.replicate(other)
        assert len(report.copied) == 2
        (failure,) = report.failures
        with pytest.raises(errors.ColdObjectError, match="gpt@1 lies in an archive class"):
            store.fork("gpt@1", "there", store=other)
        assert (failure.kind, report.exit_code) == ("storage_cold", 8)
        found = store.resolve("gpt@1").id
        assert f"ckptstore thaw {found[:12]} --store {store.url}" in failure.message
        shelf.after = 1
        store.thaw("gpt@1", wait=True)
        assert store.replicate(other).copied == (found,)
        assert other.verify().ok


def test_a_replica_with_cold_packs_takes_more(shelf: Shelf, clock: Clock) -> None:
    """What refers to chunks that are cold there comes, and does not count as read back."""
    with (
        Store(create_on(MemoryBackend(f"a-{uuid.uuid4().hex}"), prober=_known)) as source,
        Store(
            create_on(
                ColdBackend(MemoryBackend(f"b-{uuid.uuid4().hex}"), shelf),
                environment=clock,
                prober=_known,
            )
        ) as target,
    ):
        run = source.run("gpt")
        weights = torch.randn(300_000)
        with_delta = Store(open_on(source.repo.backend, options=Options(codec="delta")))
        run.save({"w": weights}, step=1)
        source.replicate(target)
        target.archive(["gpt@1"], storage_class="GLACIER")
        with_delta.run("gpt").save({"w": weights + 1e-6 * torch.randn(300_000)}, step=2)
        table = source.repo.manifests.load(source.resolve("gpt@2")).pieces
        assert table.base is not None
        report = source.replicate(target)
        assert len(report.copied) == 1
        there = target.repo.manifests.load(target.resolve("gpt@2")).pieces
        assert not set(map(pack_key, there.packs)).isdisjoint(shelf.classes)
        assert not source.resolve("gpt@2").replicas
        shelf.restored.update(shelf.classes)
        assert torch.equal(target.load("gpt@2")["w"], source.load("gpt@2")["w"])


def test_a_cold_version_is_read_from_a_replica_that_is_not(
    store: Store, shelf: Shelf, tmp_path: Path
) -> None:
    """Without a restore; and where the replica is what is cold, its thaw command is named."""
    _three(store)
    store.replicate(tmp_path / "replica")
    store.add_replica("near", tmp_path / "replica")
    store.archive(["gpt@1"], storage_class="GLACIER")
    assert torch.equal(store.load("gpt@1")["model"]["w"], _state(1)["model"]["w"])  # type: ignore[index]
    assert not shelf.asked
    with ckptstore.open(tmp_path / "replica") as near:
        (pack,) = _packs(near, "gpt@1")
        near.repo.backend.delete(pack)
    with pytest.raises(errors.ColdObjectError) as caught:
        store.load("gpt@1")
    assert f"ckptstore thaw {store.resolve('gpt@1').id[:12]}" in caught.value.hint


def test_an_encrypted_store_gets_cold_and_comes_back(shelf: Shelf, clock: Clock) -> None:
    """What is encrypted tells its class as anything else; verification leaves it alone."""
    from ckptstore.backends.sealing import UserKey

    backend = ColdBackend(MemoryBackend(f"enc-{uuid.uuid4().hex}"), shelf)
    repo = create_on(backend, environment=clock, prober=_known, key=UserKey(bytes(range(32))))
    with Store(repo) as store:
        _three(store)
        assert store.archive(["gpt@1"], storage_class="GLACIER").moved.count == 1
        with pytest.raises(errors.ColdObjectError):
            store.load("gpt@1")
        report = store.verify()
        assert report.ok
        assert report.cold_packs_count == 1
        shelf.after = 2
        assert store.thaw("gpt@1", wait=True).ready
        assert torch.equal(store.load("gpt@1")["model"]["w"], _state(1)["model"]["w"])  # type: ignore[index]


def test_deltas_to_what_is_cold_are_not_read(shelf: Shelf, clock: Clock) -> None:
    """Nor called damaged, nor sound; with what is thawed everything is checked."""
    backend = ColdBackend(MemoryBackend(f"cold-{uuid.uuid4().hex}"), shelf)
    repo = create_on(backend, environment=clock, options=Options(codec="delta"), prober=_known)
    with Store(repo) as store:
        run = store.run("gpt")
        weights = torch.randn(300_000)
        run.save({"w": weights}, step=1)
        run.save({"w": weights + 1e-6 * torch.randn(300_000)}, step=2)
        base, delta = (store.repo.manifests.load(store.resolve(f"gpt@{n}")).pieces for n in (1, 2))
        assert delta.base is not None
        for pack in base.packs:
            shelf.classes[pack_key(pack)] = "GLACIER"
        report = store.verify(record=True)
        assert report.ok
        assert (report.cold_packs_count, len(report.cold_versions)) == (1, 2)
        assert not report.recorded
        shelf.restored.update(shelf.classes)
        assert len(store.verify(record=True).recorded) == 2


def test_what_is_collected_meanwhile_is_no_failure(store: Store, shelf: Shelf) -> None:
    """A version that is deleted and collected in the middle needs nothing to be moved."""
    _three(store)
    ours = _packs(store, "gpt@1")

    def collect(key: str) -> None:
        if key in ours and not store.versions()[0].deleted and len(store.versions()) == 3:
            store.remove(["gpt@1"])
            store.gc(grace_s=0)

    shelf.before_move = collect
    report = store.archive(["gpt@1"], storage_class="GLACIER")
    assert report.ok
    assert report.moved.count == 0
    assert not shelf.moved
