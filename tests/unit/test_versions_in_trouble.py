"""Versions that are damaged, cold, deleted or left alone: operations on others go on, and tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gckit
import pytest
import torch
from coldbackend import ColdBackend, Shelf
from damaging import flip_pack

import ckptstore
from ckptstore import errors
from ckptstore.backends.base import Backend
from ckptstore.backends.wrapper import WrapperBackend
from ckptstore.catalog.replica_ops import name_replica
from ckptstore.integrations.safetensors_stream import export_safetensors


def _state(number: int) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(number)
    return {"model": {"w": torch.randn(20_000)}, "optimizer": {"m": torch.randn(20_000)}}


def _saved(folder: Path, count: int, **options: Any) -> ckptstore.Store:  # noqa: ANN401 - of open
    """Return a new store whose run ``r`` has the steps from 1 on."""
    store = ckptstore.open(folder, create=True, **options)
    run = store.run("r", metrics={"loss": "min"})
    for step in range(1, count + 1):
        run.save(_state(step), step=step, metrics={"loss": 1 / step})
    return store


def test_lost_parts_stay_known_when_a_version_would_age(tmp_path: Path) -> None:
    """It ages to its record alone: nothing may be shared with what is lost."""
    with _saved(tmp_path / "s", 1) as store:
        packs = list((tmp_path / "s/packs").glob("*/*.pack"))
        store.run("r").save(_state(2), step=2)
        for pack in packs:
            flip_pack(pack)
        store.repair()
        with pytest.raises(errors.PolicyError, match=r"parts of r@1 .* are lost"):
            store.age(["r@1"], "weights")
        assert store.resolve("r@1").damaged
        with pytest.raises(errors.CkptStoreError, match="parts of r@1"):
            store.fork("r@1", "f")
        assert store.age(["r@1"], "record")


@pytest.mark.parametrize("saves", [0, 3])
def test_a_log_that_was_cut_short_is_not_collected(tmp_path: Path, saves: int) -> None:
    """A sound snapshot tells of lost commits, also when others have taken their numbers."""
    store = _saved(tmp_path / "s", 6)
    store.repo.log._write_snapshot(store.repo.catalog)
    store.close()
    for lost in sorted((tmp_path / "s/commits").glob("*/*"))[-2:]:
        lost.unlink()
    for step in range(10, 10 + saves):
        with ckptstore.open(tmp_path / "s") as other:
            other.run("r").save(_state(step), step=step)
    with ckptstore.open(tmp_path / "s") as store:
        before = {one.step for one in store.versions()}
        with pytest.raises(errors.CorruptObjectError, match="commits seem to be lost"):
            store.gc(grace_s=0, orphan_age_s=0)
        assert {one.step for one in store.versions()} == before


def test_a_cold_version_does_not_keep_others() -> None:
    """Retention leaves it as it is, says so, and deletes and reduces the others."""
    place, shelf = gckit.new_place(), Shelf()
    store = place.open(ColdBackend(place.backend, shelf))
    run = store.run("r")
    for step in range(9):
        run.save(_state(step), step=step)
    store.archive(["r@0"], storage_class="GLACIER")
    rules = {"full": "last 2", "weights-int8": "every 4 steps"}
    (report, again) = (store.retain(rules), store.retain(rules))
    assert [(v.step, v.level) for v in run.versions()] == [
        (0, "full"), (4, "weights-int8"), (7, "full"), (8, "full"),
    ]  # fmt: skip
    cold = store.resolve("r@0").id
    assert [*report.skipped] == [*again.skipped] == [cold]
    assert "must be thawed first" in report.skipped[cold]


def test_a_damaged_version_does_not_keep_others(tmp_path: Path) -> None:
    """Retention carries everything else out, of all runs, and raises then."""
    with _saved(tmp_path / "s", 1) as store:
        (pack,) = (tmp_path / "s/packs").glob("*/*.pack")
        for step in (2, 3):
            store.run("r").save(_state(step), step=step)
            store.run("other").save(_state(10 + step), step=step)
        flip_pack(pack)
        with pytest.raises(errors.IntegrityError):
            store.retain({"full": "last 1", "weights-int8": "every 1 steps"})
        kept = {run: [v.level for v in store.run(run).versions()] for run in ("r", "other")}
        assert kept == {"r": ["full", "weights-int8", "full"], "other": ["weights-int8", "full"]}


def test_a_tag_does_not_move_to_what_was_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that has it keeps it."""
    with _saved(tmp_path / "s", 3) as store, ckptstore.open(tmp_path / "s") as other:
        store.tag("r@1", "release")
        append = store.repo.log.append

        def late(build: Any) -> Any:  # noqa: ANN401 - of the log
            monkeypatch.undo()
            other.remove(["r@2"])
            return append(build)

        monkeypatch.setattr(store.repo.log, "append", late)
        with pytest.raises(errors.VersionNotFoundError, match="was deleted"):
            store.tag("r@2", "release")
        assert store.resolve("r@release").step == 1


