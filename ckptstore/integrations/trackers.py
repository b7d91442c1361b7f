"""MLflow, W&B and Trackio: each version is logged as a link; see docs/howto/trackers.md.

::

    with track(run, wandb.init(project="gpt")):
        run.save(state, step=step, metrics={"val_loss": loss})  # as always

The tracker gets the link, the digests, the metrics and the sizes of a version, and no tensors. The
version gets the id of the tracker's run, in its metadata. Credentials of the store are not sent.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import queue
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from ckptstore.backends.fsspec_backend import without_credentials
from ckptstore.backends.transfers import start_thread
from ckptstore.errors import InvalidInputError, StorageError, VersionNotFoundError
from ckptstore.events import SaveEvent
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.ranks import place
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import Version, naming
from ckptstore.store import Run

__all__ = ["Tracking", "log_version", "parse_link", "track"]

_log = logging.getLogger("ckptstore")

# Versions that wait to be logged. Source: at a save a minute, a tracker that was down for half a
# day; 33 bytes each.
_WAITING_MAX: Final = 1000
# Seconds that the end of a training waits for a tracker. Source: mlflow gives up a request after
# two minutes; a job that is preempted has less left.
_CLOSE_S: Final = 60.0
_USER: Final = re.compile(r"//[^/@\s]+@")
_HINT: Final = "the version is safe; when the tracker works again: log_version(run, {!r}, tracker)"


def track(run: Run, tracker: Any) -> Tracking:  # a module or a run of three libraries
    """Log each version of a run from now on, whichever loop, callback or writer saves it.

    Parameters
    ----------
    run
        Saves of this store object to the run are logged, in the order in which they become
        durable.
    tracker
        The module ``mlflow``, ``wandb`` or ``trackio``, for its active run; or that run itself. On
        ranks other than 0 nothing is logged, and it may be anything.

    Returns
    -------
    Tracking
        To be closed before the tracker's run is finished; a context manager.

    Raises
    ------
    InvalidInputError
        It is no tracker that is supported, or has no active run; or `run` is no run of a store.
    """
    check_run(run)
    return Tracking(run, find_target(tracker) if place()[0] == 0 else None)


def log_version(run: Run, ref: str | int, tracker: Any) -> str:  # as track
    """Log one version now, such as the best at the end of a training; return the link.

    Raises
    ------
    InvalidInputError
        As :func:`track`.
    RunNotFoundError, VersionNotFoundError
        The ref names nothing.
    StorageError
        The tracker failed.
    """
    check_run(run)
    version, target = run.resolve(ref), find_target(tracker)
    try:
        return _send(run, version, target)
    except Exception as error:
        msg = f"{version.label} was not logged in {target.kind}: {_text(error)}"
        raise StorageError(msg, hint=_HINT.format(f"#{version.id[:8]}")) from error


def parse_link(link: str) -> tuple[str, str]:
    """Return the location of a link's store, for :func:`ckptstore.open`, and the version's ref.

    Raises
    ------
    InvalidInputError
        The text is no link of a version.
    """
    url, mark, one = link.removeprefix(SCHEME).rpartition("#")
    if not (link.startswith(SCHEME) and mark and one):
        msg = f"{link[:200]!r} is no link of a version"
        raise InvalidInputError(msg, hint=f"such as {SCHEME}s3://bucket/ckpts#3fa9c1")
    return unquote(url).removeprefix("file://"), f"#{one}"


class Tracking:
    """Logs versions in a thread of its own: a tracker that fails or hangs does not touch a save.

    Each version that is not logged is named in a warning. Made by :func:`track`.
    """

    def __init__(self, run: Run, target: TrackerRun | None) -> None:
        self._run = run
        self._target = target
        self._open = target is not None
        self._queue = queue.SimpleQueue[str | None]()
        self._waiting: dict[str, None] = {}
        if target is None:
            return
        self._thread = start_thread(lambda: self._work(target), f"ckptstore-{target.kind}")
        run._session.trackers[run.name, target.kind] = dict(target.about)
        self._end = run._session.events.observe(self._hear)
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; after Ctrl-C nothing is waited for."""
        self.close(_CLOSE_S if kind is None or issubclass(kind, Exception) else 0.0)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait until all durable versions are logged, at most this long; then log no more."""
        if not self._open or self._target is None:
            return
        self._open = False
        self._end()
        atexit.unregister(self.close)
        self._run._session.trackers.pop((self._run.name, self._target.kind), None)
        self._queue.put(None)
        self._thread.join(timeout_s)
        late = list(self._waiting)
        self._waiting.clear()
        for one in late:
            self._warn(one, "it did not answer in time")

    def _hear(self, event: SaveEvent) -> None:
        """Take a version on; returns at once."""
        if event.kind != "durable" or event.run != self._run.name:
            return
        if len(self._waiting) >= _WAITING_MAX:
            self._warn(event.version, f"{len(self._waiting)} others wait already")
            return
        self._waiting[event.version] = None
        self._queue.put(event.version)

    def _work(self, target: TrackerRun) -> None:
        while (one := self._queue.get()) is not None:
            if one not in self._waiting:  # given up
                continue
            try:
                _send(self._run, self._version(one), target)
            except Exception as error:  # noqa: BLE001 - of any library; it must not end the thread
                self._warn(one, _text(error))
            self._waiting.pop(one, None)

    def _version(self, one: str) -> Version:
        repo = self._run._session.repo
        try:
            return repo.catalog.version(one)
        except VersionNotFoundError:  # another process has committed it
            return repo.refresh().version(one)

    def _warn(self, one: str, why: str) -> None:
        kind, name = self._target.kind if self._target else "", f"#{one[:8]}"
        _log.warning("%s was not logged in %s: %s -- %s", name, kind, why, _HINT.format(name))


def _text(error: Exception) -> str:
    """Return an error without the user and password of a tracker's location."""
    return _USER.sub("//", f"{type(error).__name__}: {error}")


