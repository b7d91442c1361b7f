"""A training whose versions a tracker logs, offline: tracked_training.py KIND FOLDER URL.

The options of the store come in as JSON. It writes what the tracker gives back of each version, and
what the versions have of the tracker.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def begin(kind: str, folder: Path) -> tuple[Any, Any]:
    """Begin a run of a tracker whose files are in a folder; return the module and the run."""
    os.environ.update(
        TRACKIO_DIR=str(folder), HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_DIR=str(folder),
        WANDB_CACHE_DIR=str(folder), WANDB_DATA_DIR=str(folder), WANDB_SILENT="true",
        MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="1",
    )  # fmt: skip
    if kind == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"file://{folder}/mlruns")
        return mlflow, mlflow.start_run(run_name="first")
    if kind == "wandb":
        import wandb

        return wandb, wandb.init(project="gpt", name="first")
    import trackio

    return trackio, trackio.init(project="gpt", name="first", auto_log_cpu=False)


def told(kind: str, run: Any, folder: Path) -> list[dict[str, Any]]:
    """Return what a tracker has of each version, oldest first; as text what has no form."""
    found: list[dict[str, Any]] = []
    if kind == "mlflow":
        from mlflow import MlflowClient

        for model in MlflowClient().search_logged_models([run.info.experiment_id]):
            assert model.source_run_id == run.info.run_id
            metrics = {one.key: (one.value, one.step) for one in model.metrics or []}
            found.append({**model.params, "metrics": metrics})
    elif kind == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        for number in range(10):
            record = SQLiteStorage.get_artifact_manifest("gpt", "ckptstore-gpt", f"v{number}")
            if record is not None:
                found.append({**record["metadata"], "link": record["manifest"][0]["ref"]})
    else:
        (file,) = folder.rglob("*.wandb")
        text = file.read_bytes().decode("latin-1")
        for one in re.findall(r'\{[^{}]*"link"[^{}]*(?:\{[^{}]*\})?[^{}]*\}', text):
            found.append(json.loads(one))
            assert text.count(found[-1]["link"]) > 1  # the reference too
    return sorted(found, key=lambda one: int(one["step"]))


def main(kind: str, folder: Path, url: str, options: dict[str, Any]) -> None:
    """Save in every way, with one line for the tracker; log a version later; fail."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    import ckptstore
    from ckptstore.errors import StorageError
    from ckptstore.integrations.dcp import CkptStoreWriter
    from ckptstore.integrations.trackers import log_version, parse_link, track

    warnings.simplefilter("ignore")
    state = {"w": torch.zeros(100_000)}
    with ckptstore.open(url, create=True, **options) as store:
        gpt = store.run("gpt", metrics={"val/loss": "min"})
        gpt.save(state, step=1, metrics={"val/loss": 4.0})
        module, run = begin(kind, folder)
        with track(gpt, module), track(store.run("other"), run):
            gpt.save(state, step=2, metrics={"val/loss": 2.0, "bad": math.nan}, metadata={"a": 1})
            gpt.save_async(state, step=3, metrics={"val/loss": 3.0}).result()
            save(state, storage_writer=CkptStoreWriter(gpt, step=4))
        gpt.save(state, step=5)
        logged = log_version(gpt, 1, run)
        place, ref = parse_link(logged)
        with ckptstore.open(place, read_only=True, **options) as again:
            assert torch.equal(again.load(ref)["w"], state["w"])
            assert again.resolve(ref).step == 1
        ends = module.end_run if kind == "mlflow" else module.finish
        ends()
        failure = ""
        if kind == "wandb":
            try:
                log_version(gpt, 2, run)
            except StorageError as error:
                failure = str(error)
        versions = [
            {"step": one.step, "id": one.id, "content": one.content, "metadata": one.metadata}
            for one in gpt.versions()
        ]
    report = {"told": told(kind, run, folder), "versions": versions, "failure": failure}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.stdin.read()))