def test_a_head_that_was_abandoned_has_its_line_again(tmp_path: Path) -> None:
    """The head of a run is deleted after a rollback: what is left is no longer abandoned."""
    with _saved(tmp_path / "s", 3) as store:
        run = store.run("r")
        run.rollback(1)
        store.remove(["r@1"], force=True)
        assert run.resolve("latest").step == 3
        run.save(_state(4), step=4, metrics={"loss": 9})
        assert [one.abandoned for one in run.versions()] == [False, False, False]
        assert run.resolve("best:loss").step == 3
        assert not store.retain({"full": "last 3"}, dry_run=True).changes


def test_a_run_without_a_head(tmp_path: Path) -> None:
    """A replica has abandoned versions alone: refs that need a head say so, a rollback gives it."""
    with _saved(tmp_path / "s", 3) as store:
        store.rollback("r@1")
        store.replicate(to=tmp_path / "t", refs=["r@3"])
    with ckptstore.open(tmp_path / "t") as replica:
        with pytest.raises(errors.VersionNotFoundError, match="has no head here"):
            replica.load("r")
        assert not replica.rollback("r@3").abandoned
        assert replica.resolve("r").step == 3


def test_the_dry_run_of_a_removal_finds_what_stands_in_the_way(tmp_path: Path) -> None:
    """Of many versions of a run, each with its own reason."""
    with _saved(tmp_path / "s", 4) as store:
        store.pin("r@1")
        store.tag("r@2", "kept")
        found = store.remove([f"r@{step}" for step in range(1, 5)], dry_run=True)
        assert [one.obstacle.partition("is ")[2][:7] for one in found] == [
            "pinned", "tagged ", "", "",
        ]  # fmt: skip


def test_a_rollback_to_reduced_weights_keeps_what_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns; and retention spares the newest version that a training can go on from."""
    with _saved(tmp_path / "s", 4) as store:
        run = store.run("r")
        store.age(["r@2"], "weights")
        run.rollback(2)
        assert "r@2" in caplog.text
        assert "cannot go on from it" in caplog.text
        rules = {"full": "last 1", "record": "all"}
        (plan,) = store.retain(rules).plans
        assert [one.fate for one in plan.decisions] == ["record", "weights", "record", "full"]
        run.rollback(4)
        assert run.load().keys() == {"model", "optimizer"}


def test_a_prefix_that_no_exported_tensor_has_is_an_error(tmp_path: Path) -> None:
    """A misspelled one writes no file under names that nobody meant."""
    with _saved(tmp_path / "s", 1) as store:
        for prefix, told in (("mdl.", "no exported tensor begins"), ("model", "with the dot")):
            with pytest.raises(errors.InvalidInputError, match=told):
                export_safetensors(store, "r@1", tmp_path / "x.safetensors", strip_prefix=prefix)
        assert not (tmp_path / "x.safetensors").exists()


def test_a_dry_collection_needs_no_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by the newest object's time where no object can be made for its clock."""
    _saved(tmp_path / "s", 2).close()

    def refuses(key: str, _: object) -> None:
        raise errors.StoragePermissionError(f"put {key}")

    with ckptstore.open(tmp_path / "s") as store:
        monkeypatch.setattr(store.repo.backend, "put", refuses)
        assert store.gc(dry_run=True).dry_run


def test_a_misspelled_metric_of_a_policy_is_told(tmp_path: Path) -> None:
    """The plan names the metric that was meant, before the way to declare one."""
    with _saved(tmp_path / "s", 1) as store:
        (plan,) = store.retain({"full": "best 1 los"}, dry_run=True).plans
        assert "did you mean loss?" in plan.refused


def _sharing(step: int) -> dict[str, torch.Tensor]:
    """Return a state of which all steps share a part."""
    torch.manual_seed(0)
    return {"shared": torch.randn(20_000), "own": torch.full((20_000,), float(step))}


