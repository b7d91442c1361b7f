"""Archival jobs: one file, one run, one report; what fails holds back what depends on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ckptstore
from ckptstore import errors
from ckptstore.config import SYSTEM, SystemEnvironment
from ckptstore.errors import IntegrityError
from ckptstore.jobs import Job, JobReport, read_job, run_job
from ckptstore.jobs.work import exposition
from ckptstore.maintenance.core import storage_times
from ckptstore.repo import Repo

Reading = Callable[..., Job]


class _Ahead:
    """The system, on a machine whose clock is two years ahead."""

    def __getattr__(self, name: str) -> object:
        return getattr(SYSTEM, name)

    def now_ms(self) -> int:
        return SYSTEM.now_ms() + 2 * 365 * 86_400_000


def _two_hours_pass(store: Path, seconds: float = 7200) -> None:
    """Make all commits older, by the clock of the file system."""
    for commit in (store / "commits").rglob("*.json"):
        info = commit.stat()
        os.utime(commit, (info.st_atime, info.st_mtime - seconds))


@pytest.fixture
def reading(tmp_path: Path) -> Reading:
    """Return a function that reads a job from hot to cold, with more tables."""

    def read(more: str = "") -> Job:
        file = tmp_path / "nightly.toml"
        places = f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "{tmp_path}/cold"\n'
        file.write_text(places + more)
        return read_job(file)

    return read


def _train(tmp_path: Path, *steps: int) -> None:
    with ckptstore.open(tmp_path / "hot", create=True) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in steps:
            state = {"model": {"w": torch.full((40_000,), float(step))}, "step": step}
            run.save(state, step=step, metrics={"loss": 1 / step})


def _step(report: JobReport, name: str) -> dict[str, Any]:
    (found,) = [step for step in report.steps if step.name == name]
    assert found.ok, found.error
    return dict(found.result)


def test_a_job_copies_what_is_new(tmp_path: Path, reading: Reading) -> None:
    """The first run copies everything, the second what came since, and each is whole there."""
    job = reading()
    assert job.name == "nightly"
    _train(tmp_path, 1, 2)
    assert _step(run_job(job), "replicate")["copied"] == 2
    _train(tmp_path, 3)
    second = _step(run_job(job), "replicate")
    assert (second["copied"], second["present"]) == (1, 2)
    with ckptstore.open(tmp_path / "cold") as cold:
        assert cold.load("gpt@3")["model"]["w"][0] == 3.0
        assert cold.verify().ok


def test_both_stores_keep_what_the_file_says(tmp_path: Path, reading: Reading) -> None:
    """The source keeps the newest, the target the best; collections free the rest."""
    _train(tmp_path, 1, 2, 3, 4)
    job = reading(
        '[retain]\nsource = { full = "last 1" }\ntarget = { full = "best 2 loss" }\n'
        "[gc]\nsource = true\ntarget = true\n"
    )
    report = run_job(job)
    assert [step.name for step in report.steps] == [
        "replicate", "retain-target", "retain-source", "gc-target", "gc-source",
    ]  # fmt: skip
    assert report.ok
    with ckptstore.open(tmp_path / "hot") as hot, ckptstore.open(tmp_path / "cold") as cold:
        assert [v.step for v in hot.versions()] == [4]
        assert [v.step for v in cold.versions()] == [3, 4]
    again = run_job(job)  # what the target deleted is gone in the source too, and stays gone
    assert _step(again, "replicate")["copied"] == 0


def test_what_cannot_be_copied_holds_back_eviction(tmp_path: Path, reading: Reading) -> None:
    """A damaged version fails its step; the source is neither thinned out nor evicted."""
    _train(tmp_path, 1, 2)
    with ckptstore.open(tmp_path / "hot") as hot:
        pack = hot.version("gpt@1")._content.manifest.pieces.packs[0]
    path = tmp_path / "hot" / "packs" / pack[:2] / f"{pack}.pack"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:300])
    job = reading('[retain]\nevict = "last 1"\nsource = { full = "last 1" }\n')
    report = run_job(job)
    assert [step.name for step in report.steps] == ["replicate"]
    assert not report.ok
    assert report.exit_code == 5
    with ckptstore.open(tmp_path / "hot") as hot:
        assert {v.level for v in hot.versions()} == {"full"}


def test_overdue_versions_are_told(tmp_path: Path, reading: Reading) -> None:
    """What is older than the alert allows and not in the target is listed, with exit code 7."""
    _train(tmp_path, 1, 2)
    job = reading('[select]\nolder_than = "1d"\n[alert]\nnot_replicated_after = "1h"\n')
    assert not run_job(job, environment=_Ahead()).overdue  # type: ignore[arg-type]  # the rest is the system's
    _two_hours_pass(tmp_path / "hot")
    report = run_job(job)
    assert [late.step for late in report.overdue] == [1, 2]
    assert report.exit_code == 7
    text = exposition(report.name, report, now_s=5.0)
    assert 'ckptstore_job_overdue_versions{job_name="nightly"} 2' in text
    assert 'ckptstore_job_ok{job_name="nightly"} 0' in text
    done = run_job(reading('[alert]\nnot_replicated_after = "1h"\n'))
    assert done.ok
    assert not done.overdue


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("[selct]\nruns = []\n", "selct: .*did you mean select"),
        ('[select]\nkeeep = "last 1"\n', r"select\.keeep: .*did you mean keep"),
        ("[prices]\nput_per_1000 = 5.0\n", "prices: a job has no such word"),
        ('[archive]\nclass = "GLACIER"\nmin_ago = "1d"\n', r"archive\.min_ago: .*min_age"),
        ('[select]\nkeep = "lest 1"\n', "lest"),
        ('[select]\nolder_than = "1 fortnight"\n', "fortnight"),
        ("[copy]\nworkers = 0\n", "workers"),
        ('[retain]\nsource = { full = "lst 3" }\n', "lst"),
        ('[retain]\nevict = ""\n', "rule"),
        ('[copy]\nrate = "fast"\n', "fast"),
        ("[target]\nurl = 3\n", "target"),
        ("not toml", "line"),
        ("[select]\nkeep = []\n", "select.keep: no rule"),
        ('[select]\nolder_than = "-1h"\n', "select.older_than"),
        ("[copy]\nrate = -5\n", "copy.rate"),
        (f"[copy]\nrate = {'9' * 40}\n", "copy.rate: no link"),
        (f"[copy]\nrate = {'9' * 5000}\n", "digits"),
        (f"x = {'[' * 30_000}", "recursion"),
        (f"x = {'{y = ' * 10_000}", "recursion"),
        ("[scrub]\ntarget = 1e-300\n", "scrub.target"),
        ("[scrub]\nsource = nan\n", "scrub.source"),
        ('[archive]\nclass = "glacier"\n', "archive.class"),
        ('[archive]\nmin_age = "30d"\n', "class"),
        ('[archive]\nclass = "GLACIER"\nmin_age = "long"\n', "archive.min_age"),
        ('[archive]\nclass = "GLACIER"\nkeep_hot = "everything"\n', "archive.keep_hot"),
        ("[retain]\ntarget = {}\n", "retain.target"),
    ],
)
def test_what_is_no_job(reading: Reading, more: str, named: str) -> None:
    """Words, rules and times that are none are refused, by name, before anything is opened."""
    with pytest.raises(errors.InvalidInputError, match=named) as caught:
        reading(more)
    assert "nightly.toml" in str(caught.value)


def test_files_and_stores_that_are_not_there(tmp_path: Path, reading: Reading) -> None:
    """A job file that is not there, and a source that is not, are errors of their own."""
    with pytest.raises(errors.NotFoundError, match="no job file"):
        read_job(tmp_path / "none.toml")
    with pytest.raises(errors.StoreNotFoundError, match=r"the source, .*hot, cannot be opened"):
        run_job(reading())
    assert not (tmp_path / "cold").exists()


@pytest.mark.parametrize("select", ['runs = ["gtp"]', 'refs = ["gpt@9"]'])
def test_a_selection_that_names_nothing_makes_no_store(
    tmp_path: Path, reading: Reading, select: str
) -> None:
    """A misspelt run or ref is an error, and where the target was to be is nothing."""
    _train(tmp_path, 1)
    with pytest.raises(errors.NotFoundError):
        run_job(reading(f"[select]\n{select}\n"))
    assert not (tmp_path / "cold").exists()


def test_one_store_is_no_archive_of_itself(tmp_path: Path) -> None:
    """Where both places are one store nothing is done; its only versions stay."""
    _train(tmp_path, 1, 2)
    file = tmp_path / "nightly.toml"
    places = f'[source]\nurl = "{tmp_path}/hot"\n[target]\nurl = "file://{tmp_path}/hot"\n'
    file.write_text(places + '[retain]\ntarget = { full = "last 1" }\n[gc]\ntarget = true\n')
    with pytest.raises(errors.ConflictError, match="one store"):
        run_job(read_job(file))
    with ckptstore.open(tmp_path / "hot") as hot:
        assert len(hot.versions()) == 2


@pytest.mark.parametrize("what", ["pack", "manifest"])
def test_nothing_is_evicted_that_the_target_lost(
    tmp_path: Path, reading: Reading, what: str
) -> None:
    """Objects taken from the target past its log keep their versions here, and fail the job."""
    _train(tmp_path, 1, 2, 3)
    run_job(reading())
    with ckptstore.open(tmp_path / "cold") as cold:
        keys = {"manifest": cold.resolve("gpt@1").manifest_key}
        pack = cold.version("gpt@1")._content.manifest.pieces.packs[0]
        keys["pack"] = f"packs/{pack[:2]}/{pack}.pack"
    (tmp_path / "cold" / keys[what]).unlink()
    report = run_job(reading('[retain]\nevict = "last 1"\n'))
    assert report.exit_code == IntegrityError.exit_code
    (step,) = [one for one in report.steps if not one.ok]
    assert (step.name, step.result["evicted"], step.result["missed"]) == ("evict", 1, 1)
    with ckptstore.open(tmp_path / "hot") as hot:
        assert {v.step: v.level for v in hot.versions()} == {1: "full", 2: "record", 3: "full"}


def test_what_was_never_read_back_is_not_evicted(tmp_path: Path, reading: Reading) -> None:
    """A note of an earlier copy does not count for one that came unchecked since."""
    _train(tmp_path, 1, 2)
    run_job(reading())
    with ckptstore.open(tmp_path / "hot") as hot, ckptstore.open(tmp_path / "cold") as cold:
        cold.age(["gpt@1"], "record")
        hot.replicate(cold, ["gpt@1"], check=False)
        assert cold.resolve("gpt@1").level == "full"
    assert _step(run_job(reading('[retain]\nevict = "last 1"\n')), "evict")["evicted"] == 0


def test_a_scrub_that_lost_something_holds_back_eviction(tmp_path: Path, reading: Reading) -> None:
    """While the target lies damaged for good, the source is neither thinned out nor evicted."""
    _train(tmp_path, 1, 2, 3)
    run_job(reading())
    for place in ("hot", "cold"):
        with ckptstore.open(tmp_path / place) as store:
            pack = store.version("gpt@1")._content.manifest.pieces.packs[0]
        path = tmp_path / place / "packs" / pack[:2] / f"{pack}.pack"
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:300])
    job = reading('[scrub]\ntarget = 1.0\n[retain]\nevict = "last 1"\n')
    report = run_job(job)
    assert [(step.name, step.ok) for step in report.steps] == [
        ("replicate", True),
        ("scrub-target", False),
    ]


def test_overdue_versions_are_told_whatever_is_copied(tmp_path: Path, reading: Reading) -> None:
    """`since_s` narrows what is copied, not what is told; damaged replicas are no replicas."""
    _train(tmp_path, 1)
    job = reading('[alert]\nnot_replicated_after = "1h"\n')
    _two_hours_pass(tmp_path / "hot")
    report = run_job(job, since_s=4e9)
    assert _step(report, "replicate")["selected"] == 0
    assert [late.step for late in report.overdue] == [1]
    again = run_job(job, since_s=4e9, since_target="0" * 32)  # of another target
    assert _step(again, "replicate")["copied"] == 1


def test_what_was_too_young_is_covered_later(tmp_path: Path, reading: Reading) -> None:
    """A success covers what was old enough for it by the storage's clock, and says so."""
    _train(tmp_path, 1)
    marks = []
    for name in ("before", "after"):
        (tmp_path / name).touch()
        marks.append((tmp_path / name).stat().st_mtime - 3600)
        if name == "before":
            job = reading('[select]\nolder_than = "1h"\n')
            report = run_job(job, environment=_Ahead())  # type: ignore[arg-type]
    covered = datetime.fromisoformat(report.covered_until).timestamp()
    assert int(marks[0]) <= covered <= marks[1]


