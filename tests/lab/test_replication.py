"""A local store to the S3 of Ceph and on to a second local store: all of it, bit by bit."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from buckets import S3Bucket
from faultproxy import Fault, FaultProxy, Kind
from labkit.campaign import moment, rounds
from labkit.systems import Ceph

import ckptstore
from ckptstore.errors import StoreNotFoundError

REQUESTS_MAX = 10
"""For a repetition with nothing to do, however many versions and runs there are."""


@pytest.fixture
def gateway(ceph: Ceph) -> Iterator[FaultProxy]:
    """Return a proxy before the gateway, which counts."""
    port = int(ceph.options()["endpoint_url"].rsplit(":", 1)[1].rstrip("/"))
    with FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def archive(
    ceph: Ceph, gateway: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return URL and options of a place in a new bucket, reached through the proxy."""
    with S3Bucket(ceph.options()["endpoint_url"]) as bucket:
        for name, value in bucket.chain().items():
            monkeypatch.setenv(name, value)
        yield bucket.url, {"endpoint_url": f"http://127.0.0.1:{gateway.port}"}


def _state(step: int) -> dict[str, Any]:
    """Return a state of a model, its optimizer and all that makes a restart exact."""
    torch.manual_seed(step // 3)
    weight = torch.randn(512, 600)
    weight[step] += step
    model = {
        "embed.weight": weight, "head.weight": weight,
        "bf16": torch.randn(300, 300).to(torch.bfloat16), "norm.scale": torch.full((), float(step)),
        "empty": torch.zeros(0, 4), "mask": torch.rand(1000) > 0.5,
        "nan": torch.tensor([math.nan, -math.inf, -0.0]),
    }  # fmt: skip
    return {
        "model": model, "optimizer": {"exp_avg": torch.randn(512, 600) / (step + 1), "step": step},
        "rng": torch.get_rng_state(), "epoch": step, "schedule": [0.1, {"warmup": 10}],
    }  # fmt: skip


_SAID: Final = ((3.0, "auto"), (2.0, "delta"), (math.nan, "raw"), (math.inf, "planes"))
"""Metric and codec of the first versions."""


def _train(folder: Path) -> ckptstore.Store:
    """Return a store with a rollback, forks of forks, tags, pins, late metrics, several codecs."""
    store = ckptstore.open(folder, create=True)
    run = store.run("gpt", metrics={"loss": "min", "bleu": "max"})
    for step, (loss, codec) in enumerate(_SAID, 1):
        metrics, metadata = {"loss": loss}, {"lr": 1 / step}
        run.save(_state(step), step=step, codec=codec, metrics=metrics, metadata=metadata)
    run.rollback("2")
    run.save(_state(5), step=5, metrics={"loss": 1.5}, encodings={"optimizer.*": "bf16"})
    store.fork("gpt@2", "tuned", roles=["weights"])
    tuned = store.run("tuned")
    tuned.save(_state(6), step=6, tags=["release"])
    store.fork("tuned@6", "further")
    store.run("further").save(_state(7), step=7)
    store.annotate("gpt@1", {"bleu": 31.0})
    store.tag("gpt@2", "chosen")
    return store


def _catalog(store: ckptstore.Store) -> dict[str, Any]:
    """Return what every store must say alike."""
    runs = {
        info.name: (dict(info.metrics), info.head, dict(info.tags), info.origin)
        for info in store.runs()
    }
    versions = {
        one.id: (
            one.run, one.step, one.parent, one.created_at, one.content, one.tags, one.metadata,
            one.level, one.abandoned, {name: repr(value) for name, value in one.metrics.items()},
        )
        for one in store.versions()
    }  # fmt: skip
    return {"runs": runs, "versions": versions}


def _same(first: Any, second: Any) -> bool:  # noqa: ANN401
    """Say whether two states are equal in every bit, NaN and signs of zero too."""
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in (first, second)]
        return same and torch.equal(*flat)
    if isinstance(first, dict):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and first == second


def _counting() -> tuple[Fault, Fault]:
    """Return two counters: of pack uploads, and of other requests."""
    never = 1 << 60
    return (
        Fault(kind=Kind.DELAY, method="PUT", path="/packs/", skip=never),
        Fault(kind=Kind.DELAY, skip=never),
    )


