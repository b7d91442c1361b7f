"""archive and thaw from the command line: jobs, and what is cold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from buckets import PREFIX, AzureBucket, S3Bucket
from local_servers import SECRET

import ckptstore
from ckptstore.errors import ColdObjectError
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


@pytest.fixture
def slow_restores(s3_bucket: S3Bucket) -> Iterator[None]:
    """Let moto restore an object when it has been looked at twice."""
    api = f"{s3_bucket.endpoint_url}/moto-api/state-manager"
    model: dict[str, Any] = {"model_name": "s3::keyrestore"}
    manual: dict[str, Any] = {"progression": "manual", "times": 2}
    requests.post(f"{api}/set-transition", json={**model, "transition": manual}, timeout=120)
    yield
    requests.post(f"{api}/unset-transition", json=model, timeout=120)


@pytest.fixture
def options(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return storage options, without credentials: these are in the environment."""
    given = s3_bucket.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "labaccess")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return {name: given[name] for name in ("endpoint_url", "client_kwargs")}


@pytest.fixture
def store(s3_bucket: S3Bucket, options: dict[str, Any]) -> list[str]:
    """Return the options of a store with three versions, the last two sharing a tensor."""
    shared = torch.randn(60_000)
    with ckptstore.open(s3_bucket.url, create=True, codec="raw", **options) as store:
        run = store.run("gpt")
        for step in (1, 2, 3):
            model = {"w": torch.full((50_000,), float(step))}
            if step > 1:
                model["shared"] = shared
            run.save({"model": model, "optimizer": {"m": torch.randn(50_000)}}, step=step)
    return [
        *("--store", s3_bucket.url),
        *("--option", f"endpoint_url={options['endpoint_url']}"),
        *("--option", 'client_kwargs:={"region_name": "us-east-1"}'),
    ]


def _classes(bucket: S3Bucket) -> dict[str, str]:
    listed = bucket._client.list_objects_v2(Bucket=bucket.name)["Contents"]
    return {item["Key"].removeprefix(PREFIX): item["StorageClass"] for item in listed}


@pytest.mark.usefixtures("slow_restores")
def test_there_and_back(
    cli: Cli, s3_bucket: S3Bucket, store: list[str], options: dict[str, Any]
) -> None:
    """What is archived is refused with the command that thaws it, and loads after that."""
    dry = cli("archive", "gpt@1", "gpt@2", "--class", "GLACIER", "-n", "--json", *store)
    assert set(_classes(s3_bucket).values()) == {"STANDARD"}
    notes = [cli("archive", "gpt@1", "--class", "GLACIER", "-n", *store, *q) for q in ((), ("-q",))]
    assert ["note: " in one.err for one in notes] == [True, False]
    assert not any("note: " in one.out for one in notes)
    done = cli("archive", "gpt@1", "gpt@2", "--class", "GLACIER", "--json", *store)
    assert done.code == dry.code == 0
    assert done.document["moved"] == dry.document["moved"]
    assert (done.document["moved"]["count"], len(done.document["left"])) == (1, 1)
    cold = {key for key, name in _classes(s3_bucket).items() if name == "GLACIER"}
    assert len(cold) == 1
    assert all(key.startswith("packs/") for key in cold)
    again = cli("archive", "gpt@1", "gpt@2", "--class", "GLACIER", *store)
    assert "1 pack of 391 KiB there already" in again.out
    assert "stay, since others need them: gpt@3" in again.out

    assert cli("ls", "gpt", *store).code == 0
    with ckptstore.open(s3_bucket.url, **options) as opened:
        with pytest.raises(ColdObjectError) as caught:
            opened.load("gpt@1")
        program, *words = caught.value.hint.split()
        assert program == "ckptstore"
        assert words[-2:] == store[:2]
        shown = cli(*words[:-2], *store, "-n")
        assert "would ask for 1 pack" in shown.out
        asked = cli(*words[:-2], *store)
        assert "asked for 1 pack" in asked.out
        assert "180 min to 5 h" in asked.out or "3 h to 5 h" in asked.out
        waited = cli("thaw", "gpt@1", "--wait", "--poll", "1s", "--json", *store)
        assert waited.code == 0
        assert waited.document["ready"] is True
        assert waited.document["requested"]["count"] == 0
        assert opened.load("gpt@1")["model"]["w"][0] == 1.0
    ready = cli("thaw", "gpt@1", "--role", "weights", *store)
    assert "can be loaded until" in ready.out
    back = cli("archive", "gpt@1", "--class", "STANDARD", *store)
    assert back.code == 0
    assert set(_classes(s3_bucket).values()) == {"STANDARD"}


