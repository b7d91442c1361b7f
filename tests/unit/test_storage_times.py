"""Ages are by the storage's clock: wrong clocks of machines delete nothing, and keep nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gckit import Place, delete, new_place, parts_of
from metered import MeteredBackend
from simulated_environment import SimulatedEnvironment, Skewed

from ckptstore import limits
from ckptstore.errors import ReadOnlyError, StoragePermissionError
from ckptstore.maintenance.cold.archive import archivable
from ckptstore.maintenance.core.select_versions import select_versions
from ckptstore.maintenance.core.storage_times import StorageTimes
from ckptstore.maintenance.retention.retain import RetainReport
from ckptstore.testing.faulty import Fault, FaultyBackend

HOUR = 3600.0
DAY = 86_400.0
YEAR = 365 * DAY
WRONG = [-5 * YEAR, -DAY, DAY, 2 * YEAR]


@pytest.fixture
def place() -> Place:
    """Make an empty store."""
    return new_place()


def _save(place: Place, step: int, *, ahead_s: float = 0.0) -> None:
    with place.open(ahead_s=ahead_s) as store:
        store.run("gpt").save(parts_of(step), step=step)


def _save_daily(place: Place, count: int, *, every_s: float = DAY, ahead_s: float = 0.0) -> None:
    for step in range(count):
        _save(place, step, ahead_s=ahead_s)
        place.environment.sleep(every_s)


def _kept(report: RetainReport) -> list[int]:
    return [d.version.step for d in report.plans[0].decisions if d.fate == d.version.level]


def _retain(place: Place, *rules: str, ahead_s: float = 0.0, **options: Any) -> list[int]:  # noqa: ANN401
    """Retain from a machine; return what stays, which a dry run has said before."""
    with place.open(ahead_s=ahead_s) as store:
        said = store.retain({"full": list(rules)}, dry_run=True, **options)
        done = store.retain({"full": list(rules)}, **options)
        assert (said.clock, done.clock) == ("storage", "storage")
        assert _kept(said) == _kept(done) == [version.step for version in store.versions()]
        return _kept(done)


@pytest.mark.parametrize("ahead_s", WRONG)
def test_a_version_counts_from_its_commit(place: Place, ahead_s: float) -> None:
    """Whatever the clock of its writer said: young for seven days, then old."""
    _save(place, 1, ahead_s=ahead_s)
    _save(place, 2)
    place.environment.sleep(6 * DAY)
    _save(place, 3, ahead_s=ahead_s)
    assert _retain(place, "within 7d") == [1, 2, 3]
    place.environment.sleep(2 * DAY)
    assert _retain(place, "within 7d") == [3]


@pytest.mark.parametrize("ahead_s", WRONG)
def test_the_clock_of_the_retaining_machine_does_not_count(place: Place, ahead_s: float) -> None:
    """It takes no more, and no less, than a machine with a right clock does."""
    _save_daily(place, 5)
    assert _retain(place, "within 3d12h", ahead_s=ahead_s) == [2, 3, 4]


@pytest.mark.parametrize("ahead_s", WRONG)
def test_the_storage_may_differ_from_all_machines(ahead_s: float) -> None:
    """Both times are the storage's, so that its offset cancels out."""
    place = new_place(ahead_s=ahead_s)
    _save_daily(place, 5)
    assert _retain(place, "within 3d12h") == [2, 3, 4]


@pytest.mark.parametrize("ahead_s", WRONG)
def test_abandoned_versions_count_from_their_commit(place: Place, ahead_s: float) -> None:
    """As others do."""
    _save_daily(place, 3, ahead_s=ahead_s)
    with place.open() as store:
        store.rollback("gpt@0")
    assert _retain(place, "last 1", "abandoned 36h", ahead_s=-ahead_s) == [0, 2]


def test_a_clock_that_stands_still_costs_no_day(place: Place) -> None:
    """Every day keeps a version, though their writers all recorded one time."""
    for step in range(8):
        ahead_s = -place.environment.monotonic() or -1.0
        _save(place, step, ahead_s=ahead_s)
        place.environment.sleep(DAY / 2)
    with place.open() as store:
        assert len({version.created_at.date() for version in store.versions()}) == 1
    assert len(_retain(place, "every 1d")) == 5


def test_a_copied_store_keeps_a_version_of_each_day(place: Place) -> None:
    """Where the storage has one time for all commits, the recorded times count too."""
    _save_daily(place, 8, every_s=DAY / 2)
    copied = new_place()
    copied.environment.sleep(YEAR)
    for key, item in place.backend.objects.items():
        copied.backend.delete(key)
        copied.backend.put(key, item.data)
    assert len(_retain(copied, "every 1d")) == len(_retain(place, "every 1d")) == 5


def test_replicas_count_from_their_arrival(place: Place) -> None:
    """As objects of a bucket do; but all days that were recorded are kept apart."""
    for step in range(4):
        _save(place, step, ahead_s=-5 * YEAR)
        place.environment.sleep(DAY)
    target = new_place()
    target.environment.sleep(5 * DAY)
    with place.open() as here, target.open() as there:
        here.replicate(there)
    target.environment.sleep(DAY)
    assert len(_retain(target, "every 1d")) == 4
    assert _retain(target, "within 2d") == [0, 1, 2, 3]
    target.environment.sleep(2 * DAY)
    assert _retain(target, "within 2d", "last 1") == [3]