def test_a_machine_that_is_ahead_covers_what_it_saw(
    tmp_path: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the source may not be written, the machine's clock covers no version of the future."""

    def denied(_: Repo) -> float:
        raise errors.StoragePermissionError("put probe/0-clock: HTTP 403 AccessDenied")

    monkeypatch.setattr(storage_times, "storage_now", denied)
    ahead_ms = _Ahead().now_ms()
    monkeypatch.setattr(SystemEnvironment, "now_ms", lambda _: ahead_ms)
    _train(tmp_path, 1)
    job = reading()
    newest = max((tmp_path / "hot" / "commits").rglob("*.json"), key=lambda path: path.name)
    report = run_job(job)  # which commits, too
    covered = datetime.fromisoformat(report.covered_until).timestamp()
    assert covered == int(newest.stat().st_mtime)
    with ckptstore.open(tmp_path / "hot") as hot:
        hot.run("gpt").save({"w": torch.ones(3)}, step=99)
    again = run_job(job, since_s=covered, since_target=report.target_id)
    assert _step(again, "replicate")["copied"] == 1


def test_versions_that_are_newer_than_now_are_no_exception(
    tmp_path: Path, reading: Reading
) -> None:
    """As where the storage tells no times: they are copied, unless they must have some age."""
    _train(tmp_path, 1)
    _two_hours_pass(tmp_path / "hot", -7200)
    aged = run_job(reading('[select]\nsince = "1d"\nolder_than = "1h"\n'))
    assert _step(aged, "replicate")["selected"] == 0
    assert _step(run_job(reading('[select]\nsince = "1d"\n')), "replicate")["selected"] == 1


def test_reports_tell_no_secrets(reading: Reading, tmp_path: Path) -> None:
    """Where the target is, is told without what was given to open it."""
    _train(tmp_path, 1)
    job = reading()
    url = "memory://user:secret@reports/cold?token=secret"
    job = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, url=url))
    assert "secret" not in run_job(job, dry_run=True).target