@pytest.mark.slow
def test_verify_says_what_it_did_not_read(cli: Cli, store: list[str]) -> None:
    """Cold packs are no damage, and have their own count."""
    cli("archive", "gpt@1", "--class", "DEEP_ARCHIVE", *store)
    done = cli("verify", "--json", *store)
    assert done.code == 0
    assert done.document["cold_packs_count"] == 1
    assert len(done.document["cold_versions"]) == 1
    shown = cli("verify", *store)
    assert "not read: cold" in shown.out


def test_new_packs_can_be_written_in_a_class(
    cli: Cli, s3_bucket: S3Bucket, store: list[str], options: dict[str, Any]
) -> None:
    """Packs, and nothing else; not in one that they could not be read back from."""
    before = set(_classes(s3_bucket))
    with ckptstore.open(s3_bucket.url, pack_class="STANDARD_IA", **options) as opened:
        opened.run("new").save({"w": torch.randn(1000)}, step=1)
    new = {key: name for key, name in _classes(s3_bucket).items() if key not in before}
    assert {name for key, name in new.items() if key.startswith("packs/")} == {"STANDARD_IA"}
    assert {name for key, name in new.items() if not key.startswith("packs/")} == {"STANDARD"}
    assert cli("ls", *store, "--option", "pack_class=GLACIER").code == 2
    assert cli("ls", *store, "--option", "pack_class=no class").code == 2


@pytest.mark.slow
def test_what_is_refused_classes(cli: Cli, store: list[str], store_path: object) -> None:
    """Neither class nor job; nothing named; both at once; storage without classes."""
    assert cli("archive", "gpt@1", *store).code == 2
    assert cli("archive", "--class", "GLACIER", *store).code == 2
    assert cli("archive", "gpt@1", "--class", "GLACIER", "--report", "r.json", *store).code == 2
    assert cli("archive", "gpt@1", "--class", "GLACIER", "--job", "j.toml").code == 2
    assert cli("archive", "gpt@1", "--class", "NO_SUCH_CLASS", *store).code == 8
    assert cli("archive", "gpt@9", "--class", "GLACIER", *store).code == 3
    refused = cli("archive", "gpt@100", "--class", "GLACIER", "--store", store_path)
    assert refused.code == 2
    assert "no storage classes" in refused.err
    assert cli("thaw", "gpt@100", "--store", store_path).code == 0


@pytest.mark.slow
def test_thawed_for_good(
    cli: Cli, azure_bucket: AzureBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Azure no days are named, since there are none, and its own tiers are accepted."""
    for name, value in azure_bucket.chain().items():
        monkeypatch.setenv(name, value)
    at = ("--store", azure_bucket.url)
    with ckptstore.open(azure_bucket.url, create=True) as store:
        for step in (1, 2):
            store.run("gpt").save({"w": bytes([step]) * 100_000}, step=step)
    assert cli("archive", "gpt@1", "--class", "Archive", *at).code == 0
    assert cli("thaw", "gpt@1", "--tier", "Bulk", *at).code == 2
    asked = cli("thaw", "gpt@1", "--tier", "High", *at)
    assert "readable for good" in asked.out
    assert "can be loaded" in cli("thaw", "gpt@1", "--wait", *at).out
    assert set(azure_bucket.tiers().values()) == {"Hot"}
