"""Failures between client and object storage, in the threads that write: provoked live.

A real S3 server (moto) behind a proxy that answers 500, or cuts every connection. All tools have
the same server and the same proxy; ``torch.distributed.checkpoint`` writes through fsspec and s3fs,
as it does for any ``s3://`` path.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.disk import Workspace
from benchmarks.measure import FAILURES, say
from benchmarks.outcomes import Row, row_of_saves, threads_may_die
from benchmarks.peers import empty_like
from benchmarks.states import State, same
from ckptstore.backends.registry import open_backend
from ckptstore.config import Options
from ckptstore.integrations.dcp import CkptStoreWriter
from ckptstore.repo import create_on
from ckptstore.store import Run, Store

__all__ = ["failures_over_http"]

_RUN = "bench"
_THREADS = 4
_ONE_FILE = {
    "DCP": {"path": "__0_2.distcp", "times": 0},  # s3fs asks several times
    "ckptstore": {"path": "/packs/", "times": 0},
}
_EVERYTHING = {"DCP": {"times": 0}, "ckptstore": {"times": 0}}
"""Requests to hit, by tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A new bucket behind a proxy."""

    bucket: Any
    proxy: Any
    fault: Any
    """Fault of the proxy from :meth:`break_down` on."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of s3fs, the same for every tool; botocore tries once, which is quick."""
        told: dict[str, Any] = self.bucket.options(f"http://127.0.0.1:{self.proxy.port}")
        return {**told, "config_kwargs": {"retries": {"max_attempts": 0}}}

    def break_down(self) -> None:
        """Begin to fail requests."""
        self.proxy.set(self.fault)

    def mend(self) -> None:
        """Stop failing requests."""
        self.proxy.set()

    def url(self, name: str) -> str:
        """Return a location in the bucket."""
        return f"{self.bucket.url}/{name}"


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to save."""

    tool: str
    save: Callable[[_Place], str]


def failures_over_http(space: Workspace, *, tries: int) -> list[Row]:
    """Provoke all failures; return the rows. Without moto (of the test group) there are none.

    Parameters
    ----------
    tries
        Saves a row, since some outcomes depend on which thread is hit.
    """
    if importlib.util.find_spec("moto") is None:
        say("failures over HTTP: left out, since moto is not installed")
        return []
    from buckets import S3Bucket
    from faultproxy import Fault, FaultProxy, Kind
    from local_servers import start_moto

    broken = {"kind": Kind.STATUS, "status": 500, "code": "InternalError"}
    cut = {"kind": Kind.RESET}
    faults: list[tuple[str, dict[str, Any], Mapping[str, Mapping[str, Any]]]] = [
        ("HTTP 500 to a file with data, of several", broken, _ONE_FILE),
        ("connection cut at a file with data, of several", cut, _ONE_FILE),
        ("server dead: every connection is cut", cut, _EVERYTHING),
    ]
    rows: list[Row] = []
    server = start_moto(space.fresh())
    try:
        with FaultProxy(server.port) as proxy, threads_may_die():
            for name, words, where in faults:
                for way in _WAYS:
                    hit = {**words, **where[way.tool.split()[0]]}
                    outcomes: Counter[str] = Counter()
                    for _ in range(tries):
                        with S3Bucket(server.url) as bucket:
                            place = _Place(bucket=bucket, proxy=proxy, fault=Fault(**hit))
                            outcomes[way.save(place)] += 1
                    rows.append(row_of_saves(name, way.tool, outcomes))
                say(f"failures: {name}")
    finally:
        server.stop()
    return rows


def _state() -> State:
    generator = torch.Generator().manual_seed(1)
    return {"model": {f"w{n}": torch.randn(1 << 14, generator=generator) for n in range(8)}}


# --- torch.distributed.checkpoint ---------------------------------------------------------------


def _dcp_save(state: State, writer: FsspecWriter) -> None:
    dcp_save(state, storage_writer=writer, no_dist=True)


def _dcp_async(state: State, writer: FsspecWriter) -> None:
    future = dcp_async_save(state, storage_writer=writer, no_dist=True)
    assert not isinstance(future, AsyncSaveResponse)  # noqa: S101 - the default stager's answer
    future.result()


def _dcp(place: _Place, save: Callable[[State, FsspecWriter], None]) -> str:
    state, url = _state(), place.url(f"dcp-{uuid.uuid4().hex[:8]}")
    # Without an fsync, which applies to files: DCP would sync this machine's disks instead.
    writer = FsspecWriter(url, thread_count=_THREADS, sync_files=False, **place.options)
    place.break_down()
    try:
        save(state, writer)
    except FAILURES:
        return "raised"
    finally:
        place.mend()
    target = empty_like(state)
    try:
        dcp_load(target, storage_reader=FsspecReader(url, **place.options), no_dist=True)
    except FAILURES:
        return "returned success, cannot be loaded"
    return f"returned success, {'loads' if same(state, target) else 'loads wrong'}"


# --- ckptstore ----------------------------------------------------------------------------------


def _store_save(run: Run, state: State) -> None:
    run.save(state, step=1)


def _store_async(run: Run, state: State) -> None:
    run.save_async(state, step=1).result()


def _store_dcp(run: Run, state: State) -> None:
    dcp_save(state, storage_writer=CkptStoreWriter(run, step=1), no_dist=True)


def _store(place: _Place, save: Callable[[Run, State], None], engine: str = "thread") -> str:
    """Save without the store's own retries, which would only delay the outcome by a minute."""
    backend = open_backend(place.url(_RUN), retry=False, **place.options)
    with Store(create_on(backend, options=Options(engine=engine, workers=_THREADS))) as store:
        run = store.run(_RUN)
        run.save({"step": 0}, step=0)
        place.break_down()
        try:
            save(run, _state())
        except FAILURES:
            place.mend()
            return "raised" if len(run.versions()) == 1 else "raised, but a version appeared"
        finally:
            place.mend()
        loads = same(_state(), run.load())
    return "returned success, loads" if loads else "returned success, loads wrong"


_WAYS = (
    _Way(f"DCP save, {_THREADS} threads", lambda place: _dcp(place, _dcp_save)),
    _Way(f"DCP async_save, {_THREADS} threads", lambda place: _dcp(place, _dcp_async)),
    _Way("ckptstore save", lambda place: _store(place, _store_save)),
    _Way("ckptstore save_async, thread", lambda place: _store(place, _store_async)),
    _Way("ckptstore save_async, process", lambda place: _store(place, _store_async, "process")),
    _Way("ckptstore behind dcp.save", lambda place: _store(place, _store_dcp)),
)