@pytest.mark.parametrize("ahead_s", WRONG)
def test_archives_and_selections_go_by_the_storage(place: Place, ahead_s: float) -> None:
    """Ages of versions that may get cold, and rules that select."""
    _save_daily(place, 4, ahead_s=ahead_s)
    with place.open(ahead_s=-ahead_s) as store:
        old = archivable(store.repo, min_age_s=2.5 * DAY)
        hot = archivable(store.repo, keep_hot="within 2d12h")
        young = select_versions(store.repo, rules="within 2d12h")
    assert [v.step for v in old] == [v.step for v in hot] == [0, 1]
    assert [v.step for v in young] == [2, 3]


# --- cost, and places that cannot be written ------------------------------------------------------
def _calls(meter: MeteredBackend) -> dict[str, int]:
    return {name: one.calls for name, one in meter.snapshot().items()}


def test_only_rules_of_time_ask_for_times(place: Place) -> None:
    """One object is made, looked at and removed, and one listing tells a thousand commits."""
    for step in range(3):
        _save(place, step)
    asked = []
    for rules in ("last 3", "within 7d, every 1d, abandoned 3d"):
        meter = MeteredBackend(place.backend)
        with place.open(meter) as store:
            store.repo.refresh()
            before = _calls(meter)
            assert not store.retain({"full": rules}).changes
            after = _calls(meter)
            asked.append({one: after[one] - before.get(one, 0) for one in after})
    plain, timed = ({name: count for name, count in one.items() if count} for one in asked)
    assert timed == {"put": 1, "stat": 1, "delete": 1, "list": plain["list"] + 1}
    assert plain.keys() == {"list"}


def test_commits_of_many_folders(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder with a live version is listed once; one that came later is asked for alone."""
    monkeypatch.setattr(limits, "COMMITS_PER_FOLDER", 2)
    _save_daily(place, 6)
    meter = MeteredBackend(place.backend)
    with place.open(meter) as store:
        delete(store, *(version.id for version in store.versions()[1:4]))
        times, before = StorageTimes(store.repo), _calls(meter)
        ages = [times.age_s(version) for version in store.versions() for _ in range(3)]
        after = _calls(meter)
        assert [round(age / DAY) for age in ages] == [6, 6, 6, 2, 2, 2, 1, 1, 1]
        listings = after["list"] - before["list"]
        folders = {version.commit // 2 for version in store.versions()}
        assert listings == 1 + len(folders), "one is of the log, for the versions"
        place.environment.sleep(HOUR)
        late = store.run("gpt").save(parts_of(9), step=9)
        assert round(times.saved_s(late) - times.now_s()) == HOUR


def test_a_read_only_store_goes_by_this_machine_and_says_so(place: Place) -> None:
    """But never by a time before the newest commit."""
    _save_daily(place, 3)
    before = dict(place.backend.objects)
    for ahead_s, kept in ((0.0, [1, 2]), (YEAR, []), (-YEAR, [0, 1, 2])):
        with place.open(read_only=True, ahead_s=ahead_s) as store:
            report = store.retain({"full": "within 2d12h", "record": "all"}, dry_run=True)
            assert report.clock == "machine"
            held = kept or [2]  # the head stays in any case
            assert _kept(report) == held
            with pytest.raises(ReadOnlyError):
                store.retain({"full": "within 2d12h"})
    assert place.backend.objects == before


def test_where_the_clock_may_not_be_read_nothing_is_deleted(place: Place) -> None:
    """A refusal to write is told by a dry run as the machine's clock; retention is refused."""
    _save_daily(place, 3)
    before = dict(place.backend.objects)

    def denied() -> StoragePermissionError:
        return StoragePermissionError("put probe/0-clock: EROFS")

    fault = Fault(calls=frozenset({"put", "delete"}), at=1, times=0, error=denied)
    with place.open(FaultyBackend(place.backend, fault), ahead_s=2 * YEAR) as store:
        assert store.retain({"full": "within 1d"}, dry_run=True).clock == "machine"
        with pytest.raises(StoragePermissionError, match="clock"):
            store.retain({"full": "within 1d"})
        assert not store.retain({"full": "last 3"}, dry_run=True).clock
    assert place.backend.objects == before


def test_those_who_may_not_delete_can_retain(place: Place) -> None:
    """Deletions are commits; only the clock's object stays behind."""
    _save_daily(place, 3)

    def denied() -> StoragePermissionError:
        return StoragePermissionError("delete probe/0-clock: HTTP 403 AccessDenied")

    fault = Fault(calls=frozenset({"delete"}), at=1, times=0, error=denied)
    with place.open(FaultyBackend(place.backend, fault)) as store:
        assert _kept(store.retain({"full": "within 36h"})) == [2]
    assert [key for key in place.backend.objects if key.startswith("probe/")]


def test_files_have_the_clock_of_their_disk(tmp_path: Path) -> None:
    """Times of commits are those of the files."""
    import os

    import ckptstore

    with ckptstore.open(tmp_path, create=True) as store:
        for step in range(3):
            store.run("gpt").save(parts_of(step), step=step)
        first = tmp_path / "commits/000000/000000000001.json"
        os.utime(first, (1, 1))
        report = store.retain({"full": "within 1h"})
        assert (_kept(report), report.clock) == ([1, 2], "storage")


def test_the_skewed_clock_of_the_kit_is_skewed() -> None:
    """The tests here would show nothing otherwise."""
    near = SimulatedEnvironment()
    assert Skewed(near, -5.0).now_ms() == near.now_ms() - 5000
