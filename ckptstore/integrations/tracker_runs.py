"""Runs of MLflow, W&B and Trackio, as what versions are logged to."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ckptstore.backends.fsspec_backend import without_credentials
from ckptstore.errors import InvalidInputError
from ckptstore.model import Version

SCHEME: Final = "ckptstore+"
"""Beginning of links of versions."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")
_NOT_IN_METRICS: Final = re.compile(r"[^A-Za-z0-9_./ -]")


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """A run of a tracker."""

    kind: str
    about: Mapping[str, str]
    """Names and ids that lead to it, for the metadata of versions."""
    send: Callable[[Version, dict[str, Any]], object]
    """Logs a version, with facts about it."""


def find_target(tracker: Any) -> TrackerRun:  # a module or a run of three libraries
    """Return a run of a tracker, or the active run of its module.

    Raises
    ------
    InvalidInputError
        It is none of a tracker that is supported, or there is no active run.
    """
    module = isinstance(tracker, ModuleType)
    kind = (tracker.__name__ if module else type(tracker).__module__).partition(".")[0]
    if kind not in _TARGETS:
        msg = f"{tracker!r:.80} is no run of a tracker that is supported"
        raise InvalidInputError(msg, hint="give mlflow, wandb or trackio, after it began a run")
    return _TARGETS[kind](None if module else tracker)


def _artifact(library: Any, version: Version, facts: Mapping[str, Any]) -> Any:
    """Return an artifact of a library that describes a version; JSON has no numbers for nan."""
    name = "ckptstore-" + _NOT_IN_NAMES.sub("-", version.run)
    metrics = {name: x if math.isfinite(x) else str(x) for name, x in version.metrics.items()}
    return library.Artifact(name=name, type="model", metadata={**facts, "metrics": metrics})


def _need(active: Any, kind: str, begin: str) -> Any:  # of the libraries
    if active is None:
        raise InvalidInputError(f"{kind} has no active run", hint=f"begin one before: {begin}")
    return active


def _mlflow(given: Any) -> TrackerRun:  # an ActiveRun
    """Return a run of MLflow: versions are its external models, with metrics at their steps."""
    import mlflow

    active = _need(given or mlflow.active_run(), "mlflow", "mlflow.start_run()")
    if (info := getattr(active, "info", None)) is None:
        msg = f"a {type(active).__name__} of mlflow is no run"
        raise InvalidInputError(msg, hint="of Lightning: logger.experiment.get_run(logger.run_id)")
    about = {
        "run": info.run_id,
        "name": info.run_name,
        "experiment": info.experiment_id,
        "at": without_credentials(mlflow.get_tracking_uri()),
    }

    def send(version: Version, facts: dict[str, Any]) -> None:
        """Log an external model, and the metrics at its step."""
        model = mlflow.create_external_model(
            name=_NOT_IN_NAMES.sub("-", f"{version.run}-{version.step}"),
            source_run_id=info.run_id,
            experiment_id=info.experiment_id,
            model_type="ckptstore",
            params={name: str(value) for name, value in facts.items()},
        )
        sizes = {f"ckptstore/{name}": facts[name] for name in ("logical_bytes", "stored_bytes")}
        metrics = {_NOT_IN_METRICS.sub("_", name): x for name, x in version.metrics.items()}
        words = {"run_id": info.run_id, "model_id": model.model_id, "synchronous": True}
        mlflow.log_metrics({**metrics, **sizes}, step=version.step, **words)

    return TrackerRun("mlflow", about, send)


def _wandb(given: Any) -> TrackerRun:  # a Run
    """Return a run of W&B: versions are those of an artifact that refers to the store."""
    import wandb
    from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

    run = _need(given or wandb.run, "wandb", "wandb.init(...)")
    found = {"run": run.id, "name": run.name, "project": run.project, "entity": run.entity}
    about = {name: str(value) for name, value in found.items() if value}
    if run.url:  # a mode that is online
        about["at"] = without_credentials(run.url)

    def send(version: Version, facts: dict[str, Any]) -> None:
        """Log a version of the artifact."""
        artifact = _artifact(wandb, version, facts)
        # add_reference() would print a warning for each version, and know neither digest nor size.
        words = {"digest": version.manifest_digest, "size": facts["logical_bytes"]}
        artifact.manifest.add_entry(
            ArtifactManifestEntry(path="version", ref=facts["link"], **words)
        )
        run.log_artifact(artifact, aliases=["latest", f"step-{version.step}"])

    return TrackerRun("wandb", about, send)


def _trackio(given: Any) -> TrackerRun:  # a Run
    """Return a run of Trackio: versions are those of an artifact that refers to the store."""
    import trackio

    active = given or trackio.context_vars.current_run.get()
    run = _need(active, "trackio", "trackio.init(...)")
    about = {"run": run.id, "name": run.name, "project": run.project}

    def send(version: Version, facts: dict[str, Any]) -> None:
        """Log a version of the artifact."""
        _accept_links()
        artifact = _artifact(trackio, version, facts)
        artifact.add_reference(facts["link"], name="version", checksum=False)
        run.log_artifact(artifact, aliases=[f"step-{version.step}"])

    return TrackerRun("trackio", about, send)


@functools.cache
def _accept_links() -> None:
    """Make Trackio take links as references, which it does for schemes with a handler only."""
    from trackio import ReferenceHandler, ResolvedReference, register_reference_handler

    class Links(ReferenceHandler):  # type: ignore[misc]  # not followed by mypy
        def matches(self, scheme: str, uri: str) -> bool:
            return scheme.startswith(SCHEME)

        def resolve(self, uri: str, checksum: bool, max_objects: int) -> list[Any]:
            return [ResolvedReference(None, uri)]

        def fetch(self, uri: str, dest: Path) -> None:
            raise InvalidInputError(f"{uri} is a version, not a file", hint=self.hint())

        def hint(self) -> str:
            return "url, ref = parse_link(link); ckptstore.open(url).load(ref)"

    register_reference_handler(Links())


_TARGETS: Final = {"mlflow": _mlflow, "wandb": _wandb, "trackio": _trackio}
