"""Ray Train: a local cluster of two workers reports names of versions, and resumes from them."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rayworker
from buckets import S3Bucket
from ports import LOOPBACK
from rankkit.groups import run_ranks

import ckptstore
from ckptstore.errors import InvalidInputError, VersionNotFoundError
from ckptstore.integrations.ray_train import report, reported, version_in
from ckptstore.store import Store


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a cluster of one machine on loopback, with as little memory as Ray accepts."""
    import ray
    from ray._private import services

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray replaces the address of loopback by that of the host, and then listens on all.
    monkeypatch.setattr(services, "get_node_ip_address", lambda *_: LOOPBACK)
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the names of its sockets are limited
    ray.init(
        num_cpus=3, object_store_memory=100 * 1024 * 1024, include_dashboard=False,
        log_to_driver=False, _node_ip_address=LOOPBACK, _temp_dir=folder,
    )  # fmt: skip
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of Ray, about its own options
@pytest.mark.usefixtures("_cluster")
def test_a_killed_worker_resumes_from_the_reported_version(
    tmp_path: Path, s3_bucket: S3Bucket
) -> None:
    """Ray starts the workers again after a kill -9 in a save; losses and weights are the same."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    ckptstore.open(tmp_path / "ckpts", create=True).close()
    whole = run_ranks(rayworker.alone, 2, str(tmp_path / "ckpts"))

    options, out, dies = s3_bucket.options(), tmp_path / "out", tmp_path / "dies"
    ckptstore.open(s3_bucket.url, create=True, **options).close()
    dies.touch()
    config = {"store": s3_bucket.url, "options": options, "dies": str(dies), "out": str(out)}
    result = TorchTrainer(
        rayworker.train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    assert not dies.exists()
    resumed = [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)]
    began = resumed[0]["began"]
    assert began in (5, 10)  # Ray may not have noted the report of 10 when the worker died
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine["began"] == began
        assert mine["losses"] == dict(list(theirs["losses"].items())[began:])
        assert mine["weights"] == theirs["weights"]

    named = version_in(result.checkpoint)
    assert (named.store, named.run, named.step) == (s3_bucket.url, "gpt", 20)
    files = [file for file in (tmp_path / "ray").rglob("checkpoint_*/**/*") if file.is_file()]
    assert len(files) >= 4
    assert all(file.stat().st_size < 500 for file in files)
    with ckptstore.open(s3_bucket.url, **options) as store:
        steps = [version.step for version in store.versions("gpt")]
        assert steps == [5, 10, *range(began + 5, 25, 5)]
        assert store.resolve(named.ref).id == named.version


def _reports(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """Put a worker without a cluster in the place of Ray's; return what it reports."""
    import ray.train

    told: list[dict[str, Any]] = []

    def take(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        told.append(metrics)
        if checkpoint is not None:
            shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)

    def give() -> Any:
        return ray.train.Checkpoint.from_directory(folder) if folder.exists() else None

    monkeypatch.setattr(ray.train, "report", take)
    monkeypatch.setattr(ray.train, "get_checkpoint", give)
    return told


@pytest.mark.slow  # importing Ray takes seconds
def test_a_report_names_a_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version comes back by its id, also when newer ones were saved; metrics go as they are."""
    told = _reports(monkeypatch, tmp_path / "persisted")
    run = store.run("gpt")
    assert reported(run) is None
    report(run, None, {"loss": 3.0})
    assert reported(run) is None
    version = run.save({"w": [1.0]}, step=1)
    report(run, version, {"loss": 2.0})
    run.save({"w": [2.0]}, step=2)
    assert reported(run) == version
    assert told == [{"loss": 3.0}, {"loss": 2.0}]


@pytest.mark.slow
def test_what_cannot_be_resumed_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted version, another store, a checkpoint of something else: an error says which."""
    from ray.train import Checkpoint

    _reports(monkeypatch, tmp_path / "persisted")
    run = store.run("gpt")
    version = run.save({"w": [1.0]}, step=1)
    report(run, version, {})
    run.save({"w": [2.0]}, step=2)
    with ckptstore.open(tmp_path / "other", create=True) as other:
        with pytest.raises(VersionNotFoundError, match=f"gpt@1 .* of {store.repo.url}, and"):
            reported(other.run("gpt"))
        store.replicate(to=str(tmp_path / "other"))
        assert reported(other.run("gpt")).step == 1  # type: ignore[union-attr]
    store.remove(["gpt@1"])
    with pytest.raises(VersionNotFoundError, match="has no such version") as gone:
        reported(run)
    assert "undelete" in (gone.value.hint or "")
    for metadata in ({}, {"ckptstore": {"store": 1}}):
        checkpoint = Checkpoint.from_directory(tmp_path / "persisted")
        checkpoint.set_metadata(metadata)
        with pytest.raises(InvalidInputError, match="names no version of a store"):
            reported(run)
    with pytest.raises(InvalidInputError, match="a run of a store is needed"):
        report("gpt", None, {})  # type: ignore[arg-type]
