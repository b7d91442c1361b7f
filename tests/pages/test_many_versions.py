"""A store of 10,000 versions: few requests, small documents, and nothing that happened is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from longruns import add_versions
from metered import MeteredBackend

import ckptstore
from ckptstore.backends.memory import MemoryBackend
from ckptstore.config import Options
from ckptstore.pages.report_file import report
from ckptstore.pages.site import page
from ckptstore.repo import create_on, open_on
from ckptstore.store import Store

pytestmark = pytest.mark.slow
VERSIONS = 10_000
SIZES_MAX = {"run": 400_000, "lineage": 10_000, "storage": 10_000, "health": 10_000}
"""Bytes of documents."""


@pytest.fixture(scope="module")
def long() -> MemoryBackend:
    """Return a store whose one run has 10,000 versions, with a tag in the middle."""
    backend = MemoryBackend("page-many")
    with Store(create_on(backend)) as store:
        add_versions(store, "long", VERSIONS)
        store.tag("long@12340", "middle")
        store.set_policy({"full": ["last 3", "tagged"]})
    return backend


@pytest.fixture
def metered(long: MemoryBackend) -> MeteredBackend:
    """Return its backend, which counts requests."""
    return MeteredBackend(long)


@pytest.fixture
def store(metered: MeteredBackend) -> Iterator[ckptstore.Store]:
    """Open it to read."""
    with Store(open_on(metered, options=Options(read_only=True))) as opened:
        yield opened


def _ask(store: ckptstore.Store, name: str, **query: str) -> tuple[dict[str, Any], int]:
    answer = page(store, f"/page/{name}.json", query)
    assert answer is not None
    assert answer.status == 200, answer.body
    return json.loads(answer.body), len(answer.body)


def test_the_page_opens_with_few_requests(store: ckptstore.Store, metered: MeteredBackend) -> None:
    """Opening reads the catalog; each further document asks only for new commits."""
    _ask(store, "overview")
    before = sum(meter.calls for meter in metered.snapshot().values())
    assert before < 60
    for name in ("run", "lineage", "storage"):
        _, size = _ask(store, name, run="long")
        assert size < SIZES_MAX[name], name
    after = sum(meter.calls for meter in metered.snapshot().values())
    assert after - before <= 6
    _, size = _ask(store, "health")
    assert size < SIZES_MAX["health"]


def test_a_long_curve_keeps_what_happened(store: ckptstore.Store) -> None:
    """First, last, best, tagged and the peak are drawn; each point knows an ancestor drawn."""
    found, _ = _ask(store, "run", run="long")
    columns = found["columns"]
    assert found["versions_count"] == VERSIONS
    assert len(columns["id"]) <= 2000
    assert {0, 12_340, 10 * (VERSIONS // 3), 10 * (VERSIONS - 1)} <= set(columns["step"])
    assert max(found["values"]["val_loss"]) == 9.0
    assert columns["above"] == list(range(-1, len(columns["id"]) - 1))
    assert columns["step"] == sorted(columns["step"])
    closer, _ = _ask(store, "run", run="long", low="50000", high="60000")
    assert closer["columns"]["step"] == list(range(50_000, 60_001, 10))


def test_the_report_stays_small(store: ckptstore.Store) -> None:
    """Far below what a mail takes."""
    assert len(report(store)) < 1_000_000