def test_retention_of_the_source_waits_for_the_copy(tmp_path: Path, reading: Reading) -> None:
    """What is selected and was too young to be copied stays, whatever the source's rules say."""
    _train(tmp_path, 1, 2, 3)
    job = reading(
        '[select]\nolder_than = "1h"\nkeep = ["best 2 loss"]\n'
        '[retain]\nsource = { full = "last 1" }\n[gc]\nsource = true\n'
    )
    report = run_job(job)
    assert _step(report, "replicate")["selected"] == 0
    assert _step(report, "retain-source")["changes"] == 1
    with ckptstore.open(tmp_path / "hot") as hot:
        assert [v.step for v in hot.versions()] == [2, 3]
    _two_hours_pass(tmp_path / "hot")
    assert run_job(job).ok
    with ckptstore.open(tmp_path / "hot") as hot, ckptstore.open(tmp_path / "cold") as cold:
        assert [v.step for v in hot.versions()] == [3]
        assert [v.step for v in cold.versions() if v.level == "full"] == [2, 3]


def test_what_the_target_let_go_since_it_is_here_stays_here(
    tmp_path: Path, reading: Reading
) -> None:
    """Two stores that trust each other: no rule of one takes the copy that the other counts on."""
    _train(tmp_path, 1, 2, 3)
    job = reading('[retain]\nsource = { full = "last 1" }\n')
    with ckptstore.open(tmp_path / "hot") as hot:
        hot.replicate(tmp_path / "cold")
    with ckptstore.open(tmp_path / "cold") as cold:
        cold.add_replica("hot", tmp_path / "hot")
        cold.replicate("replica:hot")
        cold.age(["gpt@1"], "record")
        cold.age(["gpt@2"], "weights")
        assert [one.step for one in cold.evict(["gpt@2"], replica="hot").evicted] == [2]
        cold.gc(grace_s=0.0, orphan_age_s=0.0)
    assert run_job(job).ok
    with ckptstore.open(tmp_path / "hot") as hot, ckptstore.open(tmp_path / "cold") as cold:
        assert [v.step for v in hot.versions() if v.level == "full"] == [1, 2, 3]
        assert torch.equal(cold.load("gpt@2")["model"]["w"], torch.full((40_000,), 2.0))
