"""Requests per operation at 10, 100 and 1,000 versions, as docs/reference/requests.md tells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import S3Bucket
from faultkit.stores import memory_with, trusting
from faultproxy import Fault, FaultProxy, Kind
from gckit import delete
from metered import MeteredBackend
from shortening import is_short
from simulated_environment import SimulatedEnvironment

import ckptstore
from ckptstore.backends.base import Backend, ObjectInfo
from ckptstore.backends.memory import MemoryBackend
from ckptstore.backends.registry import open_backend
from ckptstore.cli.main import run as run_command
from ckptstore.config import Options
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

SIZES = (10, 100) if is_short() else (10, 100, 1000)
PAGE = 1000
PAGE_OF_DOCS = Path(__file__).parents[2] / "docs/reference/requests.md"
Objects = dict[str, bytes]
Work = Callable[[Store], object]


class _Pages(MeteredBackend):
    """Counts a listing by its pages, as an object store does."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Pass on; every thousand objects are a request."""
        for place, info in enumerate(super().list(prefix, after=after)):
            if place and place % PAGE == 0:
                self.around("list", prefix, lambda: None)
            yield info


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), float(step)), "frozen": torch.ones(300)}}


@pytest.fixture(scope="module")
def stores() -> dict[int, Objects]:
    """Return the objects of stores with so many versions, all in one history."""
    environment = SimulatedEnvironment()
    backend = MemoryBackend("requests", environment=environment)
    found: dict[int, Objects] = {}
    with Store(create_on(backend, environment=environment, prober=trusting)) as store:
        run = store.run("gpt", metrics={"loss": "min"})
        for step in range(max(SIZES)):
            run.save(_state(step), step=step, metrics={"loss": 1.0 / (1 + step)})
            if step + 1 in SIZES:
                found[step + 1] = {key: item.data for key, item in backend.objects.items()}
    return found


def _opened(backend: Backend) -> Store:
    options = Options(workers=2)
    environment = SimulatedEnvironment(9)
    return Store(open_on(backend, environment=environment, options=options, prober=trusting))


def _counted(backend: MemoryBackend, work: Work) -> int:
    """Return the requests of a process that opens the store and does some work."""
    meter = _Pages(backend)
    with _opened(meter) as store:
        work(store)
    calls = meter.snapshot()
    # A small pack is one PUT, when its writer commits.
    silent = ("open_writer", "writer.write")
    return sum(one.calls for name, one in calls.items() if name not in silent)


def _half(store: Store) -> list[str]:
    return [f"#{version.id}" for version in store.versions()][::2]


def _condemn_half(store: Store) -> None:
    delete(store, *(ref[1:] for ref in _half(store)))


def _policy(store: Store) -> object:
    return store.retain({"full": "last 5, every 2 steps, within 1h"})


OPERATIONS: dict[str, tuple[tuple[Work, ...], Work]] = {
    "open": ((), lambda store: None),
    "list the versions": ((), lambda store: store.versions()),
    "load the latest": ((), lambda store: store.load("gpt")),
    "save": ((), lambda store: store.run("gpt").save(_state(-1), step=5000)),
    "tag": ((), lambda store: store.tag("gpt", "good")),
    "fork": ((), lambda store: store.fork("gpt@5", "tuned")),
    "rm, half of the versions": ((), lambda store: store.remove(_half(store))),
    "retain, half of the versions": ((), _policy),
    "gc, the first": ((), lambda store: store.gc()),
    "gc, nothing to do": ((Store.gc,), lambda store: store.gc()),
    "gc --dry-run, nothing to do": ((Store.gc,), lambda store: store.gc(dry_run=True)),
    "gc, one new version": (
        (Store.gc, lambda store: store.run("gpt").save(_state(-1), step=5000)),
        lambda store: store.gc(),
    ),
    "gc that condemns half": ((Store.gc, _condemn_half), lambda store: store.gc(repack_below=None)),
    "gc that deletes this half": (
        (_condemn_half, lambda store: store.gc(repack_below=None)),
        lambda store: store.gc(grace_s=0, repack_below=None),
    ),
}
"""What other processes do before, and what is counted."""


def _measured(stores: dict[int, Objects], name: str) -> list[int]:
    before, work = OPERATIONS[name]
    counts = []
    for size in SIZES:
        backend = memory_with(stores[size])
        for one in before:
            with _opened(backend) as store:
                one(store)
        counts.append(_counted(backend, work))
    return counts


def _told() -> dict[str, list[int]]:
    """Return the rows of the page."""
    cells = r" \| ".join([r"([\d,]+)"] * 3)
    rows = re.findall(rf"^\| ([^|]+) \| {cells} \|", PAGE_OF_DOCS.read_text("utf-8"), re.MULTILINE)
    return {
        name: [int(count.replace(",", "")) for count in counts]
        for name, *counts in rows
        if name != "operation"
    }


def test_the_page_has_the_measured_operations() -> None:
    """No more, no less."""
    assert list(_told()) == list(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests(stores: dict[int, Objects], name: str) -> None:
    """The page tells the requests of each operation, for each number of versions."""
    assert _measured(stores, name) == _told()[name][: len(SIZES)]


@pytest.mark.parametrize(
    "name", ["open", "list the versions", "save", "rm, half of the versions", "gc, nothing to do"]
)
def test_a_server_gets_these_requests(
    stores: dict[int, Objects], s3_bucket: S3Bucket, s3_proxy: FaultProxy, name: str
) -> None:
    """HTTP requests to S3, counted between client and server."""
    before, work = OPERATIONS[name]
    memory = memory_with(stores[10])
    for one in before:
        with _opened(memory) as store:
            one(store)
    for key, item in memory.objects.items():
        s3_bucket.write(key, item.data)
    counter = Fault(kind=Kind.DELAY, times=0)
    s3_proxy.set(counter)
    url = f"http://127.0.0.1:{s3_proxy.port}"
    with _opened(open_backend(s3_bucket.url, **s3_bucket.options(url))) as store:
        work(store)
    uploads = 1 if name.startswith("gc") else 0  # that dead writers left, which only S3 has
    assert counter.seen == _told()[name][0] + uploads


def test_commands_read_the_log_as_often_for_many_refs(
    stores: dict[int, Objects], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and steps on a command line: two are found by as many listings as half of a store."""
    listings: list[str] = []

    def listing(self: MemoryBackend, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        listings.append(prefix)
        return plain(self, prefix, after=after)

    plain = MemoryBackend.list
    monkeypatch.setattr(MemoryBackend, "list", listing)
    counts = []
    for size in (2, 50):
        url = f"memory://commands-{size}"
        backend = open_backend(url)
        for key, data in stores[100].items():
            backend.put(key, data)
        with ckptstore.open(url, read_only=True) as store:
            ids = [version.id[:12] for version in store.versions()[1 : 1 + size : 2]]
        refs = [f"gpt@{step}" for step in range(2, 2 + size, 2)]
        for words in (["--dry-run", *ids, *refs], [*ids, *refs]):
            listings.clear()
            assert run_command(["rm", *words, "--store", url]) == 0, capsys.readouterr().err
            counts.append(len(listings))
    assert counts[:2] == counts[2:]
