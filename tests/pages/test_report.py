"""The report: one file that holds the documents, and no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pagekit import EVIL

import ckptstore
from ckptstore.errors import RunNotFoundError, StorageError
from ckptstore.pages.report_file import report, write_report
from ckptstore.pages.site import page

_DATA = re.compile(rb'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def _documents(html: bytes) -> dict[str, Any]:
    (data,) = _DATA.findall(html)
    found: dict[str, Any] = json.loads(data)["documents"]
    return found


def test_the_report_holds_the_documents(store: ckptstore.Store) -> None:
    """Those that the page shows first, as the server gives them; time aside."""
    found = _documents(report(store))
    gpt, best = store.resolve("gpt"), store.resolve("lora")
    assert {"overview", "health", "storage", "lineage"} < found.keys()
    assert {f"run {name}" for name in ("gpt", "lora", "other")} < found.keys()
    assert {f"version {gpt.id}", f"version {best.id}", f"diff {gpt.id} {gpt.id}"} < found.keys()
    served = page(store, "/page/run.json", {"run": "gpt"})
    assert served is not None
    assert found["run gpt"] == json.loads(served.body)


def test_the_report_is_bounded(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left out, never the list of runs."""
    whole = _documents(report(store))
    monkeypatch.setattr("ckptstore.pages.report_file._BYTES_MAX", 8000)
    found = _documents(report(store))
    assert {"overview", "health"} <= found.keys() < whole.keys()
    assert len(json.dumps(found)) < 12_000
    monkeypatch.setattr("ckptstore.pages.report_file._BYTES_MAX", 1)
    assert _documents(report(store)).keys() == {"overview"}


def test_texts_of_the_store_are_inert(store: ckptstore.Store) -> None:
    """Paths, notes and reasons with markup end no script and begin none."""
    html = report(store)
    assert html.count(b"<script") == html.count(b"</script") == 2
    assert b"alert(1)" in html
    tensors = _documents(html)[f"version {store.resolve('gpt').id}"]["tensors"]
    assert EVIL in [one["path"] for one in tensors]


def test_only_the_scripts_of_the_page_may_run(store: ckptstore.Store) -> None:
    """The policy names style and script by their digests, and no server at all."""
    html = report(store)
    policy = re.findall(rb'Content-Security-Policy" content="([^"]*)"', html)[0]
    for tag, name in ((rb"<script>(.*)</script>", b"script"), (rb"<style>(.*)</style>", b"style")):
        (text,) = re.findall(tag, html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest())
        assert name + b"-src 'sha256-" + digest + b"'" in policy
    assert b"unsafe" not in policy
    assert b'src="' not in html
    assert b'rel="stylesheet"' not in html


def test_a_report_of_one_run(store: ckptstore.Store) -> None:
    """Its curves and versions alone; a run that is not there is an error."""
    found = _documents(report(store, run="lora"))
    assert [key for key in found if key.startswith("run ")] == ["run lora"]
    assert [run["name"] for run in found["overview"]["runs"]] == ["lora"]
    assert not {"health", "storage", "lineage"} & found.keys()  # they are of all runs
    with pytest.raises(RunNotFoundError, match="there is no run"):
        report(store, run="lor")


def test_a_report_appears_whole(store: ckptstore.Store, tmp_path: Path) -> None:
    """It replaces a file of its name; where it cannot be written nothing is left behind."""
    path = tmp_path / "a.html"
    path.write_text("old")
    assert write_report(store, path) == path.stat().st_size
    assert path.read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(StorageError, match="cannot be written"):
        write_report(store, tmp_path / "none" / "a.html")
    assert [one.name for one in tmp_path.iterdir()] == ["a.html"]
