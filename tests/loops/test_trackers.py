"""MLflow, W&B and Trackio get links to versions, offline; what they do cannot harm a save."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from buckets import S3Bucket
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.cli.main import run as command
from ckptstore.errors import InvalidInputError, StorageError
from ckptstore.integrations import trackers
from ckptstore.integrations.trackers import TrackerRun, Tracking, log_version, parse_link, track
from ckptstore.model import Version
from ckptstore.store import Store


def tracked(kind: str, folder: Path, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run the program; return its report."""
    program = Path(__file__).with_name("tracked_training.py")
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(program), kind, str(folder), url],
        input=json.dumps(options),  # W&B stores the arguments of the program
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.slow
def test_a_client_of_mlflow_is_no_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MLFlowLogger.experiment`` of Lightning is a client; the message says how to get the run."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(InvalidInputError, match=r"MlflowClient of mlflow is no run.*get_run"):
        track(store.run("gpt"), MlflowClient(f"file://{tmp_path}"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlflow", "wandb", "trackio"])
def test_versions_are_links_without_secrets(tmp_path: Path, s3_bucket: S3Bucket, kind: str) -> None:
    """Saves of all kinds arrive with digest, metrics, sizes, in order; no file has a credential."""
    options = {**s3_bucket.options(), "secret": "the-secret-of-the-store"}
    folder = tmp_path / "told"
    report = tracked(kind, folder, s3_bucket.url, options)
    versions = {one["step"]: one for one in report["versions"]}
    told = {int(one["step"]): one for one in report["told"]}

    assert sorted(told) == [1, 2, 3, 4]  # 1 by hand, 5 after the end
    for step, one in told.items():
        assert one["link"] == f"ckptstore+{s3_bucket.url}#{versions[step]['id']}"
        assert one["content"] == versions[step]["content"]
        assert int(one["logical_bytes"]) == 400_000
        assert int(one["stored_bytes"]) < 10_000
        assert "a" not in one  # the metadata is the user's own
    wanted: Any = [2.0, 2] if kind == "mlflow" else 2.0
    assert told[2]["metrics"]["val/loss"] == wanted
    for step, one in versions.items():
        about = one["metadata"].get("trackers", {}).get(kind, {})
        assert about.get("name", "") == ("first" if step in (2, 3, 4) else "")
        assert bool(about.get("run")) == (step in (2, 3, 4))
    assert versions[2]["metadata"]["a"] == 1
    if kind == "wandb":  # the others take what comes after the end of a run
        assert "was not logged in wandb: UsageError" in report["failure"]

    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "report.json"]
    assert files
    for file in files:
        assert b"the-secret-of-the-store" not in file.read_bytes(), file


@given(st.dictionaries(st.text("a_:@#é", min_size=1, max_size=3), st.floats(0, 1), max_size=9))
def test_mlflow_gets_each_metric_under_its_own_name(metrics: dict[str, float]) -> None:
    """Names that MLflow takes stay as they are; the others get names that no other has."""
    told = trackers._names_for_mlflow(metrics)
    assert sorted(told.values()) == sorted(metrics.values())
    assert all(told[name] == metrics[name] for name in metrics if not set(name) & set("@#"))
    assert not any(set(name) & set("@#") for name in told)


class Fake:
    """A tracker of a test."""

    def __init__(self, send: Callable[[Version, dict[str, Any]], object]) -> None:
        self.target = TrackerRun("fake", {"run": "r1"}, send)


def test_a_failing_tracker_does_not_fail_a_save(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Each version that is not logged is named, without the tracker's password, with what to do."""

    def fails(version: Version, _: dict[str, Any]) -> None:
        if version.step == 1:
            raise OSError("http://me:hidden@host/api is down")

    run = store.run("gpt")
    with caplog.at_level(logging.WARNING), Tracking(run, Fake(fails).target):
        first = run.save({"a": 1}, step=1)
        second = run.save_async({"a": 2}, step=2).result()
    (warning,) = caplog.messages
    assert f"#{first.id[:8]} was not logged in fake: OSError: http://host/api" in warning
    assert f"log_version(run, '#{first.id[:8]}', tracker)" in warning
    assert "hidden" not in warning
    assert second.metadata == {"trackers": {"fake": {"run": "r1"}}}
    assert "trackers" not in run.save({"a": 3}, step=3).metadata


def test_a_hanging_tracker_does_not_hang_a_save(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves go on; no more than a bound wait; closing gives up after its time, and says so."""
    ends = threading.Event()
    monkeypatch.setattr(trackers, "_WAITING_MAX", 3)
    run = store.run("gpt")
    tracking = Tracking(run, Fake(lambda *_: ends.wait(600)).target)
    try:
        with caplog.at_level(logging.WARNING):
            ids = [run.save({"a": step}, step=step).id[:8] for step in range(5)]
            assert [one for one in ids if f"#{one} was" in caplog.text] == ids[3:]
            tracking.close(timeout_s=0.01)
            tracking.close()
        named = [one for one in ids if f"#{one} was not logged in fake" in caplog.text]
        assert named == ids
    finally:
        ends.set()
        tracking._thread.join()


def test_a_store_that_is_closed_first(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """What waits is still logged: the versions are in memory."""
    seen: list[int] = []
    gate = threading.Event()

    def send(version: Version, _: dict[str, Any]) -> None:
        gate.wait(60)
        seen.append(version.step)

    run = store.run("gpt")
    with Tracking(run, Fake(send).target):
        run.save({"a": 1}, step=1)
        run.save({"a": 1}, step=2)
        store.close()
        gate.set()
    assert seen == [1, 2]
    assert not caplog.records


def test_only_rank_0_logs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other ranks there is no run of the tracker, and nothing is asked of it."""
    monkeypatch.setattr(trackers, "place", lambda: (1, 2))
    with track(store.run("gpt"), None):
        version = store.run("gpt").save({"a": 1}, step=1)
    assert not version.metadata


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("s3://bucket/a b", "ckptstore+s3://bucket/a%20b#"),
        ("s3://key:hidden@bucket/c?sig=hidden", "ckptstore+s3://bucket/c#"),
        ("https://me:hidden@host/c?sv=1&sig=hidden#hidden", "ckptstore+https://host/c#"),
        ("abfss://data@account.dfs.core.windows.net/c", None),
        ("/data/50%#1", "ckptstore+file:///data/50%25%231#"),
    ],
)
def test_links_have_no_secrets(store: Store, url: str, link: str | None) -> None:
    """User, password and query of a location go; spaces and signs are encoded, and come back."""
    version = store.run("gpt").save({"a": 1}, step=1)
    facts = trackers._facts(url, version)
    assert "hidden" not in json.dumps(facts)
    if link is not None:
        assert facts["link"] == link + version.id
    place, ref = parse_link(facts["link"])
    assert place == facts["store"].removeprefix("file://")
    assert ref == f"#{version.id}"


def test_a_link_leads_back(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two parts of a link are what ``ckptstore show`` takes; the tracker's run is shown."""
    links: list[str] = []
    run = store.run("gpt")
    with Tracking(run, Fake(lambda _, facts: links.append(facts["link"])).target):
        run.save({"a": 1}, step=7)
    place, ref = parse_link(links[0])
    assert command(["show", "--store", place, ref]) == 0
    shown = capsys.readouterr().out
    assert "gpt@7" in shown
    assert '"fake"' in shown


def test_what_is_no_tracker_and_no_link(store: Store) -> None:
    """Wrong arguments fail at once, with the way that works."""
    run = store.run("gpt")
    run.save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError, match="no run of a tracker"):
        track(run, ModuleType("tensorboard"))
    with pytest.raises(InvalidInputError, match=r"None is no run .* after it began a run"):
        track(run, None)
    with pytest.raises(InvalidInputError, match="a run of a store"):
        log_version(store, 1, None)  # type: ignore[arg-type]
    for text in ("s3://bucket/a#12", "ckptstore+s3://bucket/a", "ckptstore+s3://bucket/a#"):
        with pytest.raises(InvalidInputError, match="no link"):
            parse_link(text)


@pytest.mark.short("trackio")
@pytest.mark.parametrize("kind", ["mlflow", "wandb", "trackio"])
def test_a_tracker_without_a_run(store: Store, kind: str) -> None:
    """The module alone is not enough: its run is what versions belong to."""
    module = pytest.importorskip(kind)
    with pytest.raises(InvalidInputError, match=f"{kind} has no active run -- begin one before"):
        track(store.run("gpt"), module)
    assert not store._session.trackers


def test_an_error_of_the_tracker_is_a_typed_one(store: Store) -> None:
    """``log_version`` says that it did not work; the version is as before."""
    run = store.run("gpt")
    run.save({"a": 1}, step=1)

    def fails(*_: object) -> None:
        raise RuntimeError("no space")

    target = Fake(fails).target
    patched = {"builtins": lambda _: target}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "_TARGETS", patched)
        with pytest.raises(StorageError, match=r"gpt@1 .* was not logged in fake: RuntimeError"):
            log_version(run, 1, object())
