"""archive --job from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def job(store_path: Path, tmp_path: Path) -> Path:
    """Return a job file from the store with a history to one that is not there yet."""
    file = tmp_path / "nightly.toml"
    file.write_text(
        f'[source]\nurl = "{store_path}"\n[target]\nurl = "{tmp_path / "cold"}"\n'
        '[alert]\nnot_replicated_after = "1s"\n'
    )
    return file


def test_a_job_and_its_report(cli: Cli, job: Path, tmp_path: Path) -> None:
    """The document is printed and kept; the next run since the last success finds nothing."""
    report, metrics = tmp_path / "last.json", tmp_path / "ckptstore.prom"
    done = cli("archive", "--job", job, "--report", report, "--metrics", metrics, "--json")
    assert done.code == 0
    assert done.document["ok"] is True
    kept = json.loads(report.read_text())
    assert kept["last_success"] == done.document["began_at"]
    assert kept["steps"][0]["result"]["copied"] == 6
    assert 'ckptstore_job_ok{job_name="nightly"} 1' in metrics.read_text()
    again = cli("archive", "--job", job, "--report", report, "--since", "last", "--json")
    assert again.code == 0
    shown = cli("archive", "--job", job)
    assert "6 there already" in shown.out


def test_a_dry_run_writes_no_files(cli: Cli, job: Path, tmp_path: Path) -> None:
    """It prints what would be done."""
    done = cli("archive", "--job", job, "--dry-run", "--report", tmp_path / "r.json")
    assert done.code in (0, 7)
    assert "6 versions" in done.out
    assert not (tmp_path / "r.json").exists()
    assert not (tmp_path / "cold").exists()


def test_what_is_refused(cli: Cli, job: Path, tmp_path: Path) -> None:
    """A file that is no job, a time that is none, and a report that is none."""
    assert cli("archive", "--job", tmp_path / "none.toml").code == 3
    assert cli("archive", "--job", job, "--since", "yesterday").code == 2
    (tmp_path / "r.json").write_text("{}")
    assert cli("archive", "--job", job, "--report", tmp_path / "r.json").code == 2
    job.write_text(job.read_text() + "[typo]\n")
    refused = cli("archive", "--job", job)
    assert refused.code == 2
    assert "typo" in refused.err


def test_since_last_looks_at_what_was_too_young(cli: Cli, job: Path, tmp_path: Path) -> None:
    """What the last success found too young to copy is copied by the next `--since last`."""
    report = tmp_path / "last.json"
    text = job.read_text().replace('not_replicated_after = "1s"', 'not_replicated_after = "1d"')
    job.write_text(text + '[select]\nolder_than = "2h"\n')
    first = cli("archive", "--job", job, "--report", report, "--json")
    assert (first.code, first.document["steps"][0]["result"]["selected"]) == (0, 0)
    job.write_text(text)
    second = cli("archive", "--job", job, "--report", report, "--since", "last", "--json")
    assert second.document["steps"][0]["result"]["copied"] == 6


def test_since_last_is_about_one_target(cli: Cli, job: Path, tmp_path: Path) -> None:
    """With another target everything is looked at; a run that failed leaves the last success."""
    report = tmp_path / "last.json"
    assert cli("archive", "--job", job, "--report", report).code == 0
    kept = json.loads(report.read_text())["last"]
    job.write_text(job.read_text().replace("cold", "other"))
    kept["covered_until"] = "2400-01-01T00:00:00+00:00"
    report.write_text(json.dumps({"last": kept}))
    done = cli("archive", "--job", job, "--report", report, "--since", "last", "--json")
    assert done.document["steps"][0]["result"]["copied"] == 6
    assert json.loads(report.read_text())["last"]["target_id"] != kept["target_id"]


def test_a_job_that_cannot_begin_says_so_everywhere(cli: Cli, job: Path, tmp_path: Path) -> None:
    """Which store, in the error, the report and the figures; the last success stays known."""
    report, metrics = tmp_path / "last.json", tmp_path / "ckptstore.prom"
    files = ("--report", report, "--metrics", metrics)
    assert cli("archive", "--job", job, *files).code == 0
    before = json.loads(report.read_text())["last"]
    (tmp_path / "cold").rename(tmp_path / "away")
    (tmp_path / "cold").write_text("a mount that is not there")
    failed = cli("archive", "--job", job, *files)
    assert failed.code != 0
    assert f"the target, {tmp_path / 'cold'}, cannot be opened" in failed.err
    kept = json.loads(report.read_text())
    assert (kept["ok"], kept["exit_code"], kept["last"]) == (False, failed.code, before)
    assert "cannot be opened" in kept["error"]
    assert 'ckptstore_job_ok{job_name="nightly"} 0' in metrics.read_text()
    assert "replicated" not in metrics.read_text()
    (tmp_path / "cold").unlink()
    (tmp_path / "away").rename(tmp_path / "cold")
    assert cli("archive", "--job", job, *files, "--since", "last").code == 0
    assert 'ckptstore_job_ok{job_name="nightly"} 1' in metrics.read_text()


def test_files_that_cannot_be_written_are_refused_before(
    cli: Cli, job: Path, tmp_path: Path
) -> None:
    """Not at the end of a night's work."""
    for option, place in (("--report", tmp_path), ("--metrics", tmp_path / "none" / "m.prom")):
        refused = cli("archive", "--job", job, option, place)
        assert refused.code != 0
        assert "cannot be written" in refused.err
    assert not (tmp_path / "cold").exists()
