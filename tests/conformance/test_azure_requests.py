"""A store on Azure takes as many requests as one on S3; a long log takes one listing more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from buckets import AzureBucket, S3Bucket
from faultproxy import Fault, FaultProxy, Kind

import ckptstore
from ckptstore import limits

_STATE = {"w": torch.arange(100_000.0)}


class Counted:
    """A store behind a proxy; each step tells its requests by method."""

    def __init__(self, bucket: S3Bucket | AzureBucket, proxy: FaultProxy) -> None:
        options = bucket.options(f"http://127.0.0.1:{proxy.port}")
        methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        faults = [Fault(kind=Kind.DELAY, method=method, times=0) for method in methods]
        self._faults = dict(zip(methods, faults, strict=True))
        proxy.set(*faults)
        self._proxy = proxy
        self._opening = {"location": bucket.url, **options}
        self.steps: dict[str, dict[str, int]] = {}

    def open(self, **more: Any) -> ckptstore.Store:  # noqa: ANN401 - options
        """Open the store."""
        words = {**self._opening, **more}
        return ckptstore.open(words.pop("location"), codec="raw", **words)

    def note(self, step: str) -> None:
        """Keep the requests since the last note."""
        self.steps[step] = {name: f.seen for name, f in self._faults.items() if f.seen}
        for fault in self._faults.values():
            fault.seen = 0

    def total(self, step: str) -> int:
        """Return the requests of a step."""
        return Counter(self.steps[step]).total()


def _life(place: Counted) -> dict[str, dict[str, int]]:
    with place.open(create=True):
        place.note("create")
    with place.open() as store:
        place.note("open")
        run = store.run("r")
        run.save(_STATE, step=1)
        place.note("first save")
        run.save({"w": _STATE["w"] + 1}, step=2)
        place.note("next save")
        run.save({"w": _STATE["w"] + 1}, step=3)
        place.note("unchanged")
        run.load("latest")
        place.note("load")
        store.version("r@1")["w"][:10]
        place.note("a slice")
    with place.open() as store:
        store.versions()
        place.note("open and list")
        assert store.verify().ok
        place.note("verify")
        store.gc()
        place.note("gc")
    return place.steps


@pytest.mark.slow
def test_as_many_requests_as_on_s3(
    s3_bucket: S3Bucket, s3_proxy: FaultProxy, azure_bucket: AzureBucket, azure_proxy: FaultProxy
) -> None:
    """Step by step, and method by method but for creating a store, where threads race.

    A collection on S3 asks for uploads that dead writers left; Azure drops such by itself.
    """
    theirs = _life(Counted(s3_bucket, s3_proxy))
    ours = _life(Counted(azure_bucket, azure_proxy))
    created = [Counter(steps.pop("create")).total() for steps in (theirs, ours)]
    assert abs(created[0] - created[1]) <= 5
    ours["gc"]["GET"] += 1
    assert ours == theirs


@pytest.mark.slow
def test_a_long_log_takes_one_listing_more(
    azure_bucket: AzureBucket, azure_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure lists from the first name: beyond a page, the last folder and its successor are listed.

    Pages of 6 names here, and 4 commits in a folder. A save lists twice, whatever the length of the
    log; the first one after a new folder was begun lists that one too.
    """
    monkeypatch.setattr(limits, "LIST_PAGE_OBJECTS", 6)
    monkeypatch.setattr(limits, "COMMITS_PER_FOLDER", 4)
    place = Counted(azure_bucket, azure_proxy)
    with place.open(create=True) as store:
        run = store.run("r")
        for step in range(1, 18):
            run.save({"w": step}, step=step)
            place.note(f"save {step}")
        assert [version.step for version in run.versions()] == list(range(1, 18))
    listings = [place.steps[f"save {step}"]["GET"] for step in range(2, 18)]
    within_a_page, later = listings[:6], listings[8:]
    assert within_a_page == [2] * 6  # as on S3
    assert later == [4, 4, 4, 8] * 2  # eight where a folder was begun
    assert max(listings) == 9  # where the log has just outgrown a page