def _send(run: Run, version: Version, target: TrackerRun) -> str:
    facts = _facts(run._session.repo.url, version)
    target.send(version, facts)
    return str(facts["link"])


def _facts(url: str, version: Version) -> dict[str, Any]:
    """Return what trackers are told of a version: never its metadata, which is the user's own."""
    public = without_credentials(url) if "://" in url else f"file://{Path(url).absolute()}"
    sizes = sum_roles(version.roles.values())
    return {
        "link": f"{SCHEME}{quote(public, safe='/:@,=+&;!()[]$*~')}#{version.id}",
        "store": public,
        **naming(version),
        "content": version.content,
        "manifest": version.manifest_digest,
        "logical_bytes": sizes.logical,
        "stored_bytes": sizes.stored,
    }


SCHEME: Final = "ckptstore+"
"""Beginning of links of versions."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")
_NOT_IN_METRICS: Final = re.compile(r"[^\w./ :-]")
"""Of MLflow."""


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


def _names_for_mlflow(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under names that MLflow takes, no two under the same."""
    told = {name: x for name, x in metrics.items() if not _NOT_IN_METRICS.search(name)}
    for name in sorted(metrics.keys() - told.keys()):
        clean = _NOT_IN_METRICS.sub("_", name)
        while clean in told:
            clean += "_"
        told[clean] = metrics[name]
    return told


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
        metrics = _names_for_mlflow(version.metrics)
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
        entry = ArtifactManifestEntry(path="version", ref=facts["link"], **words)
        artifact.manifest.add_entry(entry)
        run.log_artifact(artifact, aliases=["latest", f"step-{version.step}"])

    return TrackerRun("wandb", about, send)


def _trackio(given: Any) -> TrackerRun:  # a Run
    """Return a run of Trackio: versions are those of an artifact that refers to the store."""
    import trackio

    run = _need(given or trackio.context_vars.current_run.get(), "trackio", "trackio.init(...)")
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
