"""MLflow, W&B and Trackio: each version is logged as a link; see docs/howto/trackers.md.

::

    with track(run, wandb.init(project="gpt")):
        run.save(state, step=step, metrics={"val_loss": loss})  # as always

The tracker gets the link, the digests, the metrics and the sizes of a version, and no tensors. The
version gets the id of the tracker's run, in its metadata. Credentials of the store are not sent.
"""

from __future__ import annotations

import atexit
import logging
import queue
import re
import threading
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from ckptstore.backends.fsspec_backend import without_credentials
from ckptstore.errors import InvalidInputError, StorageError, VersionNotFoundError
from ckptstore.events import SaveEvent
from ckptstore.integrations.arguments import check_run
from ckptstore.integrations.ranks import place
from ckptstore.integrations.tracker_runs import SCHEME, TrackerRun, find_target
from ckptstore.maintenance.reports.usage import sum_roles
from ckptstore.model import Version
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
        run._session.trackers[run.name, target.kind] = dict(target.about)
        name = f"ckptstore-{target.kind}"
        self._thread = threading.Thread(target=self._work, args=(target,), name=name, daemon=True)
        self._thread.start()
        self._end = run._session.events.observe(self._hear)
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; after Ctrl-C nothing is waited for."""
        ends = kind is not None and not issubclass(kind, Exception)
        self.close(0.0 if ends else _CLOSE_S)

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
        hint = _HINT.format(name)
        _log.warning("%s was not logged in %s: %s -- %s", name, kind, why, hint)


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
        "run": version.run,
        "step": version.step,
        "version": version.id,
        "content": version.content,
        "manifest": version.manifest_digest,
        "logical_bytes": sizes.logical,
        "stored_bytes": sizes.stored,
    }