def test_there_and_on_to_a_third_store(
    tmp_path: Path, archive: tuple[str, dict[str, Any]], gateway: FaultProxy
) -> None:
    """Catalogs, metrics, forks and tags are equal in all three stores, and all states bit by bit.

    A repetition of either step moves no pack, and takes less than 10 requests at the gateway.
    """
    url, options = archive
    with _train(tmp_path / "hot") as hot:
        with ckptstore.open(url, create=True, **options) as cold:
            there = hot.replicate(cold)
        with (
            ckptstore.open(url, **options) as cold,
            ckptstore.open(tmp_path / "b", create=True) as b,
        ):
            back = cold.replicate(b)
            assert _catalog(hot) == _catalog(cold) == _catalog(b)
            assert len(there.copied) == len(back.copied) == len(hot.versions())
            assert there.checked
            assert there.noted
            for version in hot.versions():
                expected = hot.load(f"#{version.id}")
                for other in (cold, b):
                    found = other.load(f"#{version.id}")
                    assert _same(found, expected), (other.url, version)
                    if "head.weight" in found["model"]:
                        model = found["model"]
                        assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
            assert all(store.verify().ok for store in (hot, cold, b))
            assert b.resolve("gpt@best:loss").id == hot.resolve("gpt@best:loss").id

        counted = {}
        with ckptstore.open(url, **options) as cold, ckptstore.open(tmp_path / "b") as b:
            for name, source, target in (("there", hot, cold), ("back", cold, b)):
                packs, others = _counting()
                gateway.set(packs, others)
                report = source.replicate(target)
                gateway.set()
                assert (report.copied, report.chunk_bytes) == ((), 0)
                assert packs.seen == 0
                counted[name] = others.seen
        print(f"requests of a repetition: {counted}")  # noqa: T201
        assert all(count < REQUESTS_MAX for count in counted.values()), counted


def test_a_command_with_nothing_to_do(
    tmp_path: Path, archive: tuple[str, dict[str, Any]], gateway: FaultProxy
) -> None:
    """The same for a process that opens both stores first: less than 10 requests in all."""
    url, options = archive
    _train(tmp_path / "hot").close()
    for _ in range(2):
        packs, others = _counting()
        gateway.set(packs, others)
        began = time.monotonic()
        with (
            ckptstore.open(tmp_path / "hot") as hot,
            ckptstore.open(url, create=True, **options) as cold,
        ):
            hot.replicate(cold)
        seconds = time.monotonic() - began
        gateway.set()
        print(f"packs {packs.seen}, other requests {others.seen}, {seconds:.2f} s")  # noqa: T201
    assert packs.seen == 0
    assert others.seen < REQUESTS_MAX


_JOB: Final = """
[source]
url = "{folder}/hot"
[target]
url = "{url}"
options = {{ endpoint_url = "{endpoint_url}" }}
[retain]
evict = "last 1"
[gc]
source = true
grace = "1s"
"""
_COMMAND: Final = "from ckptstore.cli.main import main; main()"


def _run_job(file: Path, *, killed_after_s: float | None = None) -> tuple[int, float]:
    """Run ``ckptstore archive``, perhaps kill it; return its exit code and how long it took."""
    began = time.monotonic()
    words = [sys.executable, "-c", _COMMAND, "archive", "--job", str(file), "--quiet"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            process.wait(killed_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode in (0, -signal.SIGKILL), said[-2000:]
    return process.returncode, time.monotonic() - began


def _whole(store: ckptstore.Store, expected: dict[str, Any]) -> set[str]:
    """Load all that a store shows, and return the ids."""
    there = [version.id for version in store.versions() if version.level != "record"]
    for version_id in there:
        assert _same(store.load(f"#{version_id}"), expected[version_id]), (store.url, version_id)
    return set(there)


@pytest.mark.timeout(3600)
def test_killed_jobs(tmp_path: Path, archive: tuple[str, dict[str, Any]]) -> None:
    """SIGKILL at any moment of a job to the S3 of Ceph: nothing is lost, what shows loads.

    The job evicts and collects; each version is whole in one store at least. What was done is
    printed as it goes, so that a run that is ended early says how far it came.
    """
    url, options = archive
    _train(tmp_path / "first").close()
    with ckptstore.open(tmp_path / "first", read_only=True) as first:
        expected = {version.id: first.load(f"#{version.id}") for version in first.versions()}
    figures: Counter[str] = Counter()
    place, number, took_s = "", 0, 0.0
    for turn in range(rounds(4, 140)):
        if not place:
            place, number = f"{url}-{turn}", number + 1
            shutil.rmtree(tmp_path / "hot", ignore_errors=True)
            shutil.copytree(tmp_path / "first", tmp_path / "hot")
            file = tmp_path / "job.toml"
            file.write_text(_JOB.format(folder=tmp_path, url=place, **options))
        at_s = moment(turn, 0.3 * took_s, took_s) if turn else None
        code, seconds = _run_job(file, killed_after_s=at_s)
        took_s = took_s if turn else seconds
        figures["killed" if code else "ended"] += 1
        with ckptstore.open(tmp_path / "hot") as hot:
            whole = _whole(hot, expected)
            figures["killed after an eviction"] += bool(code and len(whole) < len(expected))
        try:
            with ckptstore.open(place, **options) as cold:
                there = _whole(cold, expected)
                assert not cold.verify().damaged_versions
        except StoreNotFoundError:
            there = set()
        figures["killed among the copies"] += bool(code and 0 < len(there) < len(expected))
        assert whole | there == expected.keys()
        if not code:
            assert there == expected.keys()
            place = ""
        print(f"round {turn}: {dict(figures)}", file=sys.__stderr__, flush=True)
    assert _run_job(file)[0] == 0
    print(f"{dict(figures)}, {number} stores, a job takes {took_s:.1f} s")  # noqa: T201