def test_lost_parts_stay_known_while_a_repair_brings_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit that moves a version says that it is still damaged: no save shares with it."""
    with (
        ckptstore.open(tmp_path / "s", create=True) as store,
        ckptstore.open(tmp_path / "other", create=True) as source,
        ckptstore.open(tmp_path / "s") as other,
    ):
        source.run("r").save({"shared": _sharing(1)["shared"]}, step=1)
        store.run("r").save({"shared": _sharing(1)["shared"]}, step=1)
        store.run("r").save(_sharing(2), step=2)
        for pack in (tmp_path / "s/packs").glob("*/*.pack"):
            pack.unlink()
        store.repair()
        flags: list[list[bool]] = []
        append = store.repo.log.append_any

        def watched(build: Any) -> Any:  # noqa: ANN401 - of the log
            commit = append(build)
            flags.append([version.damaged for version in other.versions()])
            return commit

        monkeypatch.setattr(store.repo.log, "append_any", watched)
        report = store.repair(source)
        assert [(one.step, one.tensors) for one in report.lost] == [(2, ("own",))]
        assert report.quarantined == (store.resolve("r@2").id,)
        assert all(second for _, second in flags)
        assert flags[-1] == [False, True]


def test_a_repair_leaves_what_another_has_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it found lost lies elsewhere by now, and is no damage."""
    with _saved(tmp_path / "s", 2) as store, ckptstore.open(tmp_path / "s") as other:
        store.replicate(tmp_path / "copy")
        for pack in (tmp_path / "s/packs").glob("*/*.pack"):
            pack.unlink()
        append = store.repo.log.append_any

        def late(build: Any) -> Any:  # noqa: ANN401 - of the log
            monkeypatch.undo()
            assert other.repair(tmp_path / "copy").ok
            return append(build)

        monkeypatch.setattr(store.repo.log, "append_any", late)
        assert store.repair().quarantined == ()
        assert [version.damaged for version in store.versions()] == [False, False]
        assert store.verify().ok


def test_a_pin_stays_if_what_came_back_shares_with_what_is_lost() -> None:
    """A version that came back without all that it needs is damaged, and not the only copy."""
    here, there = gckit.new_place(), gckit.new_place()
    with here.open() as hot, there.open() as cold:
        for step in (1, 2):
            hot.run("r").save(_sharing(step), step=step)
        hot.repo.log.append_any(
            lambda now: name_replica(now, name="cold", url=cold.url, store=cold.info.store_id)
        )
        hot.replicate("replica:cold")
        hot.evict(["r@1"], replica="cold")
        hot.gc(grace_s=0.0, orphan_age_s=0.0)
        for key in gckit.needs(hot, hot.resolve("r@2")) - {hot.resolve("r@2").manifest_key}:
            here.backend.delete(key)
        assert gckit.equal(hot.load("r@1", refill=True), _sharing(1))
        assert hot.resolve("r@1").damaged
        cold.repo.refresh()
        assert cold.resolve("r@1").pinned_for
        hot.evict(["r@1"], replica="cold")
        report = cold.replicate(hot, ["r@1"], again=True)
        assert (report.copied, [one.kind for one in report.failures]) == ((), ["corrupt_object"])
        assert hot.repair("replica:cold").ok
        assert gckit.equal(hot.load("r@1"), _sharing(1))


class _Beside(WrapperBackend):
    """Storage where something else happens before one call."""

    def __init__(self, inner: Backend, at: int, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self.seen = 0
        self._at, self._then = at, then

    def around(self, call: str, key: str, action: Callable[[], Any], size_bytes: int = 0) -> Any:  # noqa: ANN401 - of a call
        """Count the call."""
        self.seen += 1
        if self.seen == self._at:
            self._then()
        return action()


def test_a_collection_in_the_target_at_every_call() -> None:
    """What it takes is copied again, and nobody is told of damage."""
    source = gckit.new_place().open()
    for step in (1, 2, 3):
        source.run("r").save(_sharing(step), step=step)
    at = seen = 1
    while at <= seen:
        place = gckit.new_place()
        with place.open() as target:
            source.replicate(target, ["r@1", "r@2"])
            target.remove(["r@1"], force=True)

        def collect(place: gckit.Place = place) -> None:
            with place.open() as other:
                other.gc(grace_s=0.0, orphan_age_s=0.0, repack_below=1.0)

        storage = _Beside(place.backend, at, collect)
        with place.open(storage) as target:
            assert not source.replicate(target).failures
        seen, at = storage.seen, at + 1
        with place.open() as target:
            assert gckit.equal(target.load("r@3"), _sharing(3))
    assert at > 20
