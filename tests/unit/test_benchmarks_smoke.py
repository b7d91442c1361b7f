"""The benchmarks run: each suite once, tiny, and the page is made of what it writes.

No figure is judged here but those that do not depend on the machine.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import Server

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))  # benchmarks/ is not installed; it runs from the source tree

from benchmarks import (  # noqa: E402 - after the path
    async_saves,
    catalog,
    codecs,
    failures,
    local,
    page,
    s3,
    scale,
)
from benchmarks.disk import Workspace, workspace  # noqa: E402
from benchmarks.measure import Measured, Result  # noqa: E402
from benchmarks.results import read_result, write_result  # noqa: E402

_PAGE = _ROOT / "docs" / "benchmarks.md"


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    """Return a workspace of this test alone."""
    with warnings.catch_warnings(), workspace(tmp_path) as space:
        warnings.simplefilter("ignore")  # the peers warn about themselves
        yield space


def _check(result: Result, tmp_path: Path) -> None:
    """Assert that nothing failed, and that JSON and page can be made."""
    failed = [one for rows in result.tables.values() for one in rows if one.error]
    assert failed == []
    result.header |= {"seconds_in_all": 1.0, "load_average_after": [0.0, 0.0, 0.0]}
    write_result(tmp_path, result)
    again = read_result(tmp_path, result.benchmark)
    assert again is not None
    assert again.tables.keys() == result.tables.keys()
    copy = tmp_path / "docs" / "page.md"
    copy.parent.mkdir()
    shutil.copy(_PAGE, copy)
    page.write_page(copy, tmp_path)
    assert result.header["commit"] in copy.read_text()


def _row(rows: list[Measured], name: str) -> Measured:
    return next(one for one in rows if one.name == name)


def test_local(space: Workspace, tmp_path: Path) -> None:
    """Saves and loads of all peers are right, and an unchanged re-save stores no tensor again."""
    result = local.run(
        space, bytes_min=300_000, rounds=1, training_steps=2, peaks=["ckptstore raw"]
    )
    _check(result, tmp_path)
    saves = result.tables["save"]
    assert _row(saves, "ckptstore auto").numbers["pack_bytes"] > 0
    assert _row(saves, "ckptstore auto, nothing changed").numbers["pack_bytes"] == 0


def test_codecs(space: Workspace, tmp_path: Path) -> None:
    """Every codec gives back what it got, and planes beat plain zstd on trained weights."""
    result = codecs.run(space, bytes_min=1 << 20, rounds=1, training_steps=2)
    _check(result, tmp_path)
    rows = result.tables["fp32 master weights"]
    ours, plain = (
        _row(rows, name).numbers["stored_bytes"]
        for name in ("ckptstore auto", "zstd -1, bytes as they are")
    )
    assert ours < plain


def test_catalog(space: Workspace, tmp_path: Path) -> None:
    """Commits of two processes all arrive; the log is sound; history costs no request of gc."""
    result = catalog.run(
        space,
        versions=300,
        tensors=50,
        commits=8,
        rounds=1,
        chunks=300,
        histories=[(400, 60), (1200, 60)],
        processes=(2,),
    )
    _check(result, tmp_path)
    assert sum(result.facts["cold ls"]["after a snapshot"].values()) == 5
    for fork in (one.numbers for one in result.tables["fork"]):
        assert fork["read_bytes"] == fork["manifest_bytes"]
    few, many = (one.numbers for one in result.tables["collections"])
    assert few["requests"] == many["requests"]


def test_scale(space: Workspace, tmp_path: Path) -> None:
    """Simulated writers all commit; equal seeds give equal figures; no one really waits."""
    sizes: dict[str, Any] = {
        "writers": [3, 12],
        "trainings": 4,
        "intervals_s": [60.0],
        "ranks": [2],
    }
    result = scale.run(space, **sizes)
    _check(result, tmp_path)
    assert [one.numbers["commits"] for one in result.tables["at once"]] == [3, 12, 3, 12]
    assert all(one.numbers["gave_up"] == 0 for one in result.tables["spread"])
    again = scale.run(space, **sizes)
    for name in ("at once", "spread"):
        before, after = ([one.numbers for one in each.tables[name]] for each in (result, again))
        assert before == after


def test_failures(space: Workspace, tmp_path: Path) -> None:
    """No provoked failure is passed off as success by ckptstore, and the peers' rows are there."""
    result = failures.run(space, flips=5, tries=1)
    _check(result, tmp_path)
    rows = result.facts["rows"]
    assert [row for row in rows if row["tool"].startswith("ckptstore") and row["silent"]] == []
    assert {row["tool"] for row in rows} >= {"torch.save", "safetensors", "DCP", "ckptstore"}
    for fault in ("ENOSPC in threads", "HTTP 500", "connection cut", "server dead"):
        told = [row for row in rows if row["fault"].startswith(fault)]
        assert {row["tool"].split()[0].rstrip(",") for row in told} == {"DCP", "ckptstore"}


def test_async(space: Workspace, tmp_path: Path) -> None:
    """Saves in the background go on beside a training; no failure is passed off as success."""
    result = async_saves.run(
        space, bytes_min=300_000, rounds=1, training_steps=2, window_s=0.05, saves=1, tries=1
    )
    _check(result, tmp_path)
    rows = result.facts["rows"]
    assert [row for row in rows if row["tool"].startswith("ckptstore") and row["silent"]] == []
    assert _row(result.tables["stall"], "ckptstore, process").numbers["durable_s"] > 0


def test_s3(
    space: Workspace, tmp_path: Path, moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways to keep a state on S3 load what they saved."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    result = s3.run(space, bytes_min=300_000, rounds=1, training_steps=2)
    assert result is not None
    _check(result, tmp_path)
